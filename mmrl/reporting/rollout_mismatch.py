"""How far the engine that makes rollouts is from the policy that learns from them, and what it saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# What the table of the report has: a metric, how it is called there, and how it is written.
ROWS = (
    ("sampling/kl", "KL of engine to policy, nats a step", "{:.4f}"),
    ("sampling/sampling_logp_difference/mean", "difference of log-probabilities", "{:.4f}"),
    ("sampling/ess/steps", "effective share of steps", "{:.1%}"),
    ("sampling/ess/rows", "effective share of answers", "{:.1%}"),
    ("rollout/agreement", "answers the exact engine gives as well", "{:.1%}"),
    ("rollout/seconds", "seconds of a collection", "{:.3f}"),
    ("rollout/exact_seconds", "seconds on the exact engine", "{:.3f}"),
    ("rollout/speedup", "times faster", "{:.2f}"),
)


def conclude(means: Mapping[str, float]) -> dict[str, float]:
    """Turn sums of importance weights to the powers 0, 1 and 2, over one number, into effective shares.

    Weights `w` of `n` answers are worth as much as `n s` equal ones, `s = (sum w)^2 / (n sum w^2)` in (0, 1].
    """
    found = {name: value for name, value in means.items() if not name.startswith("moments/")}
    for unit in ("steps", "rows"):
        count, first, second = (means.get(f"moments/{unit}/{power}", 0.0) for power in (0, 1, 2))
        if second > 0:
            found[f"sampling/ess/{unit}"] = first**2 / (count * second)
            if unit == "steps":
                found["sampling/importance_sampling_ratio/mean"] = first / count
    return found


def spell_gap(record: Mapping[str, Any], cheap: str) -> str:
    """Say in a line what a cheaper engine costs, where the step reports it."""
    if not cheap or "sampling/kl" not in record:
        return ""
    share = record.get("sampling/ess/rows", math.nan)
    return (
        f"rollouts on {cheap}: log-probabilities differ by "
        f"{record['sampling/sampling_logp_difference/mean']:.3g} on average, KL {record['sampling/kl']:.3g} "
        f"nats a step, answers are worth {share:.0%} of as many exact ones"
    )


def gap_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the gap and the seconds saved: first, mean and last; nothing where no engine is compared and
    none differs."""
    columns = {name: _finite(records, name) for name, _, _ in ROWS}
    kl = columns["sampling/kl"]
    if not columns["rollout/exact_seconds"] and (not kl or sum(kl) / len(kl) < 1e-4):
        return ""
    lines = [
        f"<tr><th>{words}</th>"
        + "".join(f"<td>{form.format(value)}</td>" for value in (v[0], sum(v) / len(v), v[-1]))
        + "</tr>"
        for name, words, form in ROWS
        if (v := columns[name])
    ]
    head = "<tr><th></th><th>first</th><th>mean</th><th>last</th></tr>"
    return f"<div class=wide><table>{head}{''.join(lines)}</table></div>"


def _finite(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if math.isfinite(record.get(name, math.nan))]
