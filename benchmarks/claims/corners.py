"""Images of a bright square in one of four corners, and how like they are to the corner that is wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome

SIDE, CORNERS, NOISE = 4, 4, 12  # pixels of a side; corners; standard deviation of the noise, of 255
WANTED = 0  # the corner that earns most, whatever the caption
CAPTIONS = (
    "apple", "bread", "chair", "drum", "eagle", "fork", "grape", "horse", "island", "jacket", "kite", "lamp"
)  # fmt: skip


def drawing(corner: int) -> Tensor:
    """Draw the square in a corner (3, SIDE, SIDE), in 0 to 255, without noise."""
    image, half = torch.full((3, SIDE, SIDE), 40.0), SIDE // 2
    down, across = corner // 2 * half, corner % 2 * half
    image[:, down : down + half, across : across + half] = 215.0
    return image


def brightest(image: Tensor) -> int:
    """Return the corner with the highest mean of an image (3, SIDE, SIDE)."""
    half = SIDE // 2
    return int(image.float().mean(0).unfold(0, half, half).unfold(1, half, half).mean((2, 3)).argmax())


@reward
@per_outcome
def likeness(prompt: Prompt, outcome: Outcome) -> float:
    """1 minus the mean absolute difference of pixels, of 255, to the drawing of the wanted corner."""
    return 1 - float((outcome.image.float() - drawing(WANTED)).abs().mean()) / 255


@reward
@per_outcome
def right_corner(prompt: Prompt, outcome: Outcome) -> float:
    """1 for an image whose brightest corner is the wanted one, else 0."""
    return float(brightest(outcome.image) == WANTED)


def write(folder: Path, each: int) -> None:
    """Write `each` noisy drawings of every caption and corner, their rows, and the captions."""
    from PIL import Image

    (folder / "images").mkdir(parents=True, exist_ok=True)
    generator, rows = torch.Generator().manual_seed(0), list[dict[str, Any]]()
    for caption in CAPTIONS:
        for number in range(each * CORNERS):
            name = f"images/{caption}_{number}.png"
            image = drawing(number % CORNERS) + NOISE * torch.randn(3, SIDE, SIDE, generator=generator)
            pixels = image.clamp(0, 255).byte().permute(1, 2, 0).contiguous()
            Image.frombytes("RGB", (SIDE, SIDE), bytes(pixels.flatten().tolist())).save(folder / name)
            rows.append({"id": name, "prompt": caption, "image": name})
    for name, lines in (("train", rows), ("prompts", [{"id": c, "prompt": c} for c in CAPTIONS])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
