"""Checks of loaded weights: complete model files, and adapters that fit their model."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.runtime.content_hash import of_tensors
from mmrl.runtime.modules import DTYPES, placement, stored_dtypes

log = logging.getLogger("mmrl")
# Surplus weights of older files that may be ignored: recomputed buffers, copies of tied weights.
BUFFERS = re.compile(r"(position_ids|inv_freq|masked_bias|attn\.bias|num_batches_tracked|lm_head\.weight)$")
FEW_BITS = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F4")  # low-bit dtypes of safetensors, whose values need scales
BASE = "mmrl_base_weights"  # header key of an adapter file: hash of the base weights
# Settings of a `LoraConfig` that change the effect of given adapter weights.
EFFECTIVE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias")
# Settings that have no effect once weights exist, or that follow from the names of the weights.
PAST = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "exclude_modules", "lora_dropout", "init_lora_weights",
    "layers_to_transform", "layers_pattern", "runtime_config", "ensure_weight_tying",
)  # fmt: skip
# Values of `init_lora_weights` (prefixes) that change the base weights too.
REWRITING = ("pissa", "olora", "corda", "eva", "loftq", "lora_ga")


def load_whole(kind: Any, source: str | Path, **options: Any) -> nn.Module:
    """Load a model of transformers or diffusers from safetensors files that contain every weight.

    Raises `ValueError` if weights are missing, have other shapes, hold NaN or integers, or cannot be read;
    transformers would use random or rounded values instead. The error is also raised if the folder has an
    adapter beside the model, which transformers would apply. Unused weights are logged.

    Args:
        kind: Class of the model.
        source: Folder or hub id.
        options: Options of `kind.from_pretrained`.
    """
    from safetensors import SafetensorError

    place = f"{source}/{options['subfolder']}" if "subfolder" in options else str(source)
    try:
        model, report = kind.from_pretrained(
            str(source),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
        stored = stored_dtypes(Path(place)) if Path(place).is_dir() else {}
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"its weights cannot be read from '{place}': {error}") from error
    _check_loaded(model, report, stored, place)
    if unused := sorted(name for name in report["unexpected_keys"] if not BUFFERS.search(name)):
        log.warning(
            "%s does not use %d of the weights in '%s', the first is '%s'; where that is a layer, its "
            "config.json is of a smaller model",
            type(model).__name__, len(unused), place, unused[0],
        )  # fmt: skip
    return model


def _check_loaded(model: Any, report: Mapping[str, Any], stored: Mapping[str, str], place: str) -> None:
    """Raise `ValueError` if the loading report or the dtypes in the files show a fault of the weights."""
    if getattr(model, "peft_config", None):
        raise ValueError(
            f"'{place}' holds an adapter (adapter_config.json) beside a model; keep each in a folder of its "
            "own, and name that of the adapter as `policy.adapter`"
        )
    if odd := sorted(report["mismatched_keys"]):
        name, saved, own = odd[0]
        raise ValueError(
            f"{len(odd)} weights in '{place}' have other shapes than those of {type(model).__name__}, the "
            f"first is '{name}' with {list(saved)}, not {list(own)}: its config.json is of another model"
        )
    weights = dict(model.named_parameters())
    low = sorted(name for name, dtype in stored.items() if dtype in FEW_BITS)
    if low and not getattr(model.config, "quantization_config", None):
        raise ValueError(
            f"{len(low)} weights in '{place}' are stored in few bits, the first is '{low[0]}' in "
            f"{stored[low[0]]}, but its config.json has no `quantization_config` that tells their scale; "
            "fetch the folder anew, or dequantise it"
        )
    sound = lambda w: w.is_meta or w.dtype not in DTYPES.values() or bool(w.isfinite().all())
    if broken := sorted(name for name, weight in weights.items() if not sound(weight)):
        raise ValueError(
            f"{len(broken)} of {len(weights)} weights in '{place}' hold NaN or infinity, the first is "
            f"'{broken[0]}'; take an earlier checkpoint"
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"the files in '{place}' lack {len(missing)} of the {len(model.state_dict())} weights of "
            f"{type(model).__name__}, the first is '{missing[0]}'"
            + (f"; they hold '{min(report['unexpected_keys'])}'" if report["unexpected_keys"] else "")
            + "; without them it would begin with random numbers: fetch or save the folder anew"
        )


def read_adapter(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the weights of an adapter and the header of its file.

    Raises `ValueError` for a damaged or empty file, and for NaN, infinity or integers.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read the adapter '{file}': {error}") from error
    if not weights:
        raise ConfigError(f"'{file}' holds no weights")
    sound = lambda value: value.is_floating_point() and value.isfinite().all()
    if broken := sorted(name for name, value in weights.items() if not sound(value)):
        raise ConfigError(
            f"{len(broken)} of {len(weights)} weights of the adapter in '{file.parent}' hold NaN, infinity "
            f"or no floating-point numbers, the first is '{broken[0]}'; take an earlier checkpoint"
        )
    return weights, header


def lora_config(settings: Mapping[str, Any], folder: str | Path) -> Any:
    """Create peft's `LoraConfig`; raise `ValueError` for settings that cannot be trained here."""
    from peft import LoraConfig

    try:
        return check_trainable(LoraConfig(**settings), folder)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the adapter in '{folder}' has settings that peft does not take: {error}"
        ) from error


