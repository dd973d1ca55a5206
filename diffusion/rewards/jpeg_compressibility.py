"""The size of a picture as a JPEG file: a reward that needs no model."""

from __future__ import annotations

import io
from typing import Literal

from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import as_pil, picture_of

QUALITY = 95


@reward
@per_outcome
def jpeg_compressibility(
    prompt: Prompt, outcome: Outcome, *, form: Literal["incompressible", "compressible"] = "incompressible"
) -> float:
    """Measure how many kilobytes a picture takes as JPEG of quality 95 (DDPO, arXiv 2305.13301).

    `incompressible` is that size, `compressible` minus a 500th of it. Of a clip the first frame counts.
    """
    buffer = io.BytesIO()
    as_pil(picture_of(prompt, outcome)).save(buffer, format="JPEG", quality=QUALITY)
    size = buffer.tell() / 1000
    return size if form == "incompressible" else -size / 500
