"""Rule-based reward that recognises the colour and shape in an image; no model is involved."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveFloat, Probability
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome

# The colours that easy-VQA draws with.
COLOURS = {
    "black": (0, 0, 0),
    "blue": (0, 0, 255),
    "brown": (165, 42, 42),
    "gray": (128, 128, 128),
    "green": (0, 255, 0),
    "red": (255, 0, 0),
    "teal": (0, 128, 128),
    "yellow": (255, 255, 0),
}
SHAPES = ("circle", "rectangle", "triangle")
SUPERSAMPLING = 4  # points across a pixel at which a shape is drawn


@reward
@per_outcome
def coloured_shape(
    prompt: Prompt, outcome: Outcome, *, clarity: Probability = 0.65, colour_distance: PositiveFloat = 100.0
) -> float | None:
    """1 for an image with the colour and the shape that its prompt names, 0.5 for one of them, else 0.

    The background is the median of the border. The shape's colour is that of the pixels farthest from it, and
    must be within `colour_distance` (of 441) of a colour of easy-VQA. The coverage of every
    other pixel is its position between the colours of background and shape. A circle, a rectangle and a
    triangle are fitted into the bounding box of the coverage; the one that overlaps most is chosen, if its
    intersection over union is at least `clarity`. Prompts that do not name one colour and one shape have no
    value. Of the 880 test images that `examples.image_rl.easy_vqa_captions:EasyVqaCaptions` makes, 99.8 % are
    recognised, whether 16, 24 or 32 pixels wide.
    """
    words = set(prompt.text.lower().split())
    colour, shape = words.intersection(COLOURS), words.intersection(SHAPES)
    if len(colour) != 1 or len(shape) != 1:
        return None
    seen = read_shape(outcome.image, clarity, colour_distance)
    return 0.5 * ((seen[0] in colour) + (seen[1] in shape))


def read_shape(
    image: Tensor, clarity: float = 0.65, colour_distance: float = 100.0
) -> tuple[str | None, str | None]:
    """Recognise colour and shape in an image (3, height, width) uint8; None for what is not clear."""
    pixels = image.double()
    border = torch.cat([pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]], 1)
    ground = border.median(1).values[:, None, None]
    away = (pixels - ground).norm(dim=0)
    if away.max() < 48:  # nothing but background
        return None, None
    ink = pixels[:, away >= 0.85 * away.max()].median(1).values
    line = ink[:, None, None] - ground
    cover = ((pixels - ground) * line).sum(0).div(line.square().sum()).clamp(0, 1)
    distances = {name: float((ink - torch.tensor(value)).norm()) for name, value in COLOURS.items()}
    nearest = min(distances, key=distances.get)
    overlaps = {name: overlap(cover, name) for name in SHAPES}
    likeliest = max(overlaps, key=overlaps.get)
    return (
        nearest if distances[nearest] <= colour_distance else None,
        likeliest if overlaps[likeliest] >= clarity else None,
    )


def overlap(cover: Tensor, shape: str) -> float:
    """Fit a shape into the bounding box of the coverage (H, W), and compute their intersection over union.

    It is 0 if no pixel is half covered.
    """
    if cover.max() < 0.5:
        return 0.0
    (top, bottom), (left, right) = (_extent(cover.amax(axis)) for axis in (1, 0))
    rows, columns = (
        (torch.arange(size * SUPERSAMPLING, dtype=cover.dtype) + 0.5) / SUPERSAMPLING for size in cover.shape
    )
    down = ((rows - top) / max(bottom - top, 1e-9))[:, None]
    across = ((columns - left) / max(right - left, 1e-9))[None]
    inside = (down >= 0) & (down <= 1) & (across >= 0) & (across <= 1)
    match shape:
        case "circle":
            inside = inside & ((down - 0.5) ** 2 + (across - 0.5) ** 2 <= 0.25)
        case "triangle":
            inside = inside & ((across - 0.5).abs() <= 0.5 * down)
    drawn = inside.double().unflatten(1, (-1, SUPERSAMPLING)).unflatten(0, (-1, SUPERSAMPLING)).mean((1, 3))
    return float(torch.minimum(drawn, cover).sum() / torch.maximum(drawn, cover).sum())


def _extent(profile: Tensor) -> tuple[float, float]:
    """Find where a profile (L,) of coverage begins and ends, with subpixel precision."""
    covered = (profile >= 0.5).nonzero()[:, 0]
    first, last = int(covered[0]), int(covered[-1])
    before = float(profile[first - 1]) if first > 0 else 0.0
    after = float(profile[last + 1]) if last + 1 < len(profile) else 0.0
    if first == last:
        return first - before, last + float(profile[last]) + after
    return first + 1 - float(profile[first]) - before, last + float(profile[last]) + after
