"""YaPO (arXiv 2601.08441): learn a steering vector from preference pairs, in both directions.

Title: YaPO: Learnable Sparse Activation Steering Vectors for Domain Adaptation
Formula: h' = h + dec(relu(z + s v)) - dec(z), z the features of h; L = (L(v; w, l) + L(-v; l, w)) / 2.
Our reading: the mean of both directions, where the papers (BiPO, arXiv 2406.00045) draw one for every
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import Needs, objective, transform
from mmrl.core.step_table import Batch, StepOutput
from mmrl.runtime.modules import record_transform, twin
from mmrl.vision.models.trained_part import ReadSteps, TrainedPart


@objective
@dataclass(frozen=True, kw_only=True)
class Bidirectional:
    """Learn from pairs with the steering vector added, and from swapped pairs with it subtracted.

    The vector then points from the rejected to the chosen answers (BiPO, arXiv 2406.00045; YaPO, arXiv
    2601.08441). The loss is the mean of both directions, where the papers draw one for every batch: our
    reading, with the same expectation. Metrics of the second direction begin with `reversed/`.

    Args:
        objective: A comparison of pairs, such as `{name: comparison, implicit_reward: log_ratio, compare:
            sigmoid}`; what it compares with does not change its sign.
    """

    objective: Callable

    @property
    def needs(self) -> Needs:
        """What the comparison needs, and the log-probabilities with the vector subtracted."""
        return self.objective.needs | Needs(outputs=frozenset({"reversed_logp"}))

    def weigh(self, batch: Batch) -> Tensor:
        """Weigh every step as the comparison does."""
        return self.objective.weigh(batch)

    def __call__(self, new: StepOutput, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss of a micro-batch and its metrics, as shares of the update."""
        loss, metrics = self.objective(new, batch)
        back = StepOutput(new.extra["reversed_logp"], {})
        other, more = self.objective(back, batch.replace(advantage=-batch.advantage))
        return (loss + other) / 2, {
            **metrics,
            **{f"reversed/{metric}": value for metric, value in more.items()},
        }


FILE = "steering.safetensors"
ENCODER = ("W_enc", "b_enc", "W_dec", "b_dec")  # as Gemma Scope and SAELens name them; perhaps a `threshold`


class Steering(TrainedPart, nn.Module):
    """Adds a trained vector to hidden states (..., W), or to their features in a sparse autoencoder.

    `sign` is 1, or -1 inside `reversed`. The weights of the autoencoder are constants.
    """

    name = "a steering vector"
    cannot_merge = (
        "a model with a steering vector cannot be written as a model of its own, which has no place for it; "
        "keep the checkpoint, and name its folder in `weights` of `vision.steering`"
    )
    outputs = frozenset({"reversed_logp"})

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

    @contextmanager
    def reversed(self) -> Iterator[None]:
        """Subtract the vector inside the block instead of adding it."""
        self.sign = -self.sign
        try:
            yield
        finally:
            self.sign = -self.sign

    def read(self, read: ReadSteps, steps: Any, outputs: Any, teacher: Any) -> dict[str, Tensor]:
        """Compute the outputs, and `reversed_logp`: log-probabilities with the vector subtracted."""
        values = read(steps, outputs, teacher)
        if "reversed_logp" in outputs:
            with self.reversed():
                values["reversed_logp"] = read(steps, frozenset())["logp"]
        return values

    def save(self, folder: Path) -> None:
        """Write the vector and the number of its layer."""
        from safetensors.torch import save_file

        vector = self.vector.detach().cpu().contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"vector": vector}, folder / FILE, metadata={"layer": str(self.layer)})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the vector that `save` wrote, bit for bit.

        Raises `ConfigError` without one, and for a vector of another layer or size.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(folder / FILE, "pt") as file:
                vector, layer = file.get_tensor("vector"), (file.metadata() or {}).get("layer")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read the steering vector '{folder / FILE}': {error}") from error
        if vector.shape != self.vector.shape or layer != str(self.layer):
            raise ConfigError(
                f"the steering vector in '{folder}' has {len(vector)} numbers and is for layer {layer}, but "
                f"the transform's has {len(self.vector)} and is for layer {self.layer}; set `layer` and "
                "`sae` as they were"
            )
        self.vector.copy_(vector)


