"""Importance of heads, FFN units and layers for visual tokens: measurement, plan files, selection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.compression.pruning.attention import LayerAttention, softmax_rows
from mmrl.compression.pruning.forward import OBSERVER
from mmrl.compression.pruning.patch_grid import pick
from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import PruningSpec, Units, pruning_of, shape_of
from mmrl.runtime.output_head import OutputHead

ROWS = 256  # queries per chunk, so that the full attention matrix is never in memory
KINDS = ("heads", "ffn_units", "layers")


def make_plan(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    *,
    kinds: Sequence[str] = KINDS,
    queries: Literal["all", "last"] = "all",
) -> dict[str, list]:
    """Measure importance on calibration batches; a batch is the inputs of one call (paper: one prompt).

    Returns lists for L layers. "heads" (L, H): ratio of attention to visual tokens over attention to other
    tokens, summed over all queries or only the last one (arXiv 2410.06169), averaged over batches.
    "ffn_units" (L, m): mean of |inner unit| over visual tokens, times the norm of its output weights (our
    reading). "layers" (L,): KL between the first answer token's distributions of the full model and of a
    model whose layer skips visual tokens (ShortV, arXiv 2504.00502). Pass `position_ids` for videos of
    Qwen2-VL and Qwen2.5-VL: transformers 5.3 to 5.23 computes wrong positions for text after a video.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"a plan has no '{unknown[0]}'; it has {', '.join(KINDS)}")
    if pruning_of(model) != PruningSpec():
        raise ValueError(
            "importance is measured on the whole model, before any of its visual computation is pruned"
        )
    plan: dict[str, Tensor] = {}
    if {"heads", "ffn_units"} & set(kinds):
        plan = unit_importance(model, batches, queries)
    if "layers" in kinds:
        plan["layers"] = layer_importance(model, batches)
    return {kind: plan[kind].tolist() for kind in KINDS if kind in kinds}


@torch.no_grad()
def unit_importance(
    model: nn.Module, batches: Sequence[Mapping[str, Any]], queries: str
) -> dict[str, Tensor]:
    """Measure the importance of "heads" (L, H) and "ffn_units" (L, m) for L layers, as in `make_plan`."""
    shape, view = shape_of(model), prune(model, "plan", {})
    ratios = torch.zeros(shape.layers, shape.heads, dtype=torch.float64)
    active = torch.zeros(shape.layers, shape.inner, dtype=torch.float64)
    tokens = torch.zeros(shape.layers, 1, dtype=torch.float64)

    def record(what: str, layer: int, value: Any) -> None:
        if what == "attention":
            ratios[layer] += attention_ratio(value, queries) / len(batches)
        else:
            hidden, stage = value
            active[layer] += hidden[stage.is_token].double().abs().sum(0).cpu()
            tokens[layer] += int(stage.is_token.sum())

    token = OBSERVER.set(record)
    try:
        for inputs in batches:
            _prefill(view, inputs)
    finally:
        OBSERVER.reset(token)
    blocks = model.base_model.get_decoder().layers
    # Contribution of unit j to the hidden state: E|h_j| times the norm of column j of the output weights.
    norms = torch.stack([block.mlp.down_proj.weight.double().norm(dim=0).cpu() for block in blocks])
    return {"heads": ratios, "ffn_units": active / tokens.clamp(min=1) * norms}


