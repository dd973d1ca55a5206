"""The transform that puts a steering vector behind a layer of a language model."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import transform
from mmrl.runtime.modules import record_transform, twin
from mmrl.vision.models.steering import Steered, Steering, load_steering

ENCODER = ("W_enc", "b_enc", "W_dec", "b_dec")  # as Gemma Scope and SAELens name them; perhaps a `threshold`


@transform
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
