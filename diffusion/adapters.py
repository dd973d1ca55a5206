"""LoRA adapters (arXiv 2106.09685) on networks of diffusers pipelines: creation, saving and loading."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.runtime.modules import keep_training_precision
from mmrl.runtime.weights import (
    BASE,
    base_hash,
    check_adapter,
    check_base,
    check_settings,
    lora_config,
    read_adapter,
)

# Names in diffusers' format: adapter file, prefix of weight names, header key of the settings.
FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
SETTINGS = "lora_adapter_metadata"
NUMBER = re.compile(r"\d+")  # index of a block in a module name


def place_of(folder: Path, network: str) -> Path:
    """Return the folder of a network's adapter: `folder`, or its subfolder for a pipeline's second network.

    Diffusers loads the subfolder with `load_lora_weights(subfolder, load_into_transformer_2=True)`.
    """
    return folder if network == "transformer" else folder / network


def places_in(folder: Path, networks: Collection[str]) -> list[Path]:
    """List the adapter folders of these networks; if `networks` is empty, of all adapters in `folder`."""
    found = [file.parent for file in sorted(folder.rglob(FILE))] or [folder]
    return [place_of(folder, name) for name in networks] or found


def check_unused(folder: Path, frozen: Collection[str]) -> None:
    """Raise `ConfigError` if a folder holds an adapter of a network that is not trained."""
    if unused := [name for name in frozen if (place_of(folder, name) / FILE).is_file()]:
        raise ConfigError(
            f"'{folder}' holds an adapter of the network '{unused[0]}', which is not trained; set "
            "`networks: both`, or fuse that adapter into the model in diffusers"
        )


def check_targets(network: nn.Module, targets: Sequence[str]) -> Sequence[str]:
    """Return `targets`; raises `ConfigError` if no module name of the network ends with one of them."""
    modules = [f".{name}" for name, _ in network.named_modules()]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in modules):
            ends = {name.partition(".")[2] for name in modules if name.endswith(target.rpartition(".")[2])}
            raise ConfigError(
                f"`targets` names '{target}', which no module of '{type(network).__name__}' ends with"
                + (f"; there are {', '.join(sorted(ends)[:4])}" if ends - {""} else "")
            )
    return targets


def add_lora(network: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Freeze a network and add LoRA of a rank, scaled by alpha / rank, to its modules `targets`.

    The adapter is float32 or float64. It leaves the output of the network unchanged before training.
    """
    from peft import LoraConfig

    options = {"lora_dropout": 0.0, "target_modules": list(targets), "init_lora_weights": "gaussian"}
    _put(network, LoraConfig(r=rank, lora_alpha=alpha, **options))


def continue_lora(network: nn.Module, folder: Path, rank: int, alpha: float | None) -> None:
    """Freeze a network and add a saved adapter in any format, to train it further.

    The output equals that of a diffusers pipeline after `load_lora_weights(folder)`. Raises
    `ValueError` for a rank or scale other than `rank` and `alpha` (None: any), and for all errors of
    `load_lora`.
    """
    weights, config, named, _ = read_lora(folder)
    for option, wanted, saved in (("lora_rank", rank, config.r), ("lora_alpha", alpha, config.lora_alpha)):
        if wanted not in (None, saved):
            raise ConfigError(
                f"the adapter in '{folder}' has {option} {saved}, not {wanted}; set `{option}: {saved}`"
            )
    modules = dict(network.named_modules())
    owners = {name.partition(".lora_")[0] for name in weights}
    if foreign := sorted(owners.difference(modules)):
        raise ConfigError(
            f"the adapter in '{folder}' is of another model: {len(foreign)} of its {len(owners)} modules are "
            f"not in {type(network).__name__}, the first is '{foreign[0]}'"
        )
    if not named:  # expect LoRA in all blocks, to refuse a file that lacks some
        alike = lambda name: (NUMBER.sub("N", name), type(modules[name]))
        patterns = {alike(name) for name in owners}
        config.target_modules = {name for name in modules if alike(name) in patterns}
    _put(network, dataclasses.replace(config, lora_dropout=0.0, init_lora_weights=True, inference_mode=False))
    load_lora(network, folder)


