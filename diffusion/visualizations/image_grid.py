"""Grids of generated images per prompt, and their embedding in HTML pages."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping

from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import visualization
from mmrl.core.reward_table import Measured
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.image_io import to_pil


@visualization
def image_grid(
    measured: Mapping[str, Measured],
    *,
    num: PositiveInt = 6,
    per_prompt: PositiveInt = 6,
    side: PositiveInt = 96,
) -> str:
    """Images that every model made of the same prompts, one line a model, with its mean rewards.

    `measured` holds evaluations by the name of a model. Videos show their middle frame.

    Args:
        num: Most prompts, at equal distances in the order of the evaluation.
        per_prompt: Most images of a prompt and model.
        side: Width of an image, pixels.
    """
    prompts: dict[str, Prompt] = {}
    for evaluation in measured.values():
        rows = evaluation.rollouts
        prompts |= {r.prompt.uid: r.prompt for r in rows if displayed_image(r.outcomes[-1]) is not None}
    listed = list(prompts.values())
    chosen = [listed[i * len(listed) // num] for i in range(num)] if len(listed) > num else listed
    figures = "".join(_figure(prompt, measured, per_prompt, side) for prompt in chosen)
    return f"<h2>Held-out images</h2><div class=grid>{figures}</div>"


def _figure(prompt: Prompt, measured: Mapping[str, Measured], per_prompt: int, side: int) -> str:
    lines = []
    for name, evaluation in measured.items():
        outcomes = [row.outcomes[-1] for row in evaluation.rollouts if row.prompt.uid == prompt.uid]
        if outcomes:
            images = [displayed_image(outcome) for outcome in outcomes[:per_prompt]]
            sources = [data_url(image, side) for image in images if image is not None]
            table = evaluation.table
            rows = [i for i, uid in enumerate(table.uids) if uid == prompt.uid]
            means = {reward: float(table.at_end(reward)[rows].nanmean()) for reward in table.scored}
            label = "  ".join([name, *(f"{reward} {mean:.2f}" for reward, mean in means.items())])
            lines.append(f"<small><b>{html.escape(label)}</b></small>{image_row(sources, side)}")
    return f"<figure><figcaption>{html.escape(prompt.text)}</figcaption>{''.join(lines)}</figure>"


def displayed_image(outcome: Outcome) -> Tensor | None:
    """Get the image that represents an outcome: its image, or the middle frame of its video."""
    if outcome.video is not None:
        return outcome.video[len(outcome.video) // 2]
    return outcome.image


def data_url(image: Tensor, side: int) -> str:
    """Encode an image (3, height, width) uint8 as source of an `<img>`, at most `side` pixels a side.

    Small images keep their pixels, losslessly; the page enlarges them.
    """
    from PIL import Image

    pil, buffer = to_pil(image), io.BytesIO()
    if max(pil.size) <= side:
        pil.save(buffer, "PNG", optimize=True)
        form = "png"
    else:
        pil.thumbnail((side, side), Image.Resampling.LANCZOS)
        pil.save(buffer, "JPEG", quality=85)
        form = "jpeg"
    return f"data:image/{form};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_row(sources: list[str], side: int, labels: list[str] | None = None) -> str:
    """Lay images side by side, each at most `side` pixels wide, together at most as wide as the page."""
    cells = "".join(
        f"<div style='flex:0 1 {side}px;min-width:0;text-align:center'>"
        f"<img alt='' style='width:100%;display:block;image-rendering:pixelated' src='{source}'>"
        + (f"<small>{label}</small></div>" if label else "</div>")
        for source, label in zip(sources, labels or [""] * len(sources), strict=True)
    )
    return f"<div style='display:flex;gap:2px'>{cells}</div>"
