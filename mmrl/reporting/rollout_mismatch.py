"""Mismatch between the rollout engine and the trained policy, and the time that the engine saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Rows of the report's mismatch table: metric, title and number format.
ROWS = (
    ("sampling/kl", "KL of engine to policy, nats a step", ".4f"),
    ("sampling/sampling_logp_difference/mean", "difference of log-probabilities", ".4f"),
    ("sampling/ess/steps", "effective share of steps", ".1%"),
    ("sampling/ess/rows", "effective share of answers", ".1%"),
    ("rollout/agreement", "answers the exact engine gives as well", ".1%"),
    ("rollout/seconds", "seconds of a collection", ".3f"),
    ("rollout/exact_seconds", "seconds on the exact engine", ".3f"),
    ("rollout/speedup", "times faster", ".2f"),
)


def conclude(means: Mapping[str, float]) -> dict[str, float]:
    """Replace the moments of importance weights in metrics by effective sample sizes, as fractions (0, 1].

    `means` has `moments/{steps,rows}/{0,1,2}`: means of the weights to the power 0, 1 or 2. The effective
    fraction of `n` weights `w` is (sum w)^2 / (n sum w^2) (Kish).
    """
    metrics = {name: value for name, value in means.items() if not name.startswith("moments/")}
    for unit in ("steps", "rows"):
        count, first, second = (means.get(f"moments/{unit}/{power}", 0.0) for power in (0, 1, 2))
        if second > 0:
            metrics[f"sampling/ess/{unit}"] = first**2 / (count * second)
            if unit == "steps":
                metrics["sampling/importance_sampling_ratio/mean"] = first / count
    return metrics


def describe_mismatch(record: Mapping[str, Any], cheap: str) -> str:
    """Describe in a sentence how much the pieces `cheap` distort rollouts; "" without such metrics."""
    if not cheap or "sampling/kl" not in record:
        return ""
    share = record.get("sampling/ess/rows", math.nan)
    return (
        f"rollouts on {cheap}: log-probabilities differ by "
        f"{record['sampling/sampling_logp_difference/mean']:.3g} on average, KL {record['sampling/kl']:.3g} "
        f"nats a step, answers are worth {share:.0%} of as many exact ones"
    )


def mismatch_rows(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return table rows on mismatch and saved time: title; first, mean and last value.

    Empty if the engine matches the policy and no exact engine was timed for comparison.
    """
    finite = {name: [r[name] for r in records if math.isfinite(r.get(name, math.nan))] for name, _, _ in ROWS}
    kl = finite["sampling/kl"]
    # A mean KL below 1e-4 nats per step counts as rounding error.
    if not finite["rollout/exact_seconds"] and (not kl or sum(kl) / len(kl) < 1e-4):
        return []
    return [
        [title, *(format(value, form) for value in (values[0], sum(values) / len(values), values[-1]))]
        for name, title, form in ROWS
        if (values := finite[name])
    ]
