"""Advice to prefetch rollouts, based on the timing of the first steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.registry import find
from mmrl.config.schema import Config
from mmrl.diagnostics.memory_estimates import sampled_elsewhere

STEPS = 3  # steps before the advice; the first is not timed, because engines start in it
SHARE = 1 / 3  # minimum ratio of rollout time to learning time for the advice


def could_ask_ahead(config: Config) -> bool:
    """Whether other processes sample the rollouts and could sample while the policy learns."""
    size = config.rollout
    last = find("engine", size.engine[-1].name).target
    one_round = not size.max_staleness and size.max_rounds == 1
    return one_round and hasattr(last, "ask") and sampled_elsewhere(config)


def advise_asking_ahead(records: Sequence[Mapping[str, Any]]) -> str:
    """Return advice to prefetch, with the waiting times of learner and workers; "" if it would not help.

    `records` have `time/rollout`, `time/learn` and `step_time` in seconds.
    """
    if len(records) != STEPS:
        return ""
    rollout, learn, step = (
        sum(record.get(name, 0.0) for record in records[1:])
        for name in ("time/rollout", "time/learn", "step_time")
    )
    if not rollout > SHARE * learn > 0:
        return ""
    waited = rollout / step
    return (
        f"of the last {STEPS - 1} steps the learner waited {waited:.0%} for rollouts, and the "
        f"workers were idle for the other {1 - waited:.0%}; consider `rollout.max_staleness: 1`, a prefetch"
    )
