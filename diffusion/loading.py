"""The door to diffusers: pipelines, their weights, and folders that they read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.runtime.modules import DTYPES


def load_pipeline(name: str, *, dtype: str) -> Any:
    """Load a pipeline by hub id or folder, from safetensors only."""
    try:
        from diffusers import DiffusionPipeline
    except ImportError as error:
        raise ImportError("policy 'diffusion.flow' needs diffusers; install mmrl[diffusion]") from error
    try:
        # Parts that a pipeline does without have to be named, or they are asked for.
        listed = DiffusionPipeline.load_config(name)
        absent = {part: None for part, source in listed.items() if source == [None, None]}
        pipe = DiffusionPipeline.from_pretrained(name, dtype=DTYPES[dtype], use_safetensors=True, **absent)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the pipeline '{name}': {error}") from error
    pipe.set_progress_bar_config(disable=True)
    for module in modules_of(pipe):
        module.requires_grad_(False).eval()
    return pipe


def modules_of(pipe: Any, but: tuple[str, ...] = ()) -> Iterator[nn.Module]:
    """List the networks of a pipeline, except those of some places."""
    for name, part in pipe.components.items():
        match part:
            case nn.Module() if name not in but:
                yield part


def decode_exactly(pipe: Any, dtype: str) -> None:
    """Decode in float32 where the network computes in float16, in which decoders overflow."""
    if dtype == "float16" and pipe.vae is not None:
        pipe.vae.to(torch.float32)


def save_pipeline(pipe: Any, folder: Path) -> None:
    """Write the whole pipeline as an ordinary folder."""
    pipe.save_pretrained(str(folder), safe_serialization=True)


def load_network(network: nn.Module, folder: Path) -> None:
    """Take up the weights of a network that `save_pipeline` wrote, bit for bit."""
    # The folder holds trained weights in float32; read in the widest precision, nothing is lost.
    widest = max((parameter.dtype for parameter in network.parameters()), key=lambda dtype: dtype.itemsize)
    saved = type(network).from_pretrained(str(folder / "transformer"), dtype=widest, use_safetensors=True)
    weights = saved.state_dict()
    with torch.no_grad():
        for name, value in network.state_dict().items():
            value.copy_(weights[name])