def check_trainable(config: Any, folder: str | Path) -> Any:
    """Return a `LoraConfig` if its adapter can be trained further; raise `ValueError` otherwise.

    The reference model is the model without adapter, so an adapter must not change base weights.
    """
    if str(config.init_lora_weights).startswith(REWRITING):
        raise ConfigError(
            f"the adapter in '{folder}' began with init_lora_weights '{config.init_lora_weights}', which "
            "changes the base weights; save it as an ordinary adapter with peft"
        )
    usual = type(config)()
    kept = (field.name for field in dataclasses.fields(config) if field.name not in (*EFFECTIVE, *PAST))
    values = {name: (getattr(config, name) or None, getattr(usual, name) or None) for name in kept}
    if odd := [f"{name}: {value!r}" for name, (value, plain) in values.items() if value != plain]:
        raise ConfigError(
            f"the adapter in '{folder}' has {', '.join(odd)}, which cannot be trained further here; merge it "
            "into the model with peft (`merge_and_unload`), and name the merged folder as `policy.model`"
        )
    return config


def check_adapter(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], folder: str | Path) -> None:
    """Raise `ValueError` unless a saved adapter has the same weight names and shapes as `own`."""
    shapes = [{(name, *value.shape) for name, value in held.items()} for held in (own, weights)]
    if odd := sorted(shapes[0] ^ shapes[1]):
        raise ConfigError(
            f"the adapter in '{folder}' does not fit the policy's: {len(odd)} weights are on one side only "
            f"or differ in shape, the first is {odd[0]}; was it trained on this model, and are its options "
            "(`lora_rank`, layers, `freeze_vision_tower`) the same?"
        )


def check_settings(saved: Any, own: Any, folder: str | Path) -> None:
    """Raise `ValueError` if two `LoraConfig` would give different models for the same weights."""
    pairs = {name: (getattr(saved, name) or None, getattr(own, name) or None) for name in EFFECTIVE}
    if odd := [f"{name} {then}, not {now}" for name, (then, now) in pairs.items() if then != now]:
        raise ConfigError(
            f"the adapter in '{folder}' was trained with {'; '.join(odd)}; set `lora_rank` and `lora_alpha` "
            "as they were, or, for other settings, name the folder as `adapter` of the policy"
        )


def check_base(base: str, own: str, folder: str | Path) -> None:
    """Raise `ValueError` if the model's weights differ from those that an adapter was trained on."""
    if base and own and base != own:
        raise ConfigError(
            f"the adapter in '{folder}' was trained over other weights than those of the model (their hashes "
            f"are {base} and {own}); set `policy.model` to the model that it was trained over"
        )


def base_hash(frozen: Iterable[Tensor]) -> str:
    """Hash the base weights of an adapter, rounded to bfloat16, so that float32 copies hash equally.

    Returns "" for float16 (rounds differently), quantised and fake weights.
    """
    frozen = list(frozen)
    if placement().empty or any(
        w.is_meta or not w.is_floating_point() or w.dtype == torch.float16 for w in frozen
    ):
        return ""
    return of_tensors(tensor.detach().to(torch.bfloat16) for tensor in frozen)[:16]
