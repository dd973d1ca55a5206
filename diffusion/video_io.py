"""Video files to tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.data.media import MediaError, is_turned, opened_video, upright


def read_film(path: Path, num_frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Decode `num_frames` frames, evenly spread from the first to the last, upright: (F, 3, height, width)
    uint8 and their (F,) seconds."""
    frames, times = [], []
    with opened_video(path) as film:
        for frame in film.decode(video=0):
            frames.append(frame)
            times.append(frame.time or 0.0)
    if len(frames) < num_frames:
        raise MediaError(f"'{path}' has {len(frames)} frames, but {num_frames} are asked for (num_frames)")
    chosen = torch.linspace(0, len(frames) - 1, num_frames).round().long().tolist()
    pixels = [_pixels(frames[i], height, width) for i in chosen]
    return torch.stack(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor([times[i] for i in chosen])


def _pixels(frame: Any, height: int, width: int) -> Tensor:
    if is_turned(frame):
        height, width = width, height
    return upright(torch.from_numpy(frame.to_ndarray(format="rgb24", width=width, height=height)), frame)
