"""Reader of DL3DV-10K (arXiv 2312.16256) in its layout on disk: frames of scenes and their cameras."""

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
# Converts between camera axes of OpenGL (looking along -Z, +Y up) and of OpenCV (along +Z, +Y down).
FLIP = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64))
ENDINGS = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class CameraView:
    """One frame of a scene: its image file, frame number and camera.

    `pose` is (4, 4) float64, camera to world with the axes of OpenCV (+X right, +Y down, looking along +Z);
    `intrinsics` are (fx, fy, cx, cy) as fractions of width and height, valid for any image size.
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
        """List DepthSplat's 18 camera numbers: intrinsics, two zeros, three rows of world to camera."""
        return [*self.intrinsics, 0.0, 0.0, *self.world_to_camera[:3].flatten().tolist()]


@dataclass(frozen=True)
class SceneViews:
    """A scene: its hash, its frames sorted by name, and the names of frames without an image file."""

    name: str
    views: tuple[CameraView, ...]
    missing: tuple[str, ...] = ()


def find_scenes(root: Path) -> Iterator[Path]:
    """Find scene folders: `<batch>/<hash>`, `<hash>/nerfstudio` as in the benchmark, or `<hash>`."""
    for path in sorted(root.rglob("transforms.json")):
        yield path.parent


def scene_name(folder: Path) -> str:
    """Return the hash of a scene from its folder."""
    return folder.parent.name if folder.name == "nerfstudio" else folder.name


def read_scene(folder: Path, images: str = "") -> SceneViews:
    """Read the frames of a scene and their cameras.

    The file's `w`, `h` and intrinsics refer to the full-size image, whatever the folder contains, so they are
    divided. Image files are looked up by name alone. Raises `MediaError` where the images do not have the
    aspect ratio of the camera.

    Args:
        folder: Folder with `transforms.json`.
        images: Name of the image folder; by default the smallest one that exists.
    """
    path = folder / "transforms.json"
    try:
        raw = json.loads(path.read_bytes().decode("utf-8"))
        frames, aspect = raw["frames"], float(raw["w"]) / float(raw["h"])
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise MediaError(f"cannot read '{path}': {type(error).__name__}: {error}") from error
    if type(frames) is not list or not frames:
        raise MediaError(f"'{path}' lists no frames")
    wanted = [images] if images else FOLDERS
    home = next((folder / name for name in wanted if (folder / name).is_dir()), None)
    if home is None:
        raise MediaError(f"'{folder}' has no folder of images; looked for {', '.join(wanted)}")
    views, missing = [], []
    for frame in frames:
        name = Path(str(frame["file_path"]).replace("\\", "/")).name
        # Some releases store another file type than they record.
        candidates = [home / name, *(home / f"{Path(name).stem}{ending}" for ending in ENDINGS)]
        file = next((file for file in candidates if file.is_file()), None)
        if file is None:
            missing.append(name)
            continue
        try:
            views.append(CameraView(file, frame_index(name), _intrinsics({**raw, **frame}), _pose(frame)))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise MediaError(f"'{folder}': frame '{name}': {type(error).__name__}: {error}") from error
    views.sort(key=lambda view: view.path.name)
    if views:
        _check_aspect(views[0].path, aspect)
    return SceneViews(scene_name(folder), tuple(views), tuple(missing))


def frame_index(name: str) -> int:
    """Parse the number of a frame: the digits after the last underscore."""
    return int(Path(name).stem.rpartition("_")[2])


def to_opencv(pose: Tensor) -> Tensor:
    """Convert a camera-to-world matrix (4, 4) from OpenGL's axes to OpenCV's, or back."""
    return pose @ FLIP.to(pose.dtype)


def relative_pose(first: CameraView, second: CameraView) -> Tensor:
    """Compute the (4, 4) transform of points from the first camera to the second."""
    return second.world_to_camera @ first.pose


def turn_between(first: CameraView, second: CameraView) -> float:
    """Compute the rotation angle between two cameras, in degrees."""
    rotation = relative_pose(first, second)[:3, :3]
    # trace(R) = 1 + 2 cos(angle); rounding may exceed [-1, 1].
    return math.degrees(math.acos(max(-1.0, min(1.0, (float(rotation.trace()) - 1) / 2))))


def distance_between(first: CameraView, second: CameraView) -> float:
    """Compute the distance between two cameras, in units of the scene."""
    return float((first.pose[:3, 3] - second.pose[:3, 3]).norm())


def _intrinsics(camera: dict[str, Any]) -> tuple[float, float, float, float]:
    width, height = float(camera["w"]), float(camera["h"])
    fx, fy = float(camera["fl_x"]), float(camera.get("fl_y", camera["fl_x"]))
    return fx / width, fy / height, float(camera["cx"]) / width, float(camera["cy"]) / height


def _pose(frame: dict[str, Any]) -> Tensor:
    pose = torch.tensor(frame["transform_matrix"], dtype=torch.float64)
    if pose.shape != (4, 4) or not pose.isfinite().all():
        raise ValueError(f"transform_matrix must be 4 by 4 and finite, not {tuple(pose.shape)}")
    return to_opencv(pose)


def _check_aspect(path: Path, aspect: float) -> None:
    with opened_image(path, str(path)) as image:
        width, height = image.size
    # Width and height are rounded to whole pixels, each by at most one.
    if abs(width - aspect * height) > 1 + aspect:
        raise MediaError(
            f"'{path}' is {width}x{height}, but its camera is {aspect:.3f} times as wide as high"
        )
