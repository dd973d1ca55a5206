"""Media stay inside their folder and their limits, stand upright, and are decoded once."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from PIL import Image

from examples.video_grounding.spliced_videos import write_video
from mmrl.core.byte_lru import ByteLRU
from mmrl.data import media_root as media_module
from mmrl.data import video
from mmrl.data.media import locate, read_image
from mmrl.data.media_root import MediaRoot
from mmrl.data.video import FrameSampling, MediaError

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def painted(path, *, width=4, height=2, **options):
    """Write a green image with a red corner at the top left and a blue one at the top right."""
    image = Image.new("RGB", (width, height), GREEN)
    image.putpixel((0, 0), RED)
    image.putpixel((width - 1, 0), BLUE)
    image.save(path, **options)
    return path


@pytest.fixture
def root(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "secret.png").write_bytes(painted(tmp_path / "media" / "a.png").read_bytes())
    return MediaRoot(tmp_path / "media")


def test_an_image_is_decoded_as_one_frame(root):
    medium = root.image("a.png")
    assert (medium.kind, medium.name) == ("image", "a.png")
    frames = medium.load()
    assert frames.pixels.shape == (1, 3, 2, 4)
    assert frames.pixels.dtype == torch.uint8
    assert frames.times.tolist() == [0]
    assert frames.pixels[0, :, 0, 0].tolist() == list(RED)
    assert frames.pixels[0, :, 0, 3].tolist() == list(BLUE)


@pytest.mark.parametrize(
    ("orientation", "shape", "red", "blue"),
    [
        (1, (2, 4), (0, 0), (0, 3)),
        (2, (2, 4), (0, 3), (0, 0)),  # mirrored
        (3, (2, 4), (1, 3), (1, 0)),  # half a turn
        (6, (4, 2), (0, 1), (3, 1)),  # to be turned clockwise
        (8, (4, 2), (3, 0), (0, 0)),  # to be turned counter-clockwise
    ],
)
def test_an_image_is_shown_as_its_exif_orientation_says(root, orientation, shape, red, blue):
    exif = Image.Exif()
    exif[0x0112] = orientation
    painted(root.root / "turned.png", exif=exif)
    pixels = root.image("turned.png").load().pixels[0]
    assert pixels.shape[1:] == shape
    assert pixels[:, *red].tolist() == list(RED)
    assert pixels[:, *blue].tolist() == list(BLUE)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK"])
def test_images_of_any_mode_become_three_channels(root, mode):
    name = "p.tiff" if mode == "CMYK" else "p.png"
    Image.new("RGB", (3, 5), RED).convert(mode).save(root.root / name)
    assert root.image(name).load().pixels.shape == (1, 3, 5, 3)


def test_a_video_is_decoded_as_it_is_sampled(root):
    write_video(root.root / "v.mp4", torch.zeros(8, 3, 32, 48, dtype=torch.uint8), 4)
    medium = root.video("v.mp4", FrameSampling(frames_per_second=1, min_frames=2))
    assert (medium.kind, medium.name) == ("video", "v.mp4")
    assert medium.load().pixels.shape == (2, 3, 32, 48)


@pytest.mark.parametrize(
    "name", ["../secret.png", "x/../../secret.png", "{outside}/secret.png", "/etc/hostname"]
)
def test_a_path_that_leaves_the_root_is_refused(root, name):
    name = name.format(outside=root.root.parent)
    with pytest.raises(MediaError, match="leaves its root"):
        root.locate(name)
    with pytest.raises(MediaError, match="leaves its root"):
        root.image(name).load()


def test_a_link_that_leaves_the_root_is_refused(root):
    os.symlink(root.root.parent / "secret.png", root.root / "link.png")
    os.symlink(root.root.parent, root.root / "folder")
    for name in ("link.png", "folder/secret.png"):
        with pytest.raises(MediaError, match="leaves its root"):
            root.image(name).load()


def test_a_link_inside_the_root_and_a_root_that_is_a_link_are_fine(root):
    os.symlink(root.root / "a.png", root.root / "link.png")
    os.symlink(root.root, root.root.parent / "elsewhere")
    assert root.image("link.png").load().pixels.shape == (1, 3, 2, 4)
    assert MediaRoot(root.root.parent / "elsewhere").image("a.png").load().pixels.shape == (1, 3, 2, 4)


def test_a_path_may_wander_inside_the_root(root):
    assert root.locate("x/../a.png") == (root.root / "a.png").resolve()


@pytest.mark.parametrize("name", ["b.png", "", ".", "a.png/b"])
def test_what_is_no_file_is_an_error_that_names_it(root, name):
    with pytest.raises(MediaError, match="there is no file"):
        root.locate(name)


def test_a_file_beyond_the_limit_is_refused_with_its_size(root):
    size = (root.root / "a.png").stat().st_size
    assert locate("a.png", root.root, size)
    with pytest.raises(MediaError, match=f"{size} bytes; the limit is {size - 1} .max_file_bytes"):
        locate("a.png", root.root, size - 1)


def test_an_image_beyond_the_limit_is_refused_with_its_size(root):
    path = root.locate("a.png")
    assert read_image(path, "a.png", 8)
    with pytest.raises(MediaError, match=r"4x2 pixels; the limit is 7"):
        read_image(path, "a.png", 7)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_broken_image_is_an_error_that_names_it(root, share):
    noise = numpy.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=numpy.uint8)
    path = root.root / "broken.png"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: round(path.stat().st_size * share)])
    with pytest.raises(MediaError, match=r"cannot decode '.*broken\.png'"):
        root.image("broken.png").load()


@pytest.fixture
def counted(root, monkeypatch):
    """The names of the videos that were decoded, in order."""
    decoded = []

    def read_video(path, sampling):
        decoded.append(path.name)
        return media_module.Frames(torch.zeros(1, 3, 10, 10, dtype=torch.uint8), torch.zeros(1))

    monkeypatch.setattr(video, "read_video", read_video)
    for name in "abc":
        (root.root / name).touch()
    return decoded


def test_a_video_is_decoded_when_it_is_looked_at_and_then_shared(root, counted):
    one, same = root.video("a", FrameSampling()), root.video("a", FrameSampling())
    assert counted == []
    assert one.load() is same.load()
    assert one.load() is one.load()
    assert counted == ["a"]


def test_another_sampling_and_a_changed_file_are_decoded_again(root, counted):
    root.video("a", FrameSampling()).load()
    root.video("a", FrameSampling(max_frames=8)).load()
    assert counted == ["a", "a"]
    os.utime(root.root / "a", ns=(1, 1))
    root.video("a", FrameSampling()).load()
    assert counted == ["a", "a", "a"]


def test_what_was_not_looked_at_longest_makes_room(root, counted):
    small = MediaRoot(root.root, cache_bytes=608)  # two videos of 300 bytes of pixels and 4 of times
    for name in "aba":
        small.video(name, FrameSampling()).load()
    small.video("c", FrameSampling()).load()  # b was not looked at longest
    small.video("a", FrameSampling()).load()
    small.video("b", FrameSampling()).load()
    assert counted == ["a", "b", "c", "b"]


def test_kept_never_throws_out_the_latest_and_counts_what_it_holds():
    kept = ByteLRU(limit=5, size=len)
    assert kept.get("big", lambda: "x" * 9) == "x" * 9
    assert kept.get("big", lambda: "never made") == "x" * 9
    kept.get("small", lambda: "y")
    assert list(kept.items) == ["small"]
    assert kept.used == 1


def test_kept_counts_a_thing_once_that_two_threads_make_at_the_same_time():
    kept, together = ByteLRU(limit=100, size=len), threading.Barrier(2, timeout=300)

    def make():
        together.wait()  # both are inside `make` now
        return "x" * 7

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: kept.get("key", make), range(2))
    assert one is other is kept.items["key"]
    assert kept.used == 7


def test_kept_keeps_the_first_of_a_thing_that_is_made_twice():
    kept = ByteLRU(limit=100, size=len)

    def make():  # what another thread does while this one makes the same
        kept.get("a", lambda: "first")
        return "again"

    assert kept.get("a", make) == "first"
    assert kept.used == 5


def test_kept_stays_exact_while_many_threads_ask():
    kept, interval = ByteLRU(limit=30, size=len), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            asked = [(3 * i + i // 7) % 11 for i in range(4000)]
            given = list(pool.map(lambda i: kept.get(i, lambda: "x" * (i + 1)), asked))
    finally:
        sys.setswitchinterval(interval)
    assert [len(thing) - 1 for thing in given] == asked
    assert kept.used == sum(map(len, kept.items.values())) <= 30
