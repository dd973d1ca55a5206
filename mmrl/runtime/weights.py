"""Weights are those that were named: models whose files hold every weight, and adapters that fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.runtime.content_hash import of_tensors
from mmrl.runtime.modules import placement

BASE = "mmrl_base_weights"  # in the header of an adapter: a hash of the frozen weights below it
# Settings of a `LoraConfig` that decide what the weights of an adapter do.
EFFECTIVE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias")


def load_whole(kind: Any, source: str | Path, **options: Any) -> nn.Module:
    """Load a model of transformers or diffusers from safetensors.

    `kind` is the class, `options` are those of its `from_pretrained`. Raises `ValueError` where the files
    lack weights or cannot be read: transformers would begin with random numbers in their place.
    """
    from safetensors import SafetensorError

    try:
        model, report = kind.from_pretrained(
            str(source), use_safetensors=True, output_loading_info=True, **options
        )
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"its weights cannot be read: {error}") from error
    if missing := sorted(report["missing_keys"]):
        part = f"/{options['subfolder']}" if "subfolder" in options else ""
        raise ValueError(
            f"the files in '{source}{part}' lack {len(missing)} of the {len(model.state_dict())} weights of "
            f"{type(model).__name__}, the first is '{missing[0]}'"
            + (f"; they hold '{min(report['unexpected_keys'])}'" if report["unexpected_keys"] else "")
            + "; without them it would begin with random numbers: fetch or save the folder anew"
        )
    return model


def check_adapter(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], folder: str | Path) -> None:
    """Raise `ValueError` where a saved adapter lacks weights of `own`, has others, or holds NaN."""
    shapes = [{(name, *value.shape) for name, value in held.items()} for held in (own, weights)]
    if odd := sorted(shapes[0] ^ shapes[1]):
        raise ValueError(
            f"the adapter in '{folder}' does not fit the policy's: {len(odd)} weights are on one side only "
            f"or differ in shape, the first is {odd[0]}; was it trained on this model, and are `lora_rank` "
            "and `freeze_vision_tower` the same?"
        )
    check_finite(weights, folder)


def check_adapter_file(weights: Mapping[str, Tensor], model: nn.Module, folder: str | Path) -> None:
    """Raise `ValueError` where a saved adapter is of another model, has half of a pair, or holds NaN."""
    modules = dict(model.named_modules())
    owners = {name.removeprefix("base_model.model.").partition(".lora_")[0]: name for name in weights}
    if not weights:
        raise ValueError(f"the adapter in '{folder}' holds no weights")
    if foreign := sorted(name for owner, name in owners.items() if owner not in modules):
        raise ValueError(
            f"it is of another model: {len(foreign)} of its {len(owners)} modules are not in "
            f"{type(model).__name__}, the first is of '{foreign[0]}'"
        )
    pairs = {name: name.replace("lora_A", "lora_B") for name in weights if "lora_A" in name}
    pairs |= {name: name.replace("lora_B", "lora_A") for name in weights if "lora_B" in name}
    if lone := sorted(name for name, other in pairs.items() if other not in weights):
        raise ValueError(f"it lacks the other half of {len(lone)} weights, the first is '{lone[0]}'")
    check_finite(weights, folder)


def check_finite(weights: Mapping[str, Tensor], folder: str | Path) -> None:
    """Raise `ValueError` where weights of a saved adapter hold NaN or infinity."""
    if broken := sorted(name for name, value in weights.items() if not value.isfinite().all()):
        raise ValueError(
            f"{len(broken)} of {len(weights)} weights of the adapter in '{folder}' hold NaN or infinity, the "
            f"first is '{broken[0]}'; take an earlier checkpoint"
        )


def check_settings(saved: Any, own: Any, folder: str | Path) -> None:
    """Raise `ValueError` where two `LoraConfig` make other models of the same weights."""
    pairs = {name: (getattr(saved, name) or None, getattr(own, name) or None) for name in EFFECTIVE}
    if odd := [f"{name} {then}, not {now}" for name, (then, now) in pairs.items() if then != now]:
        raise ValueError(
            f"the adapter in '{folder}' was trained with {'; '.join(odd)}; set `lora_rank` and `lora_alpha` "
            "as they were, or, for other settings, name the folder as `adapter` of the policy"
        )


def check_base(base: str, own: str, folder: str | Path) -> None:
    """Raise `ValueError` where an adapter was trained over other weights, by the hashes of both."""
    if base and own and base != own:
        raise ValueError(
            f"the adapter in '{folder}' was trained over other weights than those of the model (their hashes "
            f"are {base} and {own}); set `policy.model` to the model that it was trained over"
        )


def base_hash(frozen: Iterable[Tensor]) -> str:
    """Hash the frozen weights below an adapter, rounded to bfloat16, so that float32 has the same hash.

    Empty for float16, which rounds otherwise, for weights in few bits, and for those with shapes alone.
    """
    frozen = list(frozen)
    if placement().empty or any(not w.is_floating_point() or w.dtype == torch.float16 for w in frozen):
        return ""
    return of_tensors(tensor.detach().to(torch.bfloat16) for tensor in frozen)[:16]
