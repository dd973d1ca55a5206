"""Pairs of views of DL3DV-10K, and a made-up scene in its layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, PositiveInt, Probability
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.vision.benchmarks.dl3dv import (
    SceneViews,
    View,
    distance_between,
    find_scenes,
    read_scene,
    relative_pose,
    scene_name,
    turn_between,
)
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter, SplitFiles
from mmrl.vision.media.media_columns import MediaRef
from mmrl.vision.media.media_root import MediaRoot
from mmrl.vision.media.video import MediaError


@builder
class Dl3dvPairs:
    """Draw pairs of views of one scene from DL3DV-10K (arXiv 2312.16256) as it lies on disk.

    A row holds two `images`, their frame numbers, intrinsics (fx, fy, cx, cy in shares of the picture), the
    (4, 4) `pose` that takes points from the first camera to the second (axes of OpenCV), the `turn` between
    them in degrees and their `distance`, and the scene. Frames stand `nearest` to `farthest` frames apart.
    Whole scenes go to the test split, about a share `test_share`, the same ones in every run. `exclude` is a
    file with a scene's hash a line, such as those of the benchmark, which are left out. Media stay in place
    (`root` is where paths begin) unless `copy`. Scenes that cannot be read are errors, or with `bad_rows:
    drop` named in the manifest; frames without a picture are counted.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        root: str,
        pairs_per_scene: PositiveInt = 8,
        nearest: Annotated[PositiveInt, AtMost("farthest")] = 1,
        farthest: PositiveInt = 30,
        images: str = "",
        exclude: str = "",
        test_share: Probability = 0.05,
        copy: bool = False,
        bad_rows: Literal["error", "drop"] = "error",
    ) -> None:
        if not 1 <= nearest <= farthest:
            raise ValueError(
                f"frames cannot stand {nearest} to {farthest} apart; wanted 1 <= nearest <= farthest"
            )
        self.stream, self.root, self.pairs_per_scene = stream, Path(root), pairs_per_scene
        self.nearest, self.farthest, self.images = nearest, farthest, images
        self.exclude = set(Path(exclude).read_text().split()) if exclude else set()
        self.test_share, self.copy, self.bad_rows = test_share, copy, bad_rows

    def build(self, output: Path) -> dict[str, Any]:
        """Write the pairs, and tell how many."""
        ledger, files = BuildLog(self.bad_rows), SplitFiles(output)
        media = MediaWriter(MediaRoot(self.root, cache_bytes=0), output)
        missing = 0
        for folder in find_scenes(self.root):
            if scene_name(folder) in self.exclude:
                continue
            try:
                scene = read_scene(folder, self.images)
                rows = [self._row(scene, *pair, media) for pair in self._pairs(scene)]
            except MediaError as error:
                ledger.drop(str(folder.relative_to(self.root)), str(error))
                continue
            missing += len(scene.missing)
            draw = torch.rand((), generator=self.stream.fixed("split", scene.name))
            split = "test" if float(draw) < self.test_share else "train"
            for row in rows:
                files.add(split, row)
            ledger.kept[split] += len(rows)
        files.close()
        told = {"source": "DL3DV-10K layout", "seed": self.stream.seed, "frames_without_picture": missing}
        return ledger.finish(output, told) | ({"frames_without_picture": missing} if missing else {})

    def _pairs(self, scene: SceneViews) -> list[tuple[View, View]]:
        """Draw pairs whose frames stand as far apart as wanted."""
        near = [
            (one, other)
            for i, one in enumerate(scene.views)
            for other in scene.views[i + 1 :]
            if self.nearest <= other.index - one.index <= self.farthest
        ]
        if not near:
            raise MediaError(f"no two of its {len(scene.views)} frames stand as far apart as wanted")
        order = torch.randperm(len(near), generator=self.stream.fixed("pairs", scene.name)).tolist()
        return [near[i] for i in sorted(order[: self.pairs_per_scene])]

    def _row(self, scene: SceneViews, one: View, other: View, media: MediaWriter) -> dict[str, Any]:
        home = self.root.resolve()
        paths = [view.path.resolve().relative_to(home).as_posix() for view in (one, other)]
        shown = [media.put(MediaRef("image", path)) for path in paths] if self.copy else paths
        return {
            "id": f"{scene.name}#{one.index}-{other.index}",
            "scene": scene.name,
            "images": shown,
            "frames": [one.index, other.index],
            "intrinsics": [list(one.intrinsics), list(other.intrinsics)],
            "pose": relative_pose(one, other).tolist(),
            "turn": turn_between(one, other),
            "distance": distance_between(one, other),
        }


