"""Which heads, ffn_units and layers a share stands for: the first ones, or the most important ones of a
plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Chosen = tuple[tuple[int, ...] | None, ...]


def read_plan(path: str, wanted: str) -> list:
    """Read one kind of importance from a plan that `mmrl.compression.importance` wrote: "heads" (L, H),
    "ffn_units" (L, m) or "layers" (L,)."""
    try:
        plan = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read the plan '{path}': {error}") from error
    if wanted not in plan:
        raise ValueError(f"the plan '{path}' has no importance of {wanted}; it has {', '.join(sorted(plan))}")
    return plan[wanted]


def check_share(name: str, share: float) -> None:
    """Refuse a share that is none."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"`{name}` is a share between 0 and 1, not {share}")


def check_chosen(what: str, chosen: Sequence[Sequence[int] | None], layers: int, size: int) -> Chosen:
    """Check units named layer by layer."""
    if len(chosen) != layers:
        raise ValueError(f"{what} are named for {len(chosen)} layers, but the model has {layers}")
    for layer, units in enumerate(chosen):
        wrong = [unit for unit in units or () if not 0 <= unit < size]
        if wrong:
            raise ValueError(f"layer {layer} has {size} {what}, so there is no {wrong[0]}")
    return tuple(None if units is None else tuple(sorted(set(units))) for units in chosen)


def first_units(share: float, layers: int, size: int) -> Chosen:
    """Keep the first units of every layer."""
    kept = tuple(range(round(share * size)))
    return (kept,) * layers


def best_each(scores: Sequence[Sequence[float]], share: float) -> Chosen:
    """Keep the same number of units in every layer, those of highest importance."""
    return tuple(_best(line, round(share * len(line))) for line in scores)


def best_overall(scores: Sequence[Sequence[float]], share: float, whole: int) -> Chosen:
    """Keep the units of highest importance over all layers together; the first `whole` layers keep all of
    theirs.

    The number kept is that of `share` over all layers, as if the first ones were counted like the rest.
    """
    size = len(scores[0])
    ranked = [(score, layer, unit) for layer, line in enumerate(scores) for unit, score in enumerate(line)]
    free = sorted((one for one in ranked if one[1] >= whole), key=lambda one: (-one[0], one[1], one[2]))
    number = max(0, round(share * size * len(scores)) - whole * size)
    kept = {(layer, unit) for _, layer, unit in free[:number]}
    return tuple(
        tuple(range(size)) if layer < whole else tuple(u for u in range(size) if (layer, u) in kept)
        for layer in range(len(scores))
    )


def _best(line: Sequence[float], number: int) -> tuple[int, ...]:
    order = sorted(range(len(line)), key=lambda unit: (-line[unit], unit))
    return tuple(sorted(order[:number]))