def _put(network: nn.Module, config: Any) -> None:
    network.requires_grad_(False)
    vars(network).pop(BASE, None)  # drop the hash that an earlier adapter stored
    network.add_adapter(config)
    keep_training_precision(network, now=True)  # before float32 weights are loaded into it


def save_lora(network: nn.Module, folder: Path) -> None:
    """Write the adapter with its settings, in the format of the pipeline's `load_lora_weights`."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    settings = {name: _plain(value) for name, value in network.peft_config["default"].to_dict().items()}
    header = {"format": "pt", SETTINGS: json.dumps({f"{PREFIX}{name}": v for name, v in settings.items()})}
    if base := _base_of(network):
        header[BASE] = base
    weights = get_peft_model_state_dict(network)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"{PREFIX}{name}": v.contiguous() for name, v in weights.items()}, folder / FILE, header)


def _plain(value: Any) -> Any:
    """Convert a set or enum in peft's settings to a JSON value."""
    return sorted(value) if isinstance(value, set) else getattr(value, "value", value)


@torch.no_grad()
def load_lora(network: nn.Module, folder: Path) -> None:
    """Load a saved adapter, bit for bit, into the adapter of a network.

    Raises `ValueError` for a file of another format or scale, with missing, foreign, NaN or infinite weights,
    or trained on other base weights.
    """
    from peft import get_peft_model_state_dict

    weights, config, _, base = read_lora(folder)
    current = get_peft_model_state_dict(network)  # shares memory with the network's weights
    own = network.peft_config["default"]
    check_settings(config, own, folder)
    check_adapter(weights, current, folder)
    check_base(base, _base_of(network), folder)
    for name, value in current.items():
        value.copy_(weights[name])


def read_lora(folder: Path) -> tuple[dict[str, Tensor], Any, bool, str]:
    """Return an adapter's weights, its `LoraConfig`, whether the file states it, and the base weights' hash.

    A file without settings in its header gets alpha = rank, a scale of 1, as in diffusers. Raises
    `ValueError` unless the file holds only LoRA weights of the network, with settings that can be trained
    further.
    """
    if not (file := folder / FILE).is_file():
        raise ConfigError(f"there is no adapter in '{folder}'; wanted the file '{FILE}'")
    weights, header = read_adapter(file)
    try:
        settings = json.loads(header.get(SETTINGS, "{}"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"cannot read the settings of the adapter '{file}': {error}") from error
    if foreign := sorted(name for name in weights if not name.startswith(PREFIX) or ".lora_" not in name):
        raise ConfigError(
            f"'{file}' holds {len(foreign)} weights that are no LoRA of the pipeline's transformer in the "
            f"form of peft, the first is '{foreign[0]}'; load it with `load_lora_weights` and `fuse_lora` in "
            "diffusers, and save the whole pipeline"
        )
    weights = {name.removeprefix(PREFIX): value for name, value in weights.items()}
    settings = {key.removeprefix(PREFIX): value for key, value in settings.items() if key.startswith(PREFIX)}
    config = lora_config(settings or _inferred(weights, folder), folder)
    return weights, config, bool(settings), header.get(BASE, "")


def _inferred(weights: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """Infer the settings of an adapter from its weights, as diffusers does."""
    from diffusers.utils import get_peft_kwargs

    ranks = {
        f"^{name}": value.shape[1] for name, value in weights.items() if "lora_B" in name and value.ndim > 1
    }
    if not ranks:
        raise ConfigError(f"the adapter in '{folder}' has no `lora_B`")
    return get_peft_kwargs(ranks, None, weights)


def _base_of(network: nn.Module) -> str:
    """Return the hash of the frozen base weights; computed once and stored on the network."""
    if BASE not in vars(network):
        frozen = (value for name, value in network.named_parameters() if ".lora_" not in name)
        vars(network)[BASE] = base_hash(frozen)
    return vars(network)[BASE]
