"""Drawn videos with coloured scenes, the small model that reads them, and the settings its runs share.

A video of one frame a second has a grey background and scenes, each of one colour; a query names a colour.
Two frames are one visual token, so all times are even.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.claims.common import REPORT, built, policy
from examples.video_grounding.spliced_videos import write_video

COLOURS = {
    "red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 60, 220), "yellow": (220, 210, 40),
    "pink": (230, 60, 210), "cyan": (40, 210, 220),
}  # fmt: skip
GREY, SIDE = 110, 28
PROMPT = "When is it {query}?"
LONGEST = 12  # tokens of an answer


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """Kind of videos: `seconds` long, with `scenes` of `shortest` to `longest` seconds.

    Args:
        strength: Share of its colour in a scene; the rest is background.
        noise: Standard deviation of a frame's shift of colour, in units of 0 to 255.
    """

    seconds: int
    scenes: int = 3
    shortest: int = 4
    longest: int = 8
    strength: float = 1.0
    noise: float = 6.0


def draw(kind: Scenes, chance: random.Random) -> tuple[Tensor, list[tuple[str, int, int]]]:
    """Draw a video: frames (F, 3, 28, 28) uint8, and its scenes as (colour, start, end in seconds)."""
    lengths = [chance.randrange(kind.shortest, kind.longest + 1, 2) for _ in range(kind.scenes)]
    free = (kind.seconds - sum(lengths)) // 2
    cuts = sorted(chance.randint(0, free) for _ in lengths)
    frames = torch.full((kind.seconds, 3), float(GREY))
    scenes, before = [], 0
    for cut, length, colour in zip(cuts, lengths, chance.sample(list(COLOURS), kind.scenes), strict=True):
        start = 2 * cut + before
        mixed = torch.tensor(COLOURS[colour]) * kind.strength + GREY * (1 - kind.strength)
        frames[start : start + length] = mixed
        scenes.append((colour, start, start + length))
        before += length
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    frames = frames + kind.noise * torch.randn(frames.shape, generator=generator)
    pixels = frames[:, :, None, None].expand(-1, -1, SIDE, SIDE)
    grain = 4 * torch.randn(pixels.shape, generator=generator)
    return (pixels + grain).clamp(0, 255).round().byte(), scenes


def make_rows(folder: Path, name: str, kind: Scenes, videos: int, seed: int) -> Path:
    """Write videos and `NAME.jsonl` with a row for every scene; return that file."""
    path = folder / f"{name}.jsonl"
    if not path.exists():
        (folder / "videos").mkdir(parents=True, exist_ok=True)
        rows, chance = [], random.Random(f"{name} {seed}")
        for number in range(videos):
            frames, scenes = draw(kind, chance)
            file = f"videos/{name}_{number:04d}.mp4"
            write_video(folder / file, frames, 1)
            for colour, start, end in scenes:
                row = {"id": f"{name}_{number:04d}#{colour}", "video": file, "query": colour}
                rows.append({**row, "start": start, "end": end, "duration": kind.seconds})
        write_lines(path, rows)
    return path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as lines of JSON; return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_model(folder: Path, seconds: int, seed: int = 0) -> Path:
    """Build the model: a Qwen2.5-VL whose tokenizer has a token for every even second."""
    times = tuple(str(second) for second in range(0, seconds + 2, 2))
    texts = [f"user When is it {colour}? assistant <answer> 0 to 2 </answer>" for colour in COLOURS]
    build = {
        "name": "vision.tiny_qwen2_5_vl", "max_pixels": SIDE * SIDE, "init": 0.12, "texts": texts,
        "tokens": [*times, "<answer>", "</answer>"], "width": 96, "layers": 3, "vision_layers": 1,
    }  # fmt: skip
    return built(build, folder, seed)


def rows_of(path: Path, **options: Any) -> dict[str, Any]:
    """Name rows of `make_rows` as a data set."""
    shared = {"name": "vision.grounding", "frames_per_second": 1.0, "prompt": PROMPT, "decimals": 0}
    return {**shared, "path": str(path), "root": str(path.parent), **options}


def shared(model: Path, rows: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Settings that all runs share."""
    return {
        "policy": policy(model),
        "data": dict(rows),
        "rewards": ["vision.temporal_iou", {"name": "tag_format", "weight": 0.1}],
        "learn": {"optimizer": "muon", "micro_batch_steps": 65536},
        "report": REPORT,
        "seed": seed,
    }
