"""Builder of view pairs with camera poses from DL3DV-10K."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from mmrl.config.ranges import AtMost, PositiveInt, Probability
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.vision.benchmarks.dl3dv import (
    CameraView,
    SceneViews,
    distance_between,
    find_scenes,
    read_scene,
    relative_pose,
    scene_name,
    turn_between,
)
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter, SplitFiles
from mmrl.vision.media.media_root import MediaRef, MediaRoot
from mmrl.vision.media.video import MediaError


@builder
@dataclass(kw_only=True)
class Dl3dvPairs:
    """Sample pairs of views of one scene from DL3DV-10K (arXiv 2312.16256) in its layout on disk.

    A row contains two `images`, their frame numbers, intrinsics (fx, fy, cx, cy as fractions of the image),
    the (4, 4) `pose` that transforms points from the first camera to the second (axes of OpenCV), the `turn`
    between them in degrees, their `distance` and the scene.

    Args:
        root: Folder of the scenes; image paths are relative to it.
        pairs_per_scene: Most pairs of one scene.
        nearest: Least difference of the two frame numbers.
        farthest: Largest difference of the two frame numbers.
        images: Name of the image folder in each scene; by default the smallest one that exists.
        exclude: File with one scene hash a line, such as the benchmark's; these scenes are skipped.
        test_share: Approximate share of scenes in the test split, the same scenes in every run.
        copy: Whether image files are copied to the output.
        bad_rows: `error` raises for scenes that cannot be read, `drop` lists them in the manifest. Frames
            without an image file are counted.
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

    @cached_property
    def home(self) -> Path:
        """Resolve the folder of the scenes."""
        return Path(self.root).resolve()

    def build(self, output: Path) -> dict[str, Any]:
        """Write the pairs; return the number of each split."""
        ledger, files = BuildLog(self.bad_rows), SplitFiles(output)
        media = MediaWriter(MediaRoot(self.home, cache_bytes=0), output)
        exclude = set(Path(self.exclude).read_text().split()) if self.exclude else set()
        missing = 0
        for folder in find_scenes(self.home):
            if scene_name(folder) in exclude:
                continue
            try:
                scene = read_scene(folder, self.images)
                rows = [self._row(scene, *pair, media) for pair in self._pairs(scene)]
            except MediaError as error:
                ledger.drop(str(folder.relative_to(self.home)), str(error))
                continue
            missing += len(scene.missing)
            draw = torch.rand((), generator=self.stream.fixed("split", scene.name))
            split = "test" if float(draw) < self.test_share else "train"
            for row in rows:
                files.add(split, row)
            ledger.kept[split] += len(rows)
        files.close()
        manifest = {"source": "DL3DV-10K layout", "seed": self.stream.seed, "frames_without_image": missing}
        return ledger.finish(output, manifest) | ({"frames_without_image": missing} if missing else {})

    def _pairs(self, scene: SceneViews) -> list[tuple[CameraView, CameraView]]:
        near = [
            (first, second)
            for i, first in enumerate(scene.views)
            for second in scene.views[i + 1 :]
            if self.nearest <= second.index - first.index <= self.farthest
        ]
        if not near:
            raise MediaError(
                f"no two of its {len(scene.views)} frames are {self.nearest} to {self.farthest} apart"
            )
        order = torch.randperm(len(near), generator=self.stream.fixed("pairs", scene.name)).tolist()
        return [near[i] for i in sorted(order[: self.pairs_per_scene])]

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
            "distance": distance_between(first, second),
        }
