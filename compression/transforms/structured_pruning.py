"""Structured pruning: inner units and heads are removed from the weight matrices for all tokens."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from mmrl.compression.importance import best_each, check_share, read_plan
from mmrl.compression.pruning.sliced_linear import feature_index, record_transform, share_weights
from mmrl.compression.pruning.spec import core_of, pruning_of, shape_of
from mmrl.config.ranges import Probability
from mmrl.config.registry import transform


@transform
def structured_pruning(
    model: nn.Module, *, ffn_units: Probability = 1.0, heads: Probability = 1.0, plan: str = ""
) -> nn.Module:
    """Remove inner units and heads of the language model for all tokens, so that matrices shrink.

    The cache and the saved checkpoint shrink too. The share kept is the same in every layer, so that an
    ordinary transformers config describes the sizes. Heads are removed by groups that share keys and values.
    The model needs fine-tuning afterwards.

    Args:
        ffn_units: Share of the inner units of every feed-forward layer kept, in (0, 1].
        heads: Share of the groups of heads of every layer kept, in (0, 1].
        plan: Path of an importance plan, of which the most important units and groups stay (default: the
            first ones).

    Raises:
        ValueError: If nothing would be left, or after transforms that count heads or units.
    """
    check_share("ffn_units", ffn_units)
    check_share("heads", heads)
    shape, pruning = shape_of(model), pruning_of(model)
    if pruning.heads or pruning.ffn_units:
        raise ValueError(
            "apply `structured_pruning` before `drop_visual_heads` and `sparse_visual_ffn`, which "
            "count the heads and units that are left"
        )
    # Every layer keeps the same number, because a transformers config has one size for all layers.
    inner, groups = round(ffn_units * shape.inner), round(heads * shape.kv_heads)
    if not inner or not groups:
        raise ValueError(
            f"{inner} inner units and {groups} groups of heads would be left; keep at least one of each"
        )
    blocks = core_of(model).get_decoder().layers
    kept_inner = _kept_units(plan, "ffn_units", ffn_units, shape.layers, shape.inner)
    kept_groups = _kept_head_groups(plan, heads, shape.layers, shape.heads, shape.kv_heads)
    swap: dict[int, nn.Module] = {}
    for block, units, kept in zip(blocks, kept_inner, kept_groups, strict=True):
        swap |= _slice_mlp(block.mlp, units) | _slice_attention(block.self_attn, kept, shape)
    view = share_weights(model, swap)
    _resize(view, inner, groups, shape, heads < 1.0)
    options = {"ffn_units": ffn_units, "heads": heads}
    return record_transform(view, model, "structured_pruning", options)


def _kept_units(plan: str, name: str, ratio: float, layers: int, size: int) -> tuple[tuple[int, ...], ...]:
    if plan and ratio < 1.0:
        return best_each(read_plan(plan, name), ratio)
    return (tuple(range(round(ratio * size))),) * layers


def _kept_head_groups(
    plan: str, ratio: float, layers: int, heads: int, groups: int
) -> tuple[tuple[int, ...], ...]:
    if not plan or ratio == 1.0:
        return (tuple(range(round(ratio * groups))),) * layers
    # A group of query heads shares one key and value head; its importance is the mean of its heads.
    each = torch.tensor(read_plan(plan, "heads")).view(layers, groups, heads // groups)
    return best_each(each.mean(-1).tolist(), ratio)


def _slice_mlp(mlp: nn.Module, units: tuple[int, ...]) -> dict[int, nn.Module]:
    picked = feature_index(units)
    return {
        id(mlp.gate_proj): _slice(mlp.gate_proj, picked, 0),
        id(mlp.up_proj): _slice(mlp.up_proj, picked, 0),
        id(mlp.down_proj): _slice(mlp.down_proj, picked, 1),
    }


def _slice_attention(attn: nn.Module, groups: tuple[int, ...], shape) -> dict[int, nn.Module]:
    keys = feature_index(groups, shape.head_dim)
    queries = feature_index(groups, shape.head_dim * (shape.heads // shape.kv_heads))
    return {
        id(attn.q_proj): _slice(attn.q_proj, queries, 0),
        id(attn.k_proj): _slice(attn.k_proj, keys, 0),
        id(attn.v_proj): _slice(attn.v_proj, keys, 0),
        id(attn.o_proj): _slice(attn.o_proj, queries, 1),
    }


def _slice(linear: nn.Module, kept: slice | Tensor, axis: int) -> nn.Linear:
    if type(linear) is not nn.Linear:
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        raise ValueError(f"`structured_pruning` needs plain linear layers, not {kind}; apply it first")
    weight = (linear.weight[kept] if axis == 0 else linear.weight[:, kept]).detach().clone()
    out = nn.Linear(*reversed(weight.shape), linear.bias is not None, device="meta").train(linear.training)
    out.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
    if linear.bias is not None:
        bias = (linear.bias[kept] if axis == 0 else linear.bias).detach().clone()
        out.bias = nn.Parameter(bias, requires_grad=linear.bias.requires_grad)
    return out


def _resize(view: nn.Module, inner: int, groups: int, shape, heads: bool) -> None:
    """Set the new sizes in a config of the view's own; the config of the original stays."""
    config = copy.deepcopy(view.config)
    text = config.get_text_config()
    text.intermediate_size = inner
    if heads:
        if "head_dim" not in text.to_dict():
            raise ValueError(
                f"a model of type '{text.model_type}' derives the head size from the number of heads, so "
                "heads cannot be removed from it; set `heads: 1.0`"
            )
        text.head_dim = shape.head_dim
        text.num_key_value_heads = groups
        text.num_attention_heads = groups * (shape.heads // shape.kv_heads)
    core = core_of(view)
    view.config = config
    core.config = config
    for module in core.get_decoder().modules():
        if "config" in vars(module):
            module.config = text