@builder
class SyntheticScenes:
    """Draw made-up scenes in the layout of DL3DV-10K, whose own pictures may not be passed on.

    A camera walks around a floor of coloured tiles under a sky; every pixel is cast on it exactly, so poses
    and pictures agree. Writes `1K/<hash>/{transforms.json, images_8/frame_00001.png, ...}`.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        num_scenes: PositiveInt = 4,
        num_frames: PositiveInt = 24,
        width: PositiveInt = 96,
        height: PositiveInt = 56,
    ) -> None:
        self.stream, self.num_scenes, self.num_frames = stream, num_scenes, num_frames
        self.width, self.height = width, height

    def build(self, output: Path) -> dict[str, Any]:
        """Write the scenes, and tell how many."""
        for number in range(self.num_scenes):
            generator = self.stream.fixed("scene", number)
            name = "".join(f"{v:x}" for v in torch.randint(16, (64,), generator=generator).tolist())
            tiles = torch.randint(40, 256, (16, 16, 3), generator=generator, dtype=torch.uint8)
            self._write(output / "1K" / name, tiles, 2 * math.pi * float(torch.rand((), generator=generator)))
        return {"scenes": self.num_scenes, "frames": self.num_scenes * self.num_frames}

    def _write(self, folder: Path, tiles: Tensor, start: float) -> None:
        from PIL import Image

        (folder / "images_8").mkdir(parents=True, exist_ok=True)
        focal = 0.9 * self.width
        frames = []
        for index in range(1, self.num_frames + 1):
            pose = walk(start + index / self.num_frames * math.pi / 2)
            name = f"frame_{index:05d}.png"
            pixels = cast(pose, tiles, self.width, self.height, focal)
            Image.fromarray(pixels.numpy()).save(folder / "images_8" / name)
            frames.append({"file_path": f"images/{name}", "transform_matrix": pose.tolist()})
        size = {"w": 8 * self.width, "h": 8 * self.height, "cx": 4 * self.width, "cy": 4 * self.height}
        lens = {"fl_x": 8 * focal, "fl_y": 8 * focal, "k1": 0.0, "k2": 0.0, "p1": 0.0, "p2": 0.0}
        camera = {**size, **lens, "camera_model": "OPENCV", "frames": frames}
        (folder / "transforms.json").write_text(json.dumps(camera))


def walk(angle: float) -> Tensor:
    """Place a camera on a circle of radius 3 at height 1.5, looking at the middle: (4, 4) camera to world
    with the axes of OpenGL; the world's Z is up."""
    eye = torch.tensor([3 * math.cos(angle), 3 * math.sin(angle), 1.5], dtype=torch.float64)
    back = eye / eye.norm()
    right = torch.linalg.cross(torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), back)
    right = right / right.norm()
    pose = torch.eye(4, dtype=torch.float64)
    pose[:3] = torch.stack([right, torch.linalg.cross(back, right), back, eye], 1)
    return pose


def cast(pose: Tensor, tiles: Tensor, width: int, height: int, focal: float) -> Tensor:
    """See the floor (height 0, tiles of half a unit) through every pixel's middle: (height, width, 3)
    uint8."""
    rows = (torch.arange(height, dtype=torch.float64) + 0.5 - height / 2) / focal
    columns = (torch.arange(width, dtype=torch.float64) + 0.5 - width / 2) / focal
    along = torch.stack([columns.expand(height, -1), -rows[:, None].expand(-1, width)], -1)
    rays = torch.cat([along, -torch.ones(height, width, 1, dtype=torch.float64)], -1) @ pose[:3, :3].T
    down = rays[..., 2] < -1e-6
    reach = torch.where(down, -pose[2, 3] / rays[..., 2].clamp(max=-1e-6), 0.0)
    spot = (pose[:2, 3] + reach[..., None] * rays[..., :2]) / 0.5
    at = spot.floor().long() % len(tiles)
    sky = torch.tensor([150, 190, 230], dtype=torch.uint8)
    return torch.where(down[..., None], tiles[at[..., 0], at[..., 1]], sky)
