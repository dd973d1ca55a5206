"""What is left out of a model's visual computation, as plain data, and the view of the model that leaves it
out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

PRUNING = "mmrl_pruning"


@dataclass(frozen=True)
class Cut:
    """Visual tokens that leave in front of a layer: `choose(scene) -> Choice` says which stay; None: none
    do."""

    layer: int
    choose: Callable | None = None
    probe: bool = False  # the choice reads the attention of the layer before


@dataclass(frozen=True)
class Pruning:
    """All that is left out. `L` layers, `H` heads.

    `radius` and `causal` bound what a visual token sees of its raster; `heads` names the query heads of every
    layer that visual tokens keep, `ffn_units` the inner units of every layer; visual tokens pass the `frozen`
    layers unchanged; `cuts` are in the order of their layers.
    """

    radius: int | None = None
    causal: bool = True
    heads: tuple[tuple[int, ...] | None, ...] = ()
    ffn_units: tuple[tuple[int, ...] | None, ...] = ()
    frozen: frozenset[int] = frozenset()
    cuts: tuple[Cut, ...] = ()
    tower: bool = False  # a cut reads what the vision tower attends to

    def heads_of(self, layer: int) -> tuple[int, ...] | None:
        """Name the query heads that visual tokens keep in a layer; None: all."""
        return self.heads[layer] if self.heads else None

    def ffn_units_of(self, layer: int) -> tuple[int, ...] | None:
        """Name the inner units that visual tokens keep in a layer; None: all."""
        return self.ffn_units[layer] if self.ffn_units else None


@dataclass(frozen=True)
class Shape:
    """The sizes of a language model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    inner: int
    extra: Mapping[str, int] = field(default_factory=dict)


def shape_of(model: nn.Module) -> Shape:
    """Read the sizes of a model's language model from its config."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        size,
        config.hidden_size,
        config.intermediate_size,
    )


def core_of(model: nn.Module) -> nn.Module:
    """Find the model without its head."""
    return model.base_model


def pruning_of(model: nn.Module) -> Pruning:
    """Say what a model leaves out; nothing by default."""
    return vars(core_of(model)).get(PRUNING, Pruning())


def add_cuts(model: nn.Module, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Put cuts between those that a model has, in the order of their layers."""
    layers = shape_of(model).layers
    for cut in cuts:
        if not 0 <= cut.layer <= layers:
            raise ValueError(
                f"tokens cannot leave in front of layer {cut.layer} of a model with {layers} layers"
            )
    both = (*pruning_of(model).cuts, *cuts)
    # A cut that keeps nothing goes last among those of its layer: the others choose among what is there.
    return tuple(sorted(both, key=lambda cut: (cut.layer, cut.choose is None)))
