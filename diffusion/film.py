"""Video files to tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mmrl.rows import RowError


def read_film(path: Path, num_frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Decode `num_frames` frames, evenly spread from the first to the last: (F, 3, height, width) uint8 and
    their (F,) seconds."""
    import av

    frames, times = [], []
    try:
        with av.open(str(path)) as film:
            for frame in film.decode(video=0):
                frames.append(frame)
                times.append(frame.time or 0.0)
    except (av.FFmpegError, IndexError) as error:
        raise RowError(f"cannot decode the video '{path}': {error}") from error
    if len(frames) < num_frames:
        raise RowError(f"'{path}' has {len(frames)} frames, but {num_frames} are asked for (num_frames)")
    chosen = torch.linspace(0, len(frames) - 1, num_frames).round().long().tolist()
    pictures = [
        torch.from_numpy(frames[i].to_ndarray(format="rgb24", width=width, height=height)) for i in chosen
    ]
    return torch.stack(pictures).permute(0, 3, 1, 2).contiguous(), torch.tensor([times[i] for i in chosen])
