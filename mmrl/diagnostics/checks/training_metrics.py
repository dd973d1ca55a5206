"""Alarms: signs in a journal that a run does not learn what it should.

A record is a step: metrics by name, an evaluation's under `eval_x` with the ends of its interval as
`eval_x/low` and `eval_x/high`. An alarm tells the first step that gave reason to it, so that it says the
same however far the run has come.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.ranges import NonNegativeFloat, PositiveInt
from mmrl.config.registry import alarm

Records = Sequence[Mapping[str, Any]]
DIFFERENCE = "sampling/sampling_logp_difference/mean"  # of engine and policy
Pairs = list[tuple[int, float]]  # step and value


def _watched(records: Records, name: str) -> tuple[Pairs, list[str]]:
    """Read (step, value) of a metric where it is finite, and complain where the journal does not know it."""
    # Evaluations are rare: before the first of them their metrics are not missing, only not measured.
    kin = [record for record in records if any(map(_measured, record))] if _measured(name) else records
    if kin and not any(name in record for record in kin):
        near = difflib.get_close_matches(name, kin[0], 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return [], [f"an alarm watches '{name}', which the journal does not have{hint}"]
    pairs = [(record["step"], record.get(name, math.nan)) for record in records]
    return [(step, value) for step, value in pairs if math.isfinite(value)], []


def _measured(name: str) -> bool:
    return name.startswith("eval_")


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"an alarm averages over a `window` of at least 1 record, not {window}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@alarm
def reward_hacking(
    records: Records, *, rising: str = "reward", of: tuple[str, ...] = (), window: PositiveInt = 5
) -> list[str]:
    """Warn of reward hacking: the trained reward rose since the start, while a held-out metric fell out of
    the interval of its first evaluation.

    `of` names metrics without their `eval_`; without it all that have an interval are watched, higher being
    better. The reward's rise is that of its mean over `window` records, or over half of those that there
    are. The rule is our reading.
    """
    _check_window(window)
    trained, said = _watched(records, rising)
    names = [f"eval_{name}" for name in of] or sorted(
        {key.removesuffix("/low") for record in records for key in record if key.endswith("/low")}
    )
    for name in names:
        found, unknown = _watched(records, name)
        low = next((record[f"{name}/low"] for record in records if f"{name}/low" in record), math.nan)
        said += unknown + _first_fall(name, found, low, rising, trained, window)
    return said


def _first_fall(name: str, found: Pairs, low: float, reward: str, trained: Pairs, window: int) -> list[str]:
    for step, value in found[1:]:
        seen = [reward for at, reward in trained if at <= step]
        size = min(window, len(seen) // 2)
        if not size or value >= low:
            continue
        start, end = _mean(seen[:size]), _mean(seen[-size:])
        if end > start:
            return [
                f"{name} fell to {value:.4g} at step {step + 1}, below the interval it began in "
                f"({found[0][1]:.4g}, from {low:.4g}), while {reward} rose from {start:.4g} to {end:.4g}: "
                "the policy may exploit its reward"
            ]
    return []


@alarm
def metric_drop(
    records: Records, *, of: str = "reward_std", share: NonNegativeFloat = 0.1, window: PositiveInt = 5
) -> list[str]:
    """Warn when a metric, averaged over `window` records, fell below `share` of its average over the first
    ones."""
    _check_window(window)
    found, missing = _watched(records, of)
    start = _mean([value for _, value in found[:window]]) if len(found) >= window else 0.0
    for end in range(2 * window, len(found) + 1):
        here = _mean([value for _, value in found[end - window : end]])
        if here < share * start:
            return [
                f"{of} collapsed to {here:.4g} at step {found[end - 1][0] + 1}; it began at {start:.4g}, and "
                f"the bar is {share:g} of that"
            ]
    return missing


@alarm
def metric_spike(records: Records, *, of: str, above: float, window: PositiveInt = 1) -> list[str]:
    """Warn when a metric, averaged over `window` records, rose above a bar."""
    _check_window(window)
    found, missing = _watched(records, of)
    for end in range(window, len(found) + 1):
        here = _mean([value for _, value in found[end - window : end]])
        if here > above:
            return [f"{of} rose to {here:.4g} at step {found[end - 1][0] + 1}; the bar is {above:g}"]
    return missing


@alarm
def logprob_mismatch(
    records: Records, *, of: str = DIFFERENCE, tolerance: NonNegativeFloat = 1e-3
) -> list[str]:
    """Warn when the first reported step says that engine and policy disagree about log-probabilities of the
    same weights.

    Before the first update the ratio of policy to engine is 1, whatever the method: a difference is a defect
    of precision, guidance, batch or bookkeeping, and the first thing to look at when no reward rises.
    Half-precision engines of tokens differ by about a hundredth; methods that clip at 1e-4 need a tolerance
    below that. An engine that notes no log-probabilities gives nothing to compare, and one that is `cheap` on
    purpose (its record says by what) is expected to differ.
    """
    if records and records[0].get("cheap"):
        return []
    found, missing = _watched(records[:1], of)
    for step, value in found:
        if value > tolerance:
            return [
                f"the ratio is not 1 at step {step + 1}: log-probabilities of engine and policy differ by "
                f"{value:.4g} on average, more than {tolerance:g}"
            ]
    return [] if of == DIFFERENCE else missing
