"""Pictures of outcomes as they stand inside an HTML page."""

from __future__ import annotations

import base64
import io

from torch import Tensor

from mmrl.core.types import Outcome


def shown(outcome: Outcome) -> Tensor | None:
    """Find what of an outcome is shown: its picture, or the middle frame of its video."""
    if outcome.video is not None:
        return outcome.video[len(outcome.video) // 2]
    return outcome.image


def embedded(picture: Tensor, side: int) -> str:
    """Encode a picture (3, height, width) uint8 as a source for `<img>`, its longer side at most `side`
    pixels.

    Small pictures stay as they are, without loss; the page enlarges them.
    """
    from PIL import Image

    image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
    buffer = io.BytesIO()
    if max(image.size) <= side:
        image.save(buffer, "PNG", optimize=True)
        form = "png"
    else:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        image.save(buffer, "JPEG", quality=85)
        form = "jpeg"
    return f"data:image/{form};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def strip(sources: list[str], side: int, words: list[str] | None = None) -> str:
    """Lay pictures side by side, each at most `side` pixels wide and all of them as wide as the page at
    most."""
    below = words or [""] * len(sources)
    cells = "".join(
        f"<div style='flex:0 1 {side}px;min-width:0;text-align:center'>"
        f"<img alt='' style='width:100%;display:block;image-rendering:pixelated' src='{source}'>"
        + (f"<small>{text}</small></div>" if text else "</div>")
        for source, text in zip(sources, below, strict=True)
    )
    return f"<div style='display:flex;gap:2px'>{cells}</div>"