def _prefill(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Compute the last hidden states (B, S, width) of a model call without a cache."""
    inputs = {name: value for name, value in inputs.items() if name != "logits_to_keep"}
    return model.base_model(**{**inputs, "use_cache": False}).last_hidden_state


def attention_ratio(attention: LayerAttention, queries: str) -> Tensor:
    """Compute the ratio of attention to visual tokens over attention to all other tokens, per head: (H,)."""
    stage, q = attention.stage, attention.q
    rows = torch.cat([stage.text, stage.vis], 1)
    if queries == "last":
        rows, q = stage.text[:, -1:], q[:, :, -1:]
    elif attention.rows is not None:
        q = torch.cat([q, attention.rows[0]], 2)
    k, _ = attention.keys(None)
    visual = stage.visual[:, None, None]  # (B, 1, 1, C): whether each of C keys is visual
    seen, other = (torch.zeros(q.shape[1], dtype=torch.float64) for _ in range(2))  # (H,)
    for part, part_q in zip(rows.split(ROWS, 1), q.split(ROWS, 2), strict=True):
        weights = softmax_rows(part_q, k, stage.mask(part), attention.scale).double()
        weights = weights * (part >= 0)[:, None, :, None]  # padding rows are not counted
        seen += (weights * visual).sum((0, 2, 3)).cpu()
        other += (weights * ~visual).sum((0, 2, 3)).cpu()
    return seen / other.clamp(min=1e-12)


@torch.no_grad()
def layer_importance(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Compute KL(full || layer skips visual tokens) at the last position, averaged over prompts: (L,)."""
    layers = shape_of(model).layers
    total, rows = torch.zeros(layers, dtype=torch.float64), 0
    for inputs in batches:
        full = _last_logp(model, inputs)
        rows += len(full)
        for layer in range(layers):
            frozen = _last_logp(prune(model, "plan", {}, frozen=frozenset({layer})), inputs)
            # KL(p || q) = sum p (log p - log q), in float64
            total[layer] += (full.exp() * (full - frozen)).sum().cpu()
    return total / max(rows, 1)


def _last_logp(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Compute log-probabilities (B, V) after the last token of prompts that are padded on either side."""
    states, mask = _prefill(model, inputs), inputs.get("attention_mask")
    mask = torch.ones(states.shape[:2], device=states.device) if mask is None else mask
    # Position of the last 1 in the mask, which is not the last position if padding is on the right.
    place = (mask.long() * torch.arange(states.shape[1], device=mask.device)).argmax(1, keepdim=True)
    logits = OutputHead(model)(pick(states, place)[:, 0])
    return logits.double().log_softmax(-1)


def write_plan(plan: Mapping[str, list], path: str | Path) -> None:
    """Write an importance plan to a JSON file for the option `plan` of transforms."""
    Path(path).write_text(json.dumps(plan) + "\n")


def read_plan(path: str, wanted: str) -> list:
    """Read one kind of importance, "heads" (L, H), "ffn_units" (L, m) or "layers" (L,), from a plan file."""
    try:
        plan = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read the plan '{path}': {error}") from error
    if wanted not in plan:
        raise ValueError(f"the plan '{path}' has no importance of {wanted}; it has {', '.join(sorted(plan))}")
    return plan[wanted]


def check_chosen(what: str, chosen: Sequence[Sequence[int] | None], layers: int, size: int) -> Units:
    """Check, sort and deduplicate the chosen units (heads or FFN units) of every layer; None: all units."""
    if len(chosen) != layers:
        raise ValueError(f"{what} are named for {len(chosen)} layers, but the model has {layers}")
    for layer, units in enumerate(chosen):
        wrong = [unit for unit in units or () if not 0 <= unit < size]
        if wrong:
            raise ValueError(f"layer {layer} has {size} {what}, so there is no {wrong[0]}")
    return tuple(None if units is None else tuple(sorted(set(units))) for units in chosen)


def first_units(share: float, layers: int, size: int) -> Units:
    """Choose the first units of every layer; `share` is their fraction of the layer's `size` units."""
    return (tuple(range(round(share * size))),) * layers


def best_each(scores: Sequence[Sequence[float]], share: float) -> Units:
    """Choose the fraction `share` of units with the highest scores in every layer; ties: the first unit."""
    best = lambda line: sorted(range(len(line)), key=lambda unit: -line[unit])
    return tuple(tuple(sorted(best(line)[: round(share * len(line))])) for line in scores)


def best_overall(scores: Sequence[Sequence[float]], share: float, whole: int) -> Units:
    """Choose the most important units over all layers; the first `whole` layers keep all their units.

    `share` is the fraction of the units of all layers, including the first `whole` layers.
    """
    size = len(scores[0])
    # Units of the first `whole` layers count towards the budget. The sort is stable, so that of units with
    # equal scores the first is chosen.
    free = [(layer, unit) for layer in range(whole, len(scores)) for unit in range(size)]
    free.sort(key=lambda place: -scores[place[0]][place[1]])
    kept = set(free[: max(0, round(share * size * len(scores)) - whole * size)])
    return tuple(
        tuple(u for u in range(size) if layer < whole or (layer, u) in kept) for layer in range(len(scores))
    )
