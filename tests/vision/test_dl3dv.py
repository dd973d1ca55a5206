"""DL3DV-10K on disk: cameras, frames, and pairs of views that agree with their images."""

from __future__ import annotations

import json
import math

import pytest
import torch
from PIL import Image

from examples.preference_pairs.synthetic_scenes import SyntheticScenes, cast, walk
from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Frames
from mmrl.data.dataset_io import RowError, Rows, valid_rows
from mmrl.data.media_root import decode_image
from mmrl.data.video import MediaError
from mmrl.vision.builders.dl3dv_pairs import (
    FLIP,
    Dl3dvPairs,
    find_scenes,
    read_scene,
    relative_pose,
    scene_name,
    turn_between,
)
from mmrl.vision.checks.media_files import split_leakage, unreadable_media


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dl3dv")
    assert SyntheticScenes(stream=Stream(3), num_scenes=3, num_frames=6).build(folder) == {
        "scenes": 3,
        "frames": 18,
    }
    return folder


def changed(data, tmp_path, change, name="1K/" + "a" * 64):
    """Copy a scene, changed."""
    import shutil

    folder = tmp_path / "data" / name
    shutil.copytree(find_scenes(data)[0], folder)
    raw = json.loads((folder / "transforms.json").read_text())
    change(raw, folder)
    (folder / "transforms.json").write_text(json.dumps(raw))
    return folder


def nothing(raw, folder):
    pass


def test_a_pose_turned_to_opencv_and_back_is_itself():
    pose = walk(0.7)
    assert torch.equal(pose @ FLIP @ FLIP, pose)
    # +Y up becomes +Y down, looking along -Z becomes looking along +Z; the place stays
    turned = pose @ FLIP
    assert torch.equal(turned[:, 1], -pose[:, 1]) and torch.equal(turned[:, 2], -pose[:, 2])
    assert torch.equal(turned[:, 3], pose[:, 3]) and torch.equal(turned[:, 0], pose[:, 0])


def test_intrinsics_are_fractions_of_the_full_image_whatever_the_folder_contains(data):
    view = read_scene(find_scenes(data)[0]).views[0]
    # the file says 8 times the width of the images
    assert view.intrinsics == pytest.approx((0.9, 0.9 * 96 / 56, 0.5, 0.5))


def test_frames_are_sorted_by_name_and_looked_up_in_the_folder_there_is(data, tmp_path):
    def change(raw, folder):
        raw["frames"] = raw["frames"][::-1]
        for frame in raw["frames"]:
            frame["file_path"] = frame["file_path"].replace("images/", "C:\\elsewhere\\")
        (folder / "images_8" / "frame_00003.png").unlink()
        Image.open(folder / "images_8" / "frame_00004.png").save(folder / "images_8" / "frame_00004.jpg")
        (folder / "images_8" / "frame_00004.png").unlink()

    scene = read_scene(changed(data, tmp_path, change))
    assert [view.index for view in scene.views] == [1, 2, 4, 5, 6]
    assert scene.missing == ("frame_00003.png",) and scene.views[2].path.suffix == ".jpg"


def test_scenes_are_found_in_both_layouts(data, tmp_path):
    changed(data, tmp_path, nothing)
    changed(data, tmp_path, nothing, "b" * 64 + "/nerfstudio")
    assert [scene_name(folder) for folder in find_scenes(tmp_path / "data")] == ["a" * 64, "b" * 64]


def test_cameras_of_single_frames_come_first(data, tmp_path):
    def change(raw, folder):
        raw["frames"][0] |= {"fl_x": 96.0, "w": 96, "h": 56, "fl_y": 56.0, "cx": 24, "cy": 14}

    views = read_scene(changed(data, tmp_path, change)).views
    assert views[0].intrinsics == (1.0, 1.0, 0.25, 0.25)
    assert views[1].intrinsics[2:] == (0.5, 0.5)


def drop_frames(raw, folder):
    raw["frames"] = []


def drop_width(raw, folder):
    del raw["w"]


def portrait(raw, folder):
    raw["w"], raw["h"] = raw["h"], raw["w"]


def no_images(raw, folder):
    (folder / "images_8").rename(folder / "other")


def flat_pose(raw, folder):
    raw["frames"][0]["transform_matrix"] = [[1, 0, 0, 0]] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_frames, "lists no frames"),
        (drop_width, "KeyError: 'w'"),
        (portrait, "is 96x56, but its camera is 0.583 times as wide as high"),
        (no_images, "has no folder of images; looked for images_8, images_4"),
        (flat_pose, r"transform_matrix must be 4 by 4 and finite, not \(3, 4\)"),
    ],
)
def test_scenes_that_do_not_fit_are_refused(data, tmp_path, change, message):
    with pytest.raises(MediaError, match=message):
        read_scene(changed(data, tmp_path, change))


