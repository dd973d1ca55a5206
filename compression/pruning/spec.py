"""Specification of pruned visual computation as plain data, and functions that read it from a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from mmrl.kv_cache.hf_cache import head_size

PRUNING = "mmrl_pruning"
Units = tuple[tuple[int, ...] | None, ...]  # chosen heads or inner units of each layer; None: all


@dataclass(frozen=True)
class TokenReduction:
    """Removal of visual tokens before layer `layer`.

    `choose(stage, vis, scores)` gets a `TokenStage`, and hidden states (B, n_v, width) and scores (B, n_v) of
    its visual tokens. It returns a mask (B, n_v) of the tokens to keep, and new states. Without `choose`, all
    visual tokens are removed. The scores are the attention of the last text token to the visual tokens,
    averaged over heads. The field `scores` selects its layer: the one before ("previous"), `layer` itself
    ("layer"), or none ("").
    """

    layer: int
    choose: Callable | None = None
    scores: Literal["", "previous", "layer"] = ""


@dataclass(frozen=True)
class PruningSpec:
    """Specification of the pruned visual computation; the defaults prune nothing.

    `radius` and `causal` define the attention window on the patch grid of an image. `heads` and `ffn_units`
    list the query heads and inner units kept for visual tokens in every layer (None: all). `frozen` layers
    leave visual tokens unchanged. `reductions` are sorted by layer.
    """

    radius: int | None = None
    causal: bool = True
    heads: Units = ()
    ffn_units: Units = ()
    frozen: frozenset[int] = frozenset()
    reductions: tuple[TokenReduction, ...] = ()
    tower: bool = False  # whether a reduction reads the vision tower's queries and keys

    def heads_of(self, layer: int) -> tuple[int, ...] | None:
        """Return the query heads that a layer keeps for visual tokens; None: all heads."""
        return self.heads[layer] if self.heads else None

    def ffn_units_of(self, layer: int) -> tuple[int, ...] | None:
        """Return the inner units that a layer keeps for visual tokens; None: all units."""
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


def shape_of(model: nn.Module) -> ModelShape:
    """Return the sizes of a model's language model, read from its configuration."""
    config = model.config.get_text_config()
    return ModelShape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_size(config),
        width=config.hidden_size,
        inner=config.intermediate_size,
    )


def pruning_of(model: nn.Module) -> PruningSpec:
    """Return the pruning specification of a model; the default specification prunes nothing."""
    return vars(model.base_model).get(PRUNING, PruningSpec())