class Steered:
    """Mixin for the class of a layer of transformers: applies the layer's `steering` to its output.

    The sign is an argument, so that gradient checkpointing recomputes the layer with the same sign.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, steering_sign=self.steering.sign, **kwargs)  # pyright: ignore

    def forward(self, *args: Any, steering_sign: float, **kwargs: Any) -> Any:
        """Run the layer, and steer the hidden states that it returns."""
        output = super().forward(*args, **kwargs)  # pyright: ignore
        if isinstance(output, tuple):
            return (self.steering(output[0], steering_sign), *output[1:])  # pyright: ignore
        return self.steering(output, steering_sign)  # pyright: ignore


@transform(scope="vision", trains=True)
def steering(
    model: nn.Module, *, layer: NonNegativeInt, scale: float = 1.0, sae: str = "", weights: str = ""
) -> nn.Module:
    """Add a trained vector to the hidden states after a layer; all weights of the model stay as they are.

    As a transform of the policy its vector is what learns, from zeros on; with a LoRA adapter, or as a
    transform of an engine, it stays. It acts on prompts and answers. A checkpoint has the vector alone
    (`steering.safetensors`). YaPO (arXiv 2601.08441) has an autoencoder, BiPO (arXiv 2406.00045) none.

    Args:
        layer: Number of the layer of the language model, from 0.
        scale: Factor of the vector.
        sae: Path of a sparse autoencoder in safetensors, with `W_enc` (W, F), `b_enc` (F,), `W_dec` (F, W)
            and perhaps `threshold` (F,), as of Gemma Scope; the vector is then one of its F features.
        weights: Folder of a checkpoint's model whose vector to begin with.
    """
    view = twin(model)
    layers = view.base_model.get_decoder().layers
    if layer >= len(layers):
        raise ConfigError(f"`steering` wants a layer from 0 to {len(layers) - 1}, got {layer}")
    chosen, embedding = layers[layer], view.get_input_embeddings().weight
    encoder = read_encoder(Path(sae), embedding.shape[1]) if sae else {}
    added = Steering(embedding.shape[1], layer, scale, encoder, embedding.dtype).to(embedding.device)
    if weights:
        added.load(Path(weights))
    kind = type(chosen)
    chosen.__class__ = type(f"Steered{kind.__name__}", (Steered, kind), {})
    chosen.steering = added
    options = {"layer": layer, "scale": scale, "sae": sae}
    return record_transform(view, model, "steering", options)


def read_encoder(path: Path, width: int) -> dict[str, Tensor]:
    """Read a sparse autoencoder of hidden states of a width; raises `ConfigError` where it does not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the sparse autoencoder '{path}' as safetensors: {error}") from error
    if missing := [name for name in ENCODER if name not in saved]:
        raise ConfigError(
            f"'{path}' lacks {', '.join(missing)} of a sparse autoencoder; it has {', '.join(sorted(saved))}"
        )
    features = saved["W_enc"].shape[-1]
    shapes = {"W_enc": (width, features), "b_enc": (features,), "W_dec": (features, width)}
    shapes |= {"b_dec": (width,), "threshold": (features,)}
    for name, shape in shapes.items():
        if name in saved and tuple(saved[name].shape) != shape:
            raise ConfigError(
                f"'{name}' of '{path}' has the shape {tuple(saved[name].shape)}, but hidden states of width "
                f"{width} and {features} features want {shape}; take an autoencoder of this model's layer"
            )
    return {name: saved[name] for name in shapes if name in saved and name != "b_dec"}
