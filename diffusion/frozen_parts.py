"""Frozen components of a pipeline (text encoders, autoencoder), and moving them to the device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.runtime.low_bit import scales_of

Group = Literal["text_encoders", "vae"]
CPU = torch.device("cpu")


def group_of(part: str, networks: Collection[str]) -> Group | None:
    """Return the group of a pipeline component by its name; None for the generating networks."""
    return None if part in networks else "vae" if part == "vae" else "text_encoders"


class FrozenParts:
    """Moves the frozen components of a pipeline between the CPU and the device that uses them.

    Args:
        pipe: The pipeline.
        networks: Names of the generating networks, which are not moved.
        offload: Groups of components that stay on the CPU while a network runs, to save device memory.
            `vae`: the autoencoder. `text_encoders`: all other components, including image encoders.
        read: Function that loads a component by name. If given, the text encoders of `pipe` are placeholders
            without data, which are loaded at their first use. None: all components have their weights.
    """

    def __init__(
        self,
        pipe: Any,
        networks: Collection[str],
        offload: Collection[Group],
        read: Callable[[str], nn.Module] | None = None,
    ) -> None:
        self.pipe, self.offload, self.read = pipe, frozenset(offload), read
        self.groups: dict[Group, list[str]] = {"text_encoders": [], "vae": []}
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and (group := group_of(name, networks)):
                self.groups[group].append(name)
        self._visiting = dict.fromkeys(self.offload, torch.device("meta"))  # where groups off the CPU are
        self.make_room()

    def on(self, device: torch.device, *groups: Group) -> None:
        """Move groups of components to a device; offloaded groups stay there until `make_room` is called."""
        if "text_encoders" in groups:
            self.read_all()
        for group in groups:
            if self._visiting.get(group) != device:
                self._move(group, device)
        self._visiting |= dict.fromkeys(self.offload.intersection(groups), device)

    def make_room(self) -> None:
        """Move the offloaded groups back to the CPU, to free device memory for a network."""
        while self._visiting:
            self._move(self._visiting.popitem()[0], CPU)

    def nbytes(self, group: Group) -> int:
        """Return the size in bytes of the weights of a group of components."""
        weights = lambda part: (*part.parameters(), *part.buffers(), *scales_of(part))
        return sum(tensor.nbytes for part in self.parts(group) for tensor in weights(part))

    def read_all(self) -> None:
        """Replace placeholder text encoders by loaded ones, if there are any."""
        if self.read is not None:
            names, read, self.read = self.groups["text_encoders"], self.read, None
            self.pipe.register_modules(**{name: read(name) for name in names})

    def parts(self, group: Group) -> list[nn.Module]:
        """Return the modules of a group of components, `vae` or `text_encoders`."""
        return [self.pipe.components[name] for name in self.groups[group]]

    def _move(self, group: Group, device: torch.device) -> None:
        for part in self.parts(group):
            weights = [*part.parameters(), *part.buffers()]
            placeholder = any(isinstance(weight, FakeTensor) for weight in weights)
            if not placeholder and any(weight.device != device for weight in weights):
                part.to(device)


def check_bits(model: str, bits: int | None, *, adapted: object, moved: object) -> None:
    """Raise `ConfigError` if text encoders cannot be quantised to `bits`; None: no quantisation.

    Args:
        model: The option `model`.
        bits: The option `text_encoder_bits`.
        adapted: Whether an adapter is saved instead of the whole pipeline with its encoders.
        moved: Whether encoders are moved between the device and the CPU.
    """
    if bits and not adapted:
        raise ConfigError(
            "`text_encoder_bits` wants `lora_rank`: without an adapter the whole pipeline is saved, and its "
            "encoders would be in few bits"
        )
    if bits and objects.is_object(model):
        raise ConfigError("`text_encoder_bits` needs a `model` that is a folder or a model of the hub")
    if bits == 8 and moved:
        raise ConfigError(
            "text encoders in 8 bits stay on the device; set `text_encoder_bits: 4`, or leave out "
            "`encoded_prompts` and `offload: [text_encoders]`"
        )


def set_vae_options(vae: Any, tiling: bool, slicing: bool) -> None:
    """Turn on tiling (parts of an image) or slicing (one image at a time) of a VAE, to save memory.

    Raises `ValueError` if the VAE does not support the option.
    """
    for wanted, option, name in (
        (tiling, "vae_tiling", "enable_tiling"),
        (slicing, "vae_slicing", "enable_slicing"),
    ):
        if wanted and not hasattr(vae, name):
            raise ValueError(f"`{option}` is on, but the autoencoder '{type(vae).__name__}' has no `{name}`")
        if wanted:
            getattr(vae, name)()
