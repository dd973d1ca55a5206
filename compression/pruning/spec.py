"""The specification of pruned visual computation as plain data, and how it is read from a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

PRUNING = "mmrl_pruning"


@dataclass(frozen=True)
class TokenReduction:
    """Removal of visual tokens before a layer.

    `choose(SelectionContext) -> Selection` decides which tokens stay; None removes all.
    """

    layer: int
    choose: Callable | None = None
    probe: bool = False  # the choice reads the attention of the layer before


@dataclass(frozen=True)
class PruningSpec:
    """Pruned parts of the visual computation; the defaults prune nothing.

    `radius` and `causal` define the attention window on the patch grid of an image; `heads` and `ffn_units`
    list the query heads and inner units that visual tokens keep in every layer (None: all); `frozen` layers
    leave visual tokens unchanged; `reductions` are sorted by layer.
    """

    radius: int | None = None
    causal: bool = True
    heads: tuple[tuple[int, ...] | None, ...] = ()
    ffn_units: tuple[tuple[int, ...] | None, ...] = ()
    frozen: frozenset[int] = frozenset()
    reductions: tuple[TokenReduction, ...] = ()
    tower: bool = False  # a reduction reads queries and keys of the vision tower

    def heads_of(self, layer: int) -> tuple[int, ...] | None:
        """Return the query heads that visual tokens keep in a layer; None: all."""
        return self.heads[layer] if self.heads else None

    def ffn_units_of(self, layer: int) -> tuple[int, ...] | None:
        """Return the inner units that visual tokens keep in a layer; None: all."""
        return self.ffn_units[layer] if self.ffn_units else None


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a language model: layers, heads, hidden width, inner width of the feed-forward layers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    inner: int
    extra: Mapping[str, int] = field(default_factory=dict)


def shape_of(model: nn.Module) -> ModelShape:
    """Read the sizes of a model's language model from its config."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        size,
        config.hidden_size,
        config.intermediate_size,
    )


def core_of(model: nn.Module) -> nn.Module:
    """Return the model without its language-modelling head."""
    return model.base_model


def pruning_of(model: nn.Module) -> PruningSpec:
    """Return the pruning of a model; by default nothing is pruned."""
    return vars(core_of(model)).get(PRUNING, PruningSpec())


def add_reductions(model: nn.Module, reductions: Sequence[TokenReduction]) -> tuple[TokenReduction, ...]:
    """Add reductions to those of a model, sorted by layer."""
    layers = shape_of(model).layers
    for reduction in reductions:
        if not 0 <= reduction.layer <= layers:
            raise ValueError(
                f"tokens cannot leave in front of layer {reduction.layer} of a model with {layers} layers"
            )
    both = (*pruning_of(model).reductions, *reductions)
    # A reduction that removes all tokens goes last in its layer: the others choose among the tokens left.
    return tuple(sorted(both, key=lambda reduction: (reduction.layer, reduction.choose is None)))
