"""The door to transformers and peft: models, processors, adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.runtime.modules import DTYPES


def load_model(name: str, *, dtype: str, attn_implementation: str) -> nn.Module:
    """Load a vision-language model by hub id or folder, from safetensors only."""
    from transformers import AutoModelForImageTextToText

    try:
        return AutoModelForImageTextToText.from_pretrained(
            name, dtype=DTYPES[dtype], attn_implementation=attn_implementation, use_safetensors=True
        ).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the model '{name}': {error}") from error


def load_processor(name: str, **settings: Any) -> Any:
    """Load the processor of a model: tokenizer, chat template, and what turns pictures into tensors."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the processor of '{name}': {error}") from error


def freeze_tower(model: nn.Module) -> None:
    """Stop learning in everything but the language model and its head."""
    language = {id(parameter) for parameter in model.get_decoder().parameters()}
    language |= {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in language)


def add_adapter(model: nn.Module, *, rank: int, alpha: float, tower: bool) -> nn.Module:
    """Put LoRA on every linear layer of the language model, and with `tower` of the vision tower, but never
    on the head."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=_linear_layers(model, tower)
    )
    return get_peft_model(model, config)


def load_adapter(model: nn.Module, folder: str) -> nn.Module:
    """Put a saved adapter on a model, to be trained further."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, folder, is_trainable=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the adapter '{folder}': {error}") from error


def _linear_layers(model: nn.Module, tower: bool) -> str:
    """Match the names of linear layers as one pattern, the numbers of blocks left open, so that a saved
    adapter stays readable."""
    names = {id(module): name for name, module in model.named_modules()}
    decoder, head = names[id(model.get_decoder())], names[id(model.get_output_embeddings())]
    linear = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != head
    ]
    chosen = [name for name in linear if tower or name.startswith(decoder + ".")]
    # A number at the end of a name stays: the neighbours of a linear layer in a list may be anything.
    return "|".join(dict.fromkeys(re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", re.escape(name)) for name in chosen))


def checkpoint_layers(model: nn.Module) -> None:
    """Recompute layers in the backward pass. Only the layers are told that they train, so dropout stays
    off."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # transformers 5.23 gave it this name; before, there is only the other.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def save_model(model: nn.Module, adapter: nn.Module | None, processor: Any, folder: Path) -> None:
    """Write an ordinary folder: an adapter where there is one, else the whole model; the processor beside
    it."""
    (adapter or model).save_pretrained(str(folder))
    processor.save_pretrained(str(folder))


def load_weights(model: nn.Module, adapter: nn.Module | None, folder: Path) -> None:
    """Take up weights that `save_model` wrote, bit for bit."""
    if adapter is not None:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(adapter, load_file(folder / "adapter_model.safetensors"))
        return
    # The folder names one dtype, that of the frozen weights; the widest one holds trained weights too.
    widest = max((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
    saved = type(model).from_pretrained(str(folder), dtype=widest, use_safetensors=True).state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(saved[name])


def blank_image(processor: Any) -> dict[str, Tensor]:
    """Make the tensors of one small black picture."""
    inputs = processor.image_processor(
        images=[torch.zeros(3, 56, 56, dtype=torch.uint8)], return_tensors="pt"
    )
    return {name: torch.as_tensor(value) for name, value in inputs.items()}


@contextmanager
def cache_enabled(model: nn.Module) -> Iterator[None]:
    """Let a model that recomputes its layers use a cache for a while: its layers must not believe that they
    train."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
