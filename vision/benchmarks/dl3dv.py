"""DL3DV-10K (arXiv 2312.16256) as it lies on disk after unpacking: frames of scenes with their cameras."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.data.media import MediaError, opened_image

FOLDERS = ("images_8", "images_4", "images_2", "images")  # the smallest first: 480P, 960P, ...
# Turns a camera that looks along -Z with +Y up (OpenGL) into one that looks along +Z with +Y down (OpenCV).
FLIP = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64))
ENDINGS = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class View:
    """One frame: its picture, its number, and its camera.

    `pose` is (4, 4), camera to world with the axes of OpenCV (+X right, +Y down, looking along +Z);
    `intrinsics` are (fx, fy, cx, cy) in shares of the width and the height, so they hold for any size.
    """

    path: Path
    index: int
    intrinsics: tuple[float, float, float, float]
    pose: Tensor

    @property
    def world_to_camera(self) -> Tensor:
        """Invert the pose."""
        return torch.linalg.inv(self.pose)

    @property
    def camera_vector(self) -> list[float]:
        """List the 18 numbers that DepthSplat has of a camera: intrinsics, two zeros, and the three rows of
        world to camera."""
        return [*self.intrinsics, 0.0, 0.0, *self.world_to_camera[:3].flatten().tolist()]


@dataclass(frozen=True)
class SceneViews:
    """A scene: its hash, and its frames in the order of their names. `missing` frames have no picture."""

    name: str
    views: tuple[View, ...]
    missing: tuple[str, ...] = ()


def find_scenes(root: Path) -> Iterator[Path]:
    """Find the folders of scenes: `<batch>/<hash>`, or `<hash>/nerfstudio` as in the benchmark, or
    `<hash>`."""
    for path in sorted(root.rglob("transforms.json")):
        yield path.parent


def scene_name(folder: Path) -> str:
    """Tell the hash of a scene from its folder."""
    return folder.parent.name if folder.name == "nerfstudio" else folder.name


def read_scene(folder: Path, images: str = "") -> SceneViews:
    """Read the frames of a scene and their cameras. `images` names the folder of pictures; the smallest one
    there is by default.

    `w`, `h` and the intrinsics of the file are those of the full picture, whatever the folder holds, so they
    are divided. Pictures are looked up by their names alone. A scene whose pictures have another shape than
    its camera is refused.
    """
    raw = _transforms(folder / "transforms.json")
    home = next((folder / one for one in ([images] if images else FOLDERS) if (folder / one).is_dir()), None)
    if home is None:
        raise MediaError(f"'{folder}' has no folder of pictures; looked for {images or ', '.join(FOLDERS)}")
    views, missing = [], []
    for frame in raw["frames"]:
        name = Path(str(frame["file_path"]).replace("\\", "/")).name
        path = _picture(home, name)
        if path is None:
            missing.append(name)
            continue
        try:
            views.append(View(path, frame_index(name), _intrinsics({**raw, **frame}), _pose(frame)))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise MediaError(f"'{folder}': frame '{name}': {type(error).__name__}: {error}") from error
    views.sort(key=lambda view: view.path.name)
    if views:
        _check_shape(views[0].path, float(raw["w"]) / float(raw["h"]))
    return SceneViews(scene_name(folder), tuple(views), tuple(missing))


def frame_index(name: str) -> int:
    """Read the number of a frame: the digits behind the last underscore."""
    return int(Path(name).stem.rpartition("_")[2])


def to_opencv(pose: Tensor) -> Tensor:
    """Turn a camera-to-world matrix (4, 4) with the axes of OpenGL into one with those of OpenCV, and
    back."""
    return pose @ FLIP.to(pose.dtype)


def relative_pose(first: View, second: View) -> Tensor:
    """Compute (4, 4) that takes points from the first camera to the second."""
    return second.world_to_camera @ first.pose


def turn_between(first: View, second: View) -> float:
    """Measure by how many degrees the second camera is turned against the first."""
    rotation = relative_pose(first, second)[:3, :3]
    return math.degrees(math.acos(max(-1.0, min(1.0, (float(rotation.trace()) - 1) / 2))))


def distance_between(first: View, second: View) -> float:
    """Measure how far apart two cameras stand, in units of the scene."""
    return float((first.pose[:3, 3] - second.pose[:3, 3]).norm())


def _transforms(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes().decode("utf-8"))
        frames, _ = raw["frames"], (float(raw["w"]), float(raw["h"]))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise MediaError(f"cannot read '{path}': {type(error).__name__}: {error}") from error
    if type(frames) is not list or not frames:
        raise MediaError(f"'{path}' lists no frames")
    return raw


def _picture(home: Path, name: str) -> Path | None:
    """Find a picture by its name; some releases store another ending than they record."""
    stem = Path(name).stem
    candidates = [home / name, *(home / f"{stem}{ending}" for ending in ENDINGS)]
    return next((path for path in candidates if path.is_file()), None)


def _intrinsics(camera: dict[str, Any]) -> tuple[float, float, float, float]:
    width, height = float(camera["w"]), float(camera["h"])
    wide, high = float(camera["fl_x"]), float(camera.get("fl_y", camera["fl_x"]))
    return wide / width, high / height, float(camera["cx"]) / width, float(camera["cy"]) / height


def _pose(frame: dict[str, Any]) -> Tensor:
    pose = torch.tensor(frame["transform_matrix"], dtype=torch.float64)
    if pose.shape != (4, 4) or not pose.isfinite().all():
        raise ValueError(f"transform_matrix must be 4 by 4 and finite, not {tuple(pose.shape)}")
    return to_opencv(pose)


def _check_shape(path: Path, wanted: float) -> None:
    with opened_image(path, str(path)) as image:
        width, height = image.size
    # Rounding to whole pixels, at most one on either side.
    if abs(width - wanted * height) > 1 + wanted:
        raise MediaError(
            f"'{path}' is {width}x{height}, but its camera is {wanted:.3f} times as wide as high"
        )
