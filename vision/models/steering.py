"""Steering vectors: what is added to the hidden states of one layer, and trained instead of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError

FILE = "steering.safetensors"


class Steering(nn.Module):
    """Adds a vector to hidden states (..., W), in their own space or in that of a sparse autoencoder.

    `sign` is 1, or -1 inside `reversed_steering`. The weights of the autoencoder are constants.
    """

    def __init__(self, width: int, layer: int, scale: float, encoder: dict[str, Tensor], dtype: Any) -> None:
        super().__init__()
        self.layer, self.scale, self.sign = layer, scale, 1.0
        for name, weight in encoder.items():
            self.register_buffer(name, weight.to(dtype), persistent=False)
        features = encoder["W_enc"].shape[1] if encoder else width
        self.vector = nn.Parameter(torch.zeros(features))

    def forward(self, hidden: Tensor, sign: float) -> Tensor:
        """Return the steered states.

        h + s v; with an autoencoder h + dec(relu(z + s v)) - dec(z), where z are the features of h.
        """
        added = (sign * self.scale * self.vector).to(hidden.dtype)
        buffers = dict(self.named_buffers())
        if not buffers:
            return hidden + added
        features = (hidden @ buffers["W_enc"] + buffers["b_enc"]).relu()
        if "threshold" in buffers:  # JumpReLU
            features = features * (features > buffers["threshold"])
        # dec(a) - dec(b) = (a - b) W_dec: the bias cancels, and a vector of zeros changes nothing.
        return hidden + ((features + added).relu() - features) @ buffers["W_dec"]


class Steered:
    """Mixed into the class of a layer of transformers, whose output its `steering` then changes.

    The sign goes in as an argument, so that a layer that gradient checkpointing computes again has the same.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, steering_sign=self.steering.sign, **kwargs)  # pyright: ignore

    def forward(self, *args: Any, steering_sign: float, **kwargs: Any) -> Any:
        """Run the layer, and steer the hidden states that it returns."""
        output = super().forward(*args, **kwargs)  # pyright: ignore
        if isinstance(output, tuple):
            return (self.steering(output[0], steering_sign), *output[1:])  # pyright: ignore
        return self.steering(output, steering_sign)  # pyright: ignore


def steering_of(model: nn.Module) -> Steering | None:
    """Find the steering of a model."""
    return next((module for module in model.modules() if isinstance(module, Steering)), None)


@contextmanager
def reversed_steering(model: nn.Module) -> Iterator[None]:
    """Subtract the vector inside this context instead of adding it."""
    found = [module for module in model.modules() if isinstance(module, Steering)]
    for module in found:
        module.sign = -module.sign
    try:
        yield
    finally:
        for module in found:
            module.sign = -module.sign


def save_steering(steering: Steering, folder: Path) -> None:
    """Write the vector, with the layer that it belongs to."""
    from safetensors.torch import save_file

    vector = steering.vector.detach().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"vector": vector}, folder / FILE, metadata={"layer": str(steering.layer)})


@torch.no_grad()
def load_steering(steering: Steering, folder: Path) -> None:
    """Load what `save_steering` wrote, bit for bit.

    Raises `ConfigError` where there is none, or it is that of another layer, or of another space.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / FILE, "pt") as file:
            vector, layer = file.get_tensor("vector"), (file.metadata() or {}).get("layer")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the steering vector '{folder / FILE}': {error}") from error
    if vector.shape != steering.vector.shape or layer != str(steering.layer):
        raise ConfigError(
            f"the steering vector in '{folder}' has {len(vector)} numbers and is for layer {layer}, but the "
            f"transform's has {len(steering.vector)} and is for layer {steering.layer}; set `layer` and "
            "`sae` as they were"
        )
    steering.vector.copy_(vector)
