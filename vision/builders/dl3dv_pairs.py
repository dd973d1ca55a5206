"""Builder of view pairs with camera poses from DL3DV-10K (arXiv 2312.16256) in its layout on disk."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, PositiveInt, Probability
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.media import MediaError, opened_image
from mmrl.data.media_root import MediaRef, MediaRoot
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter, SplitFiles

FOLDERS = ("images_8", "images_4", "images_2", "images")  # the smallest images first: 480P, 960P, ...
# Converts camera axes from OpenGL (looking along -Z, +Y up) to OpenCV (looking along +Z, +Y down), and back.
FLIP = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64))
ENDINGS = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class CameraView:
    """One frame of a scene: its image file, frame number and camera.

    `intrinsics` are (fx, fy, cx, cy) as fractions of width and height, valid for any image size. `pose`
    (4, 4), float64, maps camera to world coordinates; camera axes as in OpenCV (+X right, +Y down, +Z ahead).
    """

    path: Path
    index: int
    intrinsics: tuple[float, float, float, float]
    pose: Tensor


@dataclass(frozen=True)
class SceneViews:
    """A scene: its hash, its frames sorted by file name, and the names of frames without an image file."""

    name: str
    views: tuple[CameraView, ...]
    missing: tuple[str, ...] = ()


@builder
@dataclass(kw_only=True)
class Dl3dvPairs:
    """Sample pairs of views of one scene from DL3DV-10K (arXiv 2312.16256) in its layout on disk.

    A row contains two `images`, their frame numbers, intrinsics (fx, fy, cx, cy as fractions of the image),
    the (4, 4) `pose` that transforms points from the first camera to the second (axes of OpenCV), the
    rotation `turn` between the cameras in degrees, their `distance`, and the scene.

    Args:
        root: Folder of the scenes; image paths are relative to it.
        pairs_per_scene: Maximum number of pairs per scene.
        nearest: Smallest difference of the two frame numbers.
        farthest: Largest difference of the two frame numbers.
        images: Name of the image folder in each scene; by default the folder of the smallest images.
        exclude: File of scenes to skip, one hash per line, for example the scenes of the benchmark.
        test_share: Approximate fraction of the scenes in the test split. The split is the same in every run.
        copy: Whether image files are copied to the output.
        bad_rows: Treatment of scenes that cannot be read. `error`: raise an error. `drop`: list them in the
            manifest. Frames without an image file are only counted.
    """

    stream: Stream
    root: str
    pairs_per_scene: PositiveInt = 8
    nearest: Annotated[PositiveInt, AtMost("farthest")] = 1
    farthest: PositiveInt = 30
    images: str = ""
    exclude: str = ""
    test_share: Probability = 0.05
    copy: bool = False
    bad_rows: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        self.home = Path(self.root).resolve()

    def build(self, output: Path) -> dict[str, Any]:
        """Write the pairs; return the number of pairs in each split."""
        log, files = BuildLog(self.bad_rows), SplitFiles(output)
        media = MediaWriter(MediaRoot(self.home, cache_bytes=0), output)
        exclude = set(Path(self.exclude).read_text().split()) if self.exclude else set()
        missing = 0
        for folder in find_scenes(self.home):
            if scene_name(folder) in exclude:
                continue
            with log.dropping(str(folder.relative_to(self.home))):
                scene = read_scene(folder, self.images)
                rows = [self._row(scene, *pair, media) for pair in self._pairs(scene)]
                missing += len(scene.missing)
                # Seed with the scene's name, so that its split does not depend on other scenes.
                draw = torch.rand((), generator=self.stream.fixed("split", scene.name))
                split = "test" if float(draw) < self.test_share else "train"
                for row in rows:
                    files.add(split, row)
                log.kept[split] += len(rows)
        files.close()
        manifest = {"source": "DL3DV-10K layout", "seed": self.stream.seed, "frames_without_image": missing}
        return log.finish(output, manifest) | ({"frames_without_image": missing} if missing else {})

    def _pairs(self, scene: SceneViews) -> list[tuple[CameraView, CameraView]]:
        near = [
            (first, second)
            for first, second in combinations(scene.views, 2)
            if self.nearest <= second.index - first.index <= self.farthest
        ]
        if not near:
            raise MediaError(
                f"no two of its {len(scene.views)} frames are {self.nearest} to {self.farthest} apart"
            )
        order = torch.randperm(len(near), generator=self.stream.fixed("pairs", scene.name)).tolist()
        return [near[i] for i in sorted(order[: self.pairs_per_scene])]  # sorted in the order of the frames

    def _row(
        self, scene: SceneViews, first: CameraView, second: CameraView, media: MediaWriter
    ) -> dict[str, Any]:
        paths = [view.path.resolve().relative_to(self.home).as_posix() for view in (first, second)]
        return {
            "id": f"{scene.name}#{first.index}-{second.index}",
            "scene": scene.name,
            "images": [media.put(MediaRef("image", path)) for path in paths] if self.copy else paths,
            "frames": [first.index, second.index],
            "intrinsics": [list(first.intrinsics), list(second.intrinsics)],
            "pose": relative_pose(first, second).tolist(),
            "turn": turn_between(first, second),
            "distance": float((first.pose[:3, 3] - second.pose[:3, 3]).norm()),  # in the scene's unit
        }


# ---- the folder layout of DL3DV-10K


def find_scenes(root: Path) -> list[Path]:
    """Find scene folders: `<batch>/<hash>`, `<hash>/nerfstudio` as in the benchmark, or `<hash>`."""
    return [path.parent for path in sorted(root.rglob("transforms.json"))]


def scene_name(folder: Path) -> str:
    """Return the hash of a scene, which is the name of its folder or of the parent of `nerfstudio`."""
    return folder.parent.name if folder.name == "nerfstudio" else folder.name


def read_scene(folder: Path, images: str = "") -> SceneViews:
    """Read the frames of a scene and their cameras from `transforms.json`.

    Image files are looked up by name in the folder `images`, by default the folder with the smallest images.
    Raises `MediaError` if the images do not have the aspect ratio of the camera.
    """
    path = folder / "transforms.json"
    try:
        raw = json.loads(path.read_bytes().decode("utf-8"))
        frames, aspect = raw["frames"], float(raw["w"]) / float(raw["h"])
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
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
        # Some releases store image files of another type than `transforms.json` records.
        candidates = [home / name, *(home / f"{Path(name).stem}{ending}" for ending in ENDINGS)]
        file = next((file for file in candidates if file.is_file()), None)
        if file is None:
            missing.append(name)
            continue
        try:
            views.append(_view(file, name, {**raw, **frame}))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise MediaError(f"'{folder}': frame '{name}': {type(error).__name__}: {error}") from error
    views.sort(key=lambda view: view.path.name)
    for view in views[:1]:
        with opened_image(view.path, str(view.path)) as image:
            width, height = image.size
        # Width and height are rounded to whole pixels, each by at most one pixel.
        if abs(width - aspect * height) > 1 + aspect:
            camera = f"its camera is {aspect:.3f} times as wide as high"
            raise MediaError(f"'{view.path}' is {width}x{height}, but {camera}")
    return SceneViews(scene_name(folder), tuple(views), tuple(missing))


def _view(path: Path, name: str, camera: dict[str, Any]) -> CameraView:
    pose = torch.tensor(camera["transform_matrix"], dtype=torch.float64)
    if pose.shape != (4, 4) or not pose.isfinite().all():
        raise ValueError(f"transform_matrix must be 4 by 4 and finite, not {tuple(pose.shape)}")
    # Intrinsics refer to the full-size image, even if the folder has smaller ones, so make them fractions.
    width, height = float(camera["w"]), float(camera["h"])
    fx, fy = float(camera["fl_x"]), float(camera.get("fl_y", camera["fl_x"]))
    intrinsics = fx / width, fy / height, float(camera["cx"]) / width, float(camera["cy"]) / height
    # The frame number is the digits after the last underscore of the file name.
    return CameraView(path, int(Path(name).stem.rpartition("_")[2]), intrinsics, pose @ FLIP)


def relative_pose(first: CameraView, second: CameraView) -> Tensor:
    """Compute the (4, 4) transform of points from the first camera's coordinates to the second's."""
    return torch.linalg.inv(second.pose) @ first.pose  # first camera to world, then world to second


def turn_between(first: CameraView, second: CameraView) -> float:
    """Compute the rotation angle between two cameras, in degrees."""
    rotation = relative_pose(first, second)[:3, :3]
    # trace(R) = 1 + 2 cos(angle); clamp to [-1, 1] against rounding.
    return math.degrees(math.acos(max(-1.0, min(1.0, (float(rotation.trace()) - 1) / 2))))
