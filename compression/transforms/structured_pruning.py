"""Structured pruning: remove feed-forward units and attention heads from the weight matrices."""

from __future__ import annotations

import copy

import torch
from torch import nn

from mmrl.compression.importance import best_each, first_units, read_plan
from mmrl.compression.pruning.prune import share_weights
from mmrl.compression.pruning.sliced_linear import FeatureIndex, feature_index
from mmrl.compression.pruning.spec import pruning_of, shape_of
from mmrl.config.ranges import Probability
from mmrl.config.registry import transform
from mmrl.runtime.modules import record_transform


@transform
def structured_pruning(
    model: nn.Module, *, ffn_units: Probability = 1.0, heads: Probability = 1.0, plan: str = ""
) -> nn.Module:
    """Remove feed-forward units and heads of the language model, so that the weight matrices shrink.

    This affects all tokens. The cache and checkpoints shrink, too. Every layer keeps the same fraction, so
    that an ordinary transformers config can describe the sizes. Heads are removed in groups with shared keys
    and values. The model needs fine-tuning afterwards.

    Args:
        ffn_units: Fraction of the inner units to keep in every feed-forward layer, in (0, 1].
        heads: Fraction of the groups of heads to keep in every layer, in (0, 1].
        plan: Path of an importance plan that ranks units and groups. Without a plan the first ones are kept.

    Raises:
        ValueError: If no unit or group would be left, or if an earlier transform uses their indices.
    """
    shape, pruning = shape_of(model), pruning_of(model)
    if pruning.heads or pruning.ffn_units:
        raise ValueError(
            "apply `structured_pruning` before `drop_visual_heads` and `sparse_visual_ffn`, which "
            "count the heads and units that are left"
        )
    group = shape.heads // shape.kv_heads
    kept_units = first_units(ffn_units, shape.layers, shape.inner)
    kept_groups = first_units(heads, shape.layers, shape.kv_heads)
    units, groups = len(kept_units[0]), len(kept_groups[0])
    if not units or not groups:
        raise ValueError(
            f"{units} inner units and {groups} groups of heads would be left; keep at least one of each"
        )
    if plan and ffn_units < 1.0:
        kept_units = best_each(read_plan(plan, "ffn_units"), ffn_units)
    if plan and heads < 1.0:
        # The query heads of a group share a key and value head; its importance is their mean importance.
        scores = torch.tensor(read_plan(plan, "heads")).view(shape.layers, shape.kv_heads, group)
        kept_groups = best_each(scores.mean(-1).tolist(), heads)
    swap: dict[int, nn.Module] = {}
    for block, inner, kept in zip(
        model.base_model.get_decoder().layers, kept_units, kept_groups, strict=True
    ):
        inner, keys = feature_index(inner), feature_index(kept, shape.head_dim)
        queries = feature_index(kept, shape.head_dim * group)  # the query heads of a group are contiguous
        mlp, attn = block.mlp, block.self_attn
        for linear, index in ((mlp.gate_proj, inner), (mlp.up_proj, inner), (attn.q_proj, queries),
                              (attn.k_proj, keys), (attn.v_proj, keys)):  # fmt: skip
            swap[id(linear)] = _slice(linear, rows=index)
        for linear, index in ((mlp.down_proj, inner), (attn.o_proj, queries)):
            swap[id(linear)] = _slice(linear, columns=index)
    view = share_weights(model, swap)
    sizes = {"intermediate_size": units}
    if heads < 1.0:
        sizes |= {"head_dim": shape.head_dim, "num_key_value_heads": groups}
        sizes |= {"num_attention_heads": groups * group}
    _resize(view, sizes)
    options = {"ffn_units": ffn_units, "heads": heads}
    return record_transform(view, model, "structured_pruning", options)


def _slice(linear: nn.Module, *, rows: FeatureIndex = None, columns: FeatureIndex = None) -> nn.Linear:
    """Copy a linear layer with some of its outputs (`rows` of the weight) or inputs (`columns`)."""
    if type(linear) is not nn.Linear:
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        raise ValueError(f"`structured_pruning` needs plain linear layers, not {kind}; apply it first")
    rows, columns = (slice(None) if index is None else index for index in (rows, columns))
    weight = linear.weight[rows][:, columns].detach().clone()  # (out_features, in_features)
    out = nn.Linear(*reversed(weight.shape), linear.bias is not None, device="meta").train(linear.training)
    out.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
    if linear.bias is not None:
        out.bias = nn.Parameter(linear.bias[rows].detach().clone(), requires_grad=linear.bias.requires_grad)
    return out


def _resize(view: nn.Module, sizes: dict[str, int]) -> None:
    """Give the pruned view a copy of the configuration with the new sizes."""
    config = copy.deepcopy(view.config)
    text = config.get_text_config()
    if "head_dim" in sizes and "head_dim" not in text.to_dict():
        raise ValueError(
            f"a model of type '{text.model_type}' derives the head size from the number of heads, so "
            "heads cannot be removed from it; set `heads: 1.0`"
        )
    for name, size in sizes.items():
        setattr(text, name, size)
    view.config = view.base_model.config = config
    for module in view.base_model.get_decoder().modules():
        if "config" in vars(module):
            module.config = text
