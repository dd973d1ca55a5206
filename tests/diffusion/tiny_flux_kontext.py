"""A tiny pipeline of FLUX.1 Kontext: real classes, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.diffusion import tiny


def tiny_flux_kontext(folder: Path) -> Any:
    """Make FLUX.1 Kontext: 32 pixels are 4 by 4 latents of 4 channels."""
    import diffusers

    pipe = diffusers.FluxKontextPipeline(**tiny.tiny_flux(folder).components)
    pipe.save_pretrained(folder, safe_serialization=True)
    return tiny.load(folder)
