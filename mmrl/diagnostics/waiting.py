"""Advice to ask for rollouts a step ahead, from the seconds of the first steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.registry import find
from mmrl.config.schema import Config
from mmrl.diagnostics.memory_estimates import sampled_elsewhere

STEPS = 3  # steps before the advice; the first one, in which engines start, is not counted
SHARE = 1 / 3  # of the seconds of learning, which rollouts must take to be worth a lag of a step


def could_ask_ahead(config: Config) -> bool:
    """Return whether others make the rollouts of a run, and could do so while the policy learns."""
    size = config.rollout
    last = find("engine", size.engine[-1].name).target
    one_round = not size.max_staleness and size.max_rounds == 1
    return one_round and hasattr(last, "ask") and sampled_elsewhere(config)


def advise_asking_ahead(records: Sequence[Mapping[str, Any]]) -> str:
    """Say after the first steps how long learner and workers waited for each other; else nothing.

    `records` are those of steps, with `time/rollout`, `time/learn` and `step_time` in seconds.
    """
    if len(records) != STEPS:
        return ""
    rollout, learn, step = (
        sum(record.get(name, 0.0) for record in records[1:])
        for name in ("time/rollout", "time/learn", "step_time")
    )
    if not rollout > SHARE * learn > 0:
        return ""
    return (
        f"of the last {STEPS - 1} steps the learner waited {rollout / step:.0%} for rollouts, and who makes "
        f"them was idle for the other {1 - rollout / step:.0%}; consider `rollout.max_staleness: 1`, which "
        "asks a step ahead"
    )
