"""Loading and saving of diffusers pipelines and of LoRA adapters (arXiv 2106.09685) on their network."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.config import objects
from mmrl.runtime.modules import (
    DTYPES,
    copy_weights,
    keep_training_precision,
    making_weights,
    model_source,
    placement,
    widest_dtype,
)

# diffusers' names of the adapter's file, of this network in it, and of the settings in the file's header
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
SETTINGS = "lora_adapter_metadata"
LIBRARIES = (None, "diffusers", "transformers")  # where the parts of a pipeline may come from


def load_pipeline(name: str, *, dtype: str) -> Any:
    """Load a frozen pipeline by hub id or folder, or take an object; no code of its folder is run."""
    pipe = objects.get(name) if objects.is_object(name) else _read_pipeline(name, dtype)
    pipe.set_progress_bar_config(disable=True)
    for module in modules_of(pipe):
        module.requires_grad_(False).eval()
    return pipe


def _read_pipeline(name: str, dtype: str) -> Any:
    """Read a pipeline from safetensors."""
    try:
        from diffusers import DiffusionPipeline
    except ImportError as error:
        raise ImportError("policy 'diffusion.flow' needs diffusers; install mmrl[diffusion]") from error
    try:
        source = model_source(name)
        parts: Any = DiffusionPipeline.load_config(source)
        _check_no_code(parts)
        # diffusers asks for parts that a pipeline does not have unless they are passed as None.
        absent = {part: None for part, origin in parts.items() if origin == [None, None]}
        # Parts that are given are not read.
        given = absent | (_empty_networks(source, parts, DTYPES[dtype]) if placement().empty else {})
        # The base class would read optional parts in spite of that.
        library = importlib.import_module("diffusers")
        pipeline: Any = getattr(library, parts["_class_name"], DiffusionPipeline)
        # Its parts go onto the device file by file; of several GPUs, that is this process's current one.
        device = placement().device
        return pipeline.from_pretrained(
            source,
            dtype=DTYPES[dtype],
            device_map=device and device.type,
            use_safetensors=True,
            trust_remote_code=False,
            **given,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the pipeline '{name}': {error}") from error


def _check_no_code(parts: Mapping[str, Any]) -> None:
    """Raise `ValueError` for classes of the pipeline's own folder, which older versions of diffusers run."""
    own = [
        part
        for part, origin in parts.items()
        if (part == "_class_name" and type(origin) is not str)
        or (type(origin) is list and len(origin) == 2 and origin[0] not in LIBRARIES)
    ]
    if own:
        raise ValueError(
            f"it wants code that is not part of {' and '.join(LIBRARIES[1:])} for {', '.join(own)}; no code "
            "of a model folder is run"
        )


def _empty_networks(source: str, parts: Mapping[str, Any], dtype: torch.dtype) -> dict[str, nn.Module]:
    """Make the networks of a pipeline with weights that have shapes alone, from their configurations."""
    made = {}
    for part, origin in parts.items():
        if type(origin) is not list or origin == [None, None]:  # a setting of the pipeline, or no part
            continue
        kind = getattr(importlib.import_module(origin[0]), origin[1])
        if issubclass(kind, nn.Module):
            with making_weights():
                made[part] = _of_config(kind, source, part, dtype)
    return made


def _of_config(kind: Any, source: str, part: str, dtype: torch.dtype) -> nn.Module:
    """Make a network of diffusers or transformers from its configuration in the folder of a pipeline."""
    kept = kind._keep_in_fp32_modules
    if hasattr(kind, "load_config"):
        network = kind.from_config(kind.load_config(source, subfolder=part))
    else:
        from transformers import AutoConfig

        network = kind(AutoConfig.from_pretrained(source, subfolder=part, trust_remote_code=False))
        kept = kept if dtype == torch.float16 else ()  # transformers has them in bfloat16
    for name, weight in network.state_dict(keep_vars=True).items():
        if weight.is_floating_point() and not set(kept or ()) & set(name.split(".")):
            weight.data = weight.data.to(dtype)
    return network


def modules_of(pipe: Any, but: tuple[str, ...] = ()) -> Iterator[nn.Module]:
    """List the networks of a pipeline, except the components named in `but`."""
    for name, part in pipe.components.items():
        match part:
            case nn.Module() if name not in but:
                yield part


def load_network(network: nn.Module, folder: Path) -> None:
    """Load the weights of a network from the folder of a saved pipeline, bit for bit."""
    # The folder holds trained weights in float32; read in the widest precision, nothing is lost.
    folder = folder / "transformer"
    widest = widest_dtype(network, folder)
    copy_weights(network, type(network).from_pretrained(str(folder), dtype=widest, use_safetensors=True))


def add_lora(network: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Freeze a network and put LoRA of this rank, scaled by alpha / rank, on its modules of these names.

    Its weights are float32 or better. Until they are trained, the network's output does not change.
    """
    from peft import LoraConfig

    network.requires_grad_(False)
    options = {"lora_dropout": 0.0, "target_modules": list(targets), "init_lora_weights": "gaussian"}
    network.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, **options))
    keep_training_precision(network, now=True)  # a saved adapter may be loaded into it, in float32


def save_lora(pipe_class: type, network: nn.Module, folder: Path) -> None:
    """Write the adapter, with rank and alpha, as `pipe.load_lora_weights` reads it."""
    from peft import get_peft_model_state_dict

    pipe_class.save_lora_weights(
        str(folder),
        transformer_lora_layers=get_peft_model_state_dict(network),
        transformer_lora_adapter_metadata=network.peft_config["default"].to_dict(),
    )


@torch.no_grad()
def load_lora(network: nn.Module, folder: Path) -> None:
    """Load the adapter that `save_lora` wrote, bit for bit, into the one that `add_lora` made."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open
    from safetensors.torch import load_file

    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise ValueError(f"there is no adapter in '{folder}'; wanted the file '{ADAPTER_FILE}'")
    saved = {name.removeprefix(PREFIX): value for name, value in load_file(file).items()}
    with safe_open(file, framework="pt") as opened:
        settings = json.loads((opened.metadata() or {}).get(SETTINGS, "{}"))
    current = get_peft_model_state_dict(network)  # shares memory with the network's weights
    shapes = [{(name, *value.shape) for name, value in weights.items()} for weights in (current, saved)]
    if odd := sorted(shapes[0] ^ shapes[1]):
        raise ValueError(
            f"the adapter in '{folder}' does not fit the network: {len(odd)} weights are on one side only or "
            f"differ in shape, the first is {odd[0]}; is `lora_rank` the same, and the model?"
        )
    config = network.peft_config["default"]
    alpha = settings.get(f"{PREFIX}lora_alpha", config.r)  # without it, diffusers scales by 1
    if alpha != config.lora_alpha:
        raise ValueError(
            f"the adapter in '{folder}' was trained with lora_alpha {alpha}, not {config.lora_alpha}; set "
            f"`lora_alpha: {alpha}`"
        )
    for name, value in current.items():
        value.copy_(saved[name])
