"""How important heads, ffn_units and layers are for visual tokens, measured once on a few prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.compression.pruning.attention import View, softmax_rows
from mmrl.compression.pruning.forward import WATCH
from mmrl.compression.pruning.patch_grid import pick
from mmrl.compression.pruning.spec import Pruning, core_of, prune, pruning_of, shape_of

ROWS = 256  # queries whose attention is computed together: the map of all pairs never exists
KINDS = ("heads", "ffn_units", "layers")


@torch.no_grad()
def make_plan(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    *,
    kinds: Sequence[str] = KINDS,
    queries: Literal["all", "last"] = "all",
) -> dict[str, list]:
    """Measure importance on calibration batches, each the inputs of one call (one prompt each, as in the
    papers). Give `position_ids` for videos of Qwen2-VL and Qwen2.5-VL: transformers 5.3 to 5.23 misplaces the
    text after them.

    "heads" (L, H): attention paid to visual columns over attention paid to others, by all queries or the last
    one (arXiv 2410.06169), mean over batches. "ffn_units" (L, m): mean of |inner unit| over visual tokens,
    times the norm of its output weights (our reading). "layers" (L,): KL from the answer's first distribution
    to the one with the layer frozen for visual tokens (ShortV, arXiv 2504.00502).
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"a plan has no '{unknown[0]}'; it has {', '.join(KINDS)}")
    if pruning_of(model) != Pruning():
        raise ValueError(
            "importance is measured on the whole model, before any of its visual computation is pruned"
        )
    plan: dict[str, list] = {}
    if {"heads", "ffn_units"} & set(kinds):
        found = _watch(model, batches, queries)
        plan |= {name: found[name].tolist() for name in ("heads", "ffn_units") if name in kinds}
    if "layers" in kinds:
        plan["layers"] = layer_importance(model, batches).tolist()
    return plan


def write_plan(plan: Mapping[str, list], path: str | Path) -> None:
    """Write a plan for the option `plan` of transforms."""
    Path(path).write_text(json.dumps(plan) + "\n")


def _watch(model: nn.Module, batches: Sequence[Mapping[str, Any]], queries: str) -> dict[str, Tensor]:
    shape, view = shape_of(model), prune(model, "plan", {})
    ratios = torch.zeros(shape.layers, shape.heads, dtype=torch.float64)
    active = torch.zeros(shape.layers, shape.inner, dtype=torch.float64)
    tokens = torch.zeros(shape.layers, 1, dtype=torch.float64)

    def look(what: str, layer: int, seen: Any) -> None:
        if what == "attention":
            ratios[layer] += attention_ratio(seen, queries) / len(batches)
        else:
            hidden, stage = seen
            there = stage.vis >= 0
            active[layer] += hidden[there].double().abs().sum(0).cpu()
            tokens[layer] += int(there.sum())

    token = WATCH.set(look)
    try:
        for inputs in batches:
            core_of(view)(**_readable(inputs))
    finally:
        WATCH.reset(token)
    blocks = core_of(model).get_decoder().layers
    norms = torch.stack([block.mlp.down_proj.weight.double().norm(dim=0).cpu() for block in blocks])
    return {"heads": ratios, "ffn_units": active / tokens.clamp(min=1) * norms}


def _readable(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "logits_to_keep"} | {"use_cache": False}


def attention_ratio(view: View, queries: str) -> Tensor:
    """Compute the attention that every head pays to visual columns over what it pays to the others: (H,)."""
    stage = view.stage
    rows = stage.text[:, -1:] if queries == "last" else torch.cat([stage.text, stage.vis], 1)
    q = view.q[:, :, -1:] if queries == "last" else _all_queries(view)
    k, _ = view._keys(None)
    seen, other = (torch.zeros(q.shape[1], dtype=torch.float64) for _ in range(2))
    for start in range(0, rows.shape[1], ROWS):
        part = rows[:, start : start + ROWS]
        weights = softmax_rows(q[:, :, start : start + ROWS], k, stage.mask(part), view.scale)
        weights = weights.double() * (part >= 0)[:, None, :, None]
        visual = stage.visual[:, None, None]
        seen += (weights * visual).sum((0, 2, 3)).cpu()
        other += (weights * ~visual).sum((0, 2, 3)).cpu()
    return seen / other.clamp(min=1e-12)


def _all_queries(view: View) -> Tensor:
    return view.q if view.rows is None else torch.cat([view.q, view.rows[0]], 2)


@torch.no_grad()
def layer_importance(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Compute KL(full || layer frozen for visual tokens) of the last position, mean over rows, layer by
    layer: (L,)."""
    layers = shape_of(model).layers
    total, rows = torch.zeros(layers, dtype=torch.float64), 0
    for inputs in batches:
        full = _last(model, inputs)
        rows += len(full)
        for layer in range(layers):
            frozen = _last(prune(model, "plan", {}, frozen=frozenset({layer})), inputs)
            total[layer] += (full.exp() * (full - frozen)).sum().cpu()
    return total / max(rows, 1)


def _last(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Log-probabilities behind the last token of every prompt, which may be padded on either side: (B,
    vocabulary)."""
    states = core_of(model)(**_readable(inputs)).last_hidden_state
    mask = inputs.get("attention_mask")
    size = states.shape[1]
    place = torch.full((len(states), 1), size - 1, device=states.device)
    if mask is not None:
        place = (mask.long() * torch.arange(size, device=mask.device)).argmax(1, keepdim=True)
    logits = model.get_output_embeddings()(pick(states, place)[:, 0])
    return logits.double().log_softmax(-1)
