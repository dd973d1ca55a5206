"""YaPO (arXiv 2601.08441): learn a steering vector from preference pairs, in both directions.

Title: YaPO: Learnable Sparse Activation Steering Vectors for Domain Adaptation
Formula: h' = h + dec(relu(z + s v)) - dec(z), z the features of h; L = (L(v; w, l) + L(-v; l, w)) / 2.
Our reading: the mean of both directions, where the papers (BiPO, arXiv 2406.00045) draw one for every
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import Needs, objective, transform
from mmrl.core.step_table import Batch, StepOutput
from mmrl.runtime.modules import record_transform, twin
from mmrl.vision.models.steering import Steered, Steering, load_steering


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


ENCODER = ("W_enc", "b_enc", "W_dec", "b_dec")  # as Gemma Scope and SAELens name them; perhaps a `threshold`


@transform(scope="vision")
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
        load_steering(added, Path(weights))
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
