"""LoRA (arXiv 2106.09685) on the network of a pipeline, in the file that `pipe.load_lora_weights` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from mmrl.runtime.modules import keep_training_precision

FILE = "pytorch_lora_weights.safetensors"  # diffusers' name of it
PLACE = "transformer."  # what diffusers puts before the names of this network's weights
SETTINGS = "lora_adapter_metadata"  # where diffusers keeps rank, alpha and targets in the file's header


def add(network: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Freeze a network and put LoRA of this rank, scaled by alpha / rank, on its modules of these names.

    Its weights are float32 or better. The network says what it said before, until they are trained.
    """
    from peft import LoraConfig

    network.requires_grad_(False)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(targets), init_lora_weights="gaussian"
    )
    network.add_adapter(config)
    keep_training_precision(network)


def save(pipe_class: type, network: nn.Module, folder: Path) -> None:
    """Write the adapter, with rank and alpha, as the class of the pipeline does."""
    from peft import get_peft_model_state_dict

    pipe_class.save_lora_weights(
        str(folder),
        transformer_lora_layers=get_peft_model_state_dict(network),
        transformer_lora_adapter_metadata=network.peft_config["default"].to_dict(),
    )


@torch.no_grad()
def load(network: nn.Module, folder: Path) -> None:
    """Take up the adapter that `save` wrote, bit for bit, into the one that `add` put there."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open
    from safetensors.torch import load_file

    if not (folder / FILE).is_file():
        raise ValueError(f"there is no adapter in '{folder}'; wanted the file '{FILE}'")
    saved = {name.removeprefix(PLACE): value for name, value in load_file(folder / FILE).items()}
    with safe_open(folder / FILE, framework="pt") as file:
        settings = json.loads((file.metadata() or {}).get(SETTINGS, "{}"))
    here = get_peft_model_state_dict(network)  # shares memory with the network's weights
    shapes = [{name: tuple(value.shape) for name, value in weights.items()} for weights in (here, saved)]
    odd = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))
    if odd:
        raise ValueError(
            f"the adapter in '{folder}' does not fit the network: {len(odd)} weights are on one side only or "
            f"differ in shape, the first is {odd[0]}; is `lora_rank` the same, and the model?"
        )
    config = network.peft_config["default"]
    alpha = settings.get(f"{PLACE}lora_alpha", config.r)  # a file that does not say is scaled by 1
    if alpha != config.lora_alpha:
        raise ValueError(
            f"the adapter in '{folder}' was trained with lora_alpha {alpha}, not {config.lora_alpha}; set "
            f"`lora_alpha: {alpha}`"
        )
    for name, value in here.items():
        value.copy_(saved[name])
