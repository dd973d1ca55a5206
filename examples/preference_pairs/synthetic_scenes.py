"""Builder of synthetic scenes with exact camera poses, in the layout of DL3DV-10K."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream


@builder
@dataclass(kw_only=True)
class SyntheticScenes:
    """Render synthetic scenes in the layout of DL3DV-10K, whose own images may not be redistributed.

    A camera moves around a floor of coloured tiles under a sky; every pixel is ray-cast exactly, so poses and
    images agree. Writes `1K/<hash>/{transforms.json, images_8/frame_00001.png, ...}`.

    Args:
        num_scenes: Number of scenes.
        num_frames: Frames of a scene, over a quarter of a circle.
        width: Width of a frame, in pixels.
        height: Height of a frame, in pixels.
    """

    stream: Stream
    num_scenes: PositiveInt = 4
    num_frames: PositiveInt = 24
    width: PositiveInt = 96
    height: PositiveInt = 56

    def build(self, output: Path) -> dict[str, Any]:
        """Write the scenes; return their number."""
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
        # As in DL3DV-10K, the camera is that of the full-size image, 8 times as large.
        size = {"w": 8 * self.width, "h": 8 * self.height, "cx": 4 * self.width, "cy": 4 * self.height}
        lens = {"fl_x": 8 * focal, "fl_y": 8 * focal, "k1": 0.0, "k2": 0.0, "p1": 0.0, "p2": 0.0}
        camera = {**size, **lens, "camera_model": "OPENCV", "frames": frames}
        (folder / "transforms.json").write_text(json.dumps(camera))


def walk(angle: float) -> Tensor:
    """Compute the (4, 4) camera-to-world matrix, axes of OpenGL, at an angle (radians) of the camera path.

    The path is a circle of radius 3 at height 1.5; the camera looks at the origin, the world's Z is up.
    """
    eye = torch.tensor([3 * math.cos(angle), 3 * math.sin(angle), 1.5], dtype=torch.float64)
    back = eye / eye.norm()
    right = torch.linalg.cross(torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), back)
    right = right / right.norm()
    pose = torch.eye(4, dtype=torch.float64)
    pose[:3] = torch.stack([right, torch.linalg.cross(back, right), back, eye], 1)
    return pose


def cast(pose: Tensor, tiles: Tensor, width: int, height: int, focal: float) -> Tensor:
    """Ray-cast the floor (height 0, tiles of half a unit) at pixel centres: (height, width, 3) uint8."""
    rows = (torch.arange(height, dtype=torch.float64) + 0.5 - height / 2) / focal
    columns = (torch.arange(width, dtype=torch.float64) + 0.5 - width / 2) / focal
    along = torch.stack([columns.expand(height, -1), -rows[:, None].expand(-1, width)], -1)
    rays = torch.cat([along, -torch.ones(height, width, 1, dtype=torch.float64)], -1) @ pose[:3, :3].T
    down = rays[..., 2] < -1e-6  # other rays never meet the floor and show the sky
    reach = torch.where(down, -pose[2, 3] / rays[..., 2].clamp(max=-1e-6), 0.0)
    spot = (pose[:2, 3] + reach[..., None] * rays[..., :2]) / 0.5
    tile = spot.floor().long() % len(tiles)
    sky = torch.tensor([150, 190, 230], dtype=torch.uint8)
    return torch.where(down[..., None], tiles[tile[..., 0], tile[..., 1]], sky)
