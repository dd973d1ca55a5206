"""Weights that are pruned for text as well are cut out of the matrices."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from mmrl.compression.importance import best_each, check_share, read_plan
from mmrl.compression.pruning.sliced_linear import features
from mmrl.compression.pruning.spec import core_of, pruning_of, shape_of
from mmrl.compression.pruning.weight_views import note, share
from mmrl.config.ranges import Probability
from mmrl.config.registry import transform


@transform
def structured_pruning(
    model: nn.Module, *, ffn_units: Probability = 1.0, heads: Probability = 1.0, plan: str = ""
) -> nn.Module:
    """Cut inner units and heads out of the language model for all tokens: matrices, cache and folder get
    smaller.

    The share kept is the same in every layer, the first units or those of highest importance in the `plan`,
    so that an ordinary config tells the sizes. Heads go by groups that share keys and values. Needs fine-
    tuning behind it.
    """
    check_share("ffn_units", ffn_units)
    check_share("heads", heads)
    shape, pruning = shape_of(model), pruning_of(model)
    if pruning.heads or pruning.ffn_units:
        raise ValueError(
            "cut weights out before `drop_visual_heads` and `sparse_visual_ffn`, which count what is left"
        )
    inner, groups = round(ffn_units * shape.inner), round(heads * shape.kv_heads)
    if not inner or not groups:
        raise ValueError(
            f"{inner} ffn_units and {groups} groups of heads would be left; keep at least one of each"
        )
    blocks = core_of(model).get_decoder().layers
    kept_inner = _kept(plan, "ffn_units", ffn_units, shape.layers, shape.inner)
    kept_groups = _kept_groups(plan, heads, shape.layers, shape.heads, shape.kv_heads)
    swap: dict[int, nn.Module] = {}
    for block, units, those in zip(blocks, kept_inner, kept_groups, strict=True):
        swap |= _cut_mlp(block.mlp, units) | _cut_attention(block.self_attn, those, shape)
    view = share(model, swap)
    _resize(view, inner, groups, shape, heads < 1.0)
    options = {"ffn_units": ffn_units, "heads": heads}
    return note(view, model, "structured_pruning", options)


def _kept(plan: str, name: str, share_: float, layers: int, size: int) -> tuple[tuple[int, ...], ...]:
    if plan and share_ < 1.0:
        return best_each(read_plan(plan, name), share_)
    return (tuple(range(round(share_ * size))),) * layers


def _kept_groups(
    plan: str, share_: float, layers: int, heads: int, groups: int
) -> tuple[tuple[int, ...], ...]:
    if not plan or share_ == 1.0:
        return (tuple(range(round(share_ * groups))),) * layers
    each = torch.tensor(read_plan(plan, "heads")).view(layers, groups, heads // groups)
    return best_each(each.mean(-1).tolist(), share_)


def _cut_mlp(mlp: nn.Module, units: tuple[int, ...]) -> dict[int, nn.Module]:
    picked = features(units)
    return {
        id(mlp.gate_proj): _cut(mlp.gate_proj, picked, 0),
        id(mlp.up_proj): _cut(mlp.up_proj, picked, 0),
        id(mlp.down_proj): _cut(mlp.down_proj, picked, 1),
    }


def _cut_attention(attn: nn.Module, groups: tuple[int, ...], shape) -> dict[int, nn.Module]:
    keys = features(groups, shape.head_dim)
    queries = features(groups, shape.head_dim * (shape.heads // shape.kv_heads))
    return {
        id(attn.q_proj): _cut(attn.q_proj, queries, 0),
        id(attn.k_proj): _cut(attn.k_proj, keys, 0),
        id(attn.v_proj): _cut(attn.v_proj, keys, 0),
        id(attn.o_proj): _cut(attn.o_proj, queries, 1),
    }


def _cut(linear: nn.Module, kept: slice | Tensor, axis: int) -> nn.Linear:
    if type(linear) is not nn.Linear:
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        raise ValueError(f"weights are cut out of plain linear layers, not of {kind}; cut first")
    weight = (linear.weight[kept] if axis == 0 else linear.weight[:, kept]).detach().clone()
    out = nn.Linear(*reversed(weight.shape), linear.bias is not None, device="meta").train(linear.training)
    out.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
    if linear.bias is not None:
        bias = (linear.bias[kept] if axis == 0 else linear.bias).detach().clone()
        out.bias = nn.Parameter(bias, requires_grad=linear.bias.requires_grad)
    return out


def _resize(view: nn.Module, inner: int, groups: int, shape, heads: bool) -> None:
    """Give a view a config of its own that tells the sizes."""
    config = copy.deepcopy(view.config)
    text = config.get_text_config()
    text.intermediate_size = inner
    if heads:
        if "head_dim" not in text.to_dict():
            raise ValueError(
                f"a model of type '{text.model_type}' takes the size of a head from their number, so heads "
                "cannot be cut out of it; set `heads: 1.0`"
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
