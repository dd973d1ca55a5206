"""The frozen parts of a pipeline: text encoders and autoencoder, and when they are on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

Group = Literal["text_encoders", "vae"]


class FrozenParts:
    """Moves the frozen parts of a pipeline to the device on which they are used.

    Args:
        pipe: The pipeline.
        networks: Names of the networks that generate, which are not moved.
        offload: Groups of parts that return to the CPU after each use, to save memory of the device. `vae` is
            the autoencoder; `text_encoders` is all other parts, image encoders too.
    """

    def __init__(self, pipe: Any, networks: Collection[str], offload: Collection[Group]) -> None:
        self.offload = frozenset(offload)
        self.groups: dict[Group, list[nn.Module]] = {"text_encoders": [], "vae": []}
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and name not in networks:
                self.groups["vae" if name == "vae" else "text_encoders"].append(part)
        for group in self.offload:
            self._move(group, torch.device("cpu"))

    @contextmanager
    def on(self, device: torch.device, *groups: Group) -> Iterator[None]:
        """Have groups on a device inside the block; those of `offload` return to the CPU after it."""
        for group in groups:
            self._move(group, device)
        try:
            yield
        finally:
            for group in self.offload.intersection(groups):
                self._move(group, torch.device("cpu"))

    def device_bytes(self) -> int:
        """Most bytes on the device at once: all parts that stay there, and the largest that come and go."""
        sizes = {
            group: sum(t.nbytes for part in parts for t in (*part.parameters(), *part.buffers()))
            for group, parts in self.groups.items()
        }
        visiting = [size for group, size in sizes.items() if group in self.offload]
        staying = sum(size for group, size in sizes.items() if group not in self.offload)
        return staying + max(visiting, default=0)

    def _move(self, group: Group, device: torch.device) -> None:
        for part in self.groups[group]:
            part.to(device)


def set_vae_options(vae: Any, tiling: bool, slicing: bool) -> None:
    """Let an autoencoder work on tiles of an image, or on one image at a time, to save memory.

    Raises `ValueError` for an autoencoder that cannot.
    """
    for wanted, option, name in (
        (tiling, "vae_tiling", "enable_tiling"),
        (slicing, "vae_slicing", "enable_slicing"),
    ):
        if wanted and not hasattr(vae, name):
            raise ValueError(f"`{option}` is on, but the autoencoder '{type(vae).__name__}' has no `{name}`")
        if wanted:
            getattr(vae, name)()