def test_views_of_a_walk_turn_as_far_as_they_walk(data):
    views = read_scene(find_scenes(data)[0]).views
    # six frames over a quarter of a circle: 15 degrees around the upright axis, seen from a tilted camera
    step = turn_between(views[0], views[1])
    assert 0 < step < turn_between(views[0], views[3]) and step == pytest.approx(15.0, abs=1e-6)
    back = relative_pose(views[1], views[0]) @ relative_pose(views[0], views[1])
    torch.testing.assert_close(back, torch.eye(4, dtype=torch.float64))


def test_images_agree_with_their_poses(data):
    """A point of the floor has one colour in both views, where the pose says it is."""
    one, other = read_scene(find_scenes(data)[0]).views[:2]
    first, second = (
        decode_image(view.path, "view").pixels[0].permute(1, 2, 0).int() for view in (one, other)
    )
    fx, fy, cx, cy = one.intrinsics
    height, width = first.shape[:2]
    agreed = tried = 0
    for row in range(height // 2 + 8, height, 2):
        for column in range(0, width, 2):
            ray = torch.tensor(
                [((column + 0.5) / width - cx) / fx, ((row + 0.5) / height - cy) / fy, 1.0]
            ).double()
            world = one.pose[:3, :3] @ ray
            point = one.pose[:3, 3] - one.pose[2, 3] / world[2] * world
            seen = torch.linalg.inv(other.pose)[:3] @ torch.cat([point, torch.ones(1)]).double()
            x, y = (seen[:2] / seen[2]).tolist()
            there = int((fx * x + cx) * width), int((fy * y + cy) * height)
            if 0 <= there[0] < width and 0 <= there[1] < height:
                tried += 1
                agreed += bool((first[row, column] == second[there[1], there[0]]).all())
    assert tried > 300 and agreed > 0.8 * tried  # the rest stands at the edges of tiles


def test_cast_sees_sky_above_and_tiles_below():
    tiles = torch.tensor([[[9, 9, 9]]], dtype=torch.uint8)
    seen = cast(walk(0.0), tiles, 8, 64, 8.0)
    assert seen[0, 0].tolist() == [150, 190, 230] and seen[-1, 0].tolist() == [9, 9, 9]


def pairs(data, output, **options):
    return Dl3dvPairs(stream=Stream(0), root=str(data), **options).build(output)


def test_pairs_are_as_far_apart_as_configured(data, tmp_path):
    counts = pairs(data, tmp_path, pairs_per_scene=4, nearest=2, farthest=3, test_share=0.0, copy=True)
    assert counts == {"train": 12}
    rows = [row.columns for row in valid_rows(tmp_path / "train.jsonl")]
    for row in rows:
        first, second = row["frames"]
        assert 2 <= second - first <= 3 and row["turn"] == pytest.approx(15 * (second - first))
        # a chord of the circle of radius 3
        chord = 2 * 3 * math.sin(math.radians(7.5 * (second - first)))
        assert row["distance"] == pytest.approx(chord, abs=5e-6)
        assert torch.tensor(row["pose"]).shape == (4, 4)
        loaded = decode_image(tmp_path / row["images"][0], "a")
        assert type(loaded) is Frames and loaded.pixels.shape == (1, 3, 56, 96)
    assert len({row["id"] for row in rows}) == 12
    assert not list(unreadable_media(Rows(tmp_path, tmp_path)))


def test_pairs_keep_scenes_whole_and_leave_the_benchmark_out(data, tmp_path):
    name = scene_name(find_scenes(data)[0])
    (tmp_path / "benchmark.txt").write_text(name + "\n")
    pairs(data, tmp_path / "out", exclude=str(tmp_path / "benchmark.txt"), test_share=0.5)
    found = {row.columns["scene"]: row.split for row in valid_rows(tmp_path / "out")}
    assert name not in found and len(found) == 2
    assert not list(split_leakage(Rows(tmp_path / "out", data)))
    again = pairs(data, tmp_path / "again", exclude=str(tmp_path / "benchmark.txt"), test_share=0.5)
    assert again == {split: 8 * list(found.values()).count(split) for split in set(found.values())}


def test_pairs_name_scenes_that_cannot_be_read(data, tmp_path):
    changed(data, tmp_path, nothing)
    changed(data, tmp_path, portrait, "1K/" + "c" * 64)
    counts = pairs(tmp_path / "data", tmp_path / "out", test_share=0.0, bad_rows="drop")
    assert counts == {"train": 8, "dropped": 1}
    with pytest.raises(RowError, match=r"1K/c+: .*its camera is 0\.583"):
        pairs(tmp_path / "data", tmp_path / "strict")
    with pytest.raises(ValueError, match="nearest"):
        options = {"root": "x", "nearest": 3, "farthest": 2}
        Pieces(Stream()).make("builder", Piece("vision.dl3dv_pairs", options))
    with pytest.raises(RowError, match="no two of its 6 frames are 20 to 30 apart"):
        pairs(data, tmp_path / "far", nearest=20, farthest=30)
