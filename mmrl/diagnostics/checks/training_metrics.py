"""Checks during training that warn if metrics indicate a faulty run.

A record maps names to metrics of a step; evaluation metrics are `eval_x`, with interval bounds `eval_x/low`
and `eval_x/high`. A check reports the first faulty step, so that its message does not change later.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from mmrl.config.loading import nearest
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveShare
from mmrl.config.registry import check
from mmrl.diagnostics.context import Examined, Finding, spelled
from mmrl.diagnostics.memory_estimates import peak, room
from mmrl.reporting.metrics import of_training

Records = Sequence[Mapping[str, Any]]
DIFFERENCE = "sampling/sampling_logp_difference/mean"  # metric: difference of engine and policy
ADAPTER = ("lora_", "adapter")  # parts of the parameter names of adapters
Pairs = list[tuple[int, float]]  # (step, value) of every record


def _series(records: Records, name: str) -> Generator[Finding, None, Pairs]:
    """Return the finite (step, value) pairs of a metric; first yield a finding if no record has it."""
    # Evaluation metrics: skip records of steps without an evaluation.
    evaluated = [r for r in records if any(key.startswith("eval_") for key in r)]
    candidates = evaluated if name.startswith("eval_") else records
    if candidates and not any(name in record for record in candidates):
        hint = nearest(name, candidates[0])
        yield Finding(f"a check reads '{name}', which the metrics of the run do not have", hint)
        return []
    pairs = [(record["step"], record.get(name, math.nan)) for record in records]
    return [(step, value) for step, value in pairs if math.isfinite(value)]


def _mean(pairs: Pairs) -> float:
    return sum(value for _, value in pairs) / len(pairs)


def _averages(pairs: Pairs, window: int) -> Pairs:
    """Return the running mean over `window` records as (last step of the window, mean)."""
    ends = range(window, len(pairs) + 1)
    return [(pairs[end - 1][0], _mean(pairs[end - window : end])) for end in ends]


@check(on="training")
def reward_hacking(
    records: Records, *, rising: str = "reward", of: tuple[str, ...] = (), window: PositiveInt = 5
) -> Iterator[Finding]:
    """Warn if the trained reward rose, but a held-out metric fell below the interval of its first value.

    Higher values must be better. The rule is our reading of reward hacking.

    Args:
        rising: Metric of the trained reward.
        of: Held-out metrics, without the prefix `eval_`; empty: all metrics with an interval.
        window: Number of first and of last records over which the reward is averaged; at most half of all.
    """
    trained = yield from _series(records, rising)
    names = [f"eval_{name}" for name in of] or sorted(
        {key.removesuffix("/low") for record in records for key in record if key.endswith("/low")}
    )
    for name in names:
        values = yield from _series(records, name)
        low = next((record[f"{name}/low"] for record in records if f"{name}/low" in record), math.nan)
        for step, value in values[1:]:  # the first value provides the interval
            before = [pair for pair in trained if pair[0] <= step]
            size = min(window, len(before) // 2)  # no overlap of start and end
            if size and value < low and (end := _mean(before[-size:])) > (start := _mean(before[:size])):
                yield Finding(
                    f"{name} fell to {value:.4g} at step {step + 1}, below the interval it began in "
                    f"({values[0][1]:.4g}, from {low:.4g}), while {rising} rose from {start:.4g} to "
                    f"{end:.4g}: the policy may exploit its reward"
                )
                break


@check(on="training")
def metric_drop(
    records: Records, *, of: str = "reward_std", share: NonNegativeFloat = 0.1, window: PositiveInt = 5
) -> Iterator[Finding]:
    """Warn if the average of a metric fell below a fraction of its first average.

    Args:
        of: The metric.
        share: Smallest allowed fraction of the first average.
        window: Records per average.
    """
    averages = _averages((yield from _series(records, of)), window)
    for step, average in averages[window:]:  # windows that do not overlap the first window
        start = averages[0][1]
        if average < share * start:
            yield Finding(
                f"{of} collapsed to {average:.4g} at step {step + 1}; it began at {start:.4g}, and the "
                f"bar is {share:g} of that"
            )
            return


@check(on="training")
def metric_spike(records: Records, *, of: str, above: float, window: PositiveInt = 1) -> Iterator[Finding]:
    """Warn if the average of a metric rose above a threshold.

    Args:
        of: The metric.
        above: The threshold.
        window: Records per average.
    """
    for step, average in _averages((yield from _series(records, of)), window):
        if average > above:
            yield Finding(f"{of} rose to {average:.4g} at step {step + 1}; the bar is {above:g}")
            return


@check(on="training")
def effective_samples(
    records: Records, *, least: PositiveShare = 0.5, window: PositiveInt = 5
) -> Iterator[Finding]:
    """Warn if the effective sample size of rollouts is small, because engine and policy differ too much.

    The check reads `sampling/ess/rows`, computed from importance weights. Runs without this metric pass.

    Args:
        least: Smallest allowed effective fraction of answers.
        window: Records per average.
    """
    shares = [(r["step"], r["sampling/ess/rows"]) for r in records if "sampling/ess/rows" in r]
    for step, average in _averages([pair for pair in shares if math.isfinite(pair[1])], window):
        if average < least:
            yield Finding(
                f"answers were worth {average:.0%} of as many of the policy's own at step {step + 1}; the "
                f"bar is {least:.0%}",
                "lower the learning rate or `rollout.max_staleness`, or take a more exact engine",
            )
            return


@check(on="training")
def logprob_mismatch(
    records: Records, *, of: str = DIFFERENCE, tolerance: NonNegativeFloat = 1e-3
) -> Iterator[Finding]:
    """Warn if engine and policy disagree on log-probabilities at the first reported step.

    Before the first update the ratio of policy to engine is 1 for every method. A difference is a defect of
    precision, guidance, batching or bookkeeping, and the first thing to check when no reward rises.
    For tokens in half precision, the difference is about 0.01; methods that clip at 1e-4 need a tolerance
    below 1e-4. Engines without recorded log-probabilities and engines marked `cheap` (less exact) pass.
    """
    first = of_training(records)[:1]
    if any(record.get("cheap") or (of == DIFFERENCE and of not in record) for record in first):
        return
    for step, value in (yield from _series(first, of)):
        if value > tolerance:
            yield Finding(
                f"the ratio is not 1 at step {step + 1}: log-probabilities of engine and policy differ "
                f"by {value:.4g} on average, more than {tolerance:g}"
            )


# ---- checks at the start that gradients reach all trained parameters and that the run fits into memory


@check(on="start")
def gradient_flow(examined: Examined) -> Iterator[Finding]:
    """Check that every trained parameter gets a gradient, and that no adapter is frozen."""
    if examined.untouched:
        yield Finding(
            f"no gradient reaches {spelled(examined.untouched)}, though they are to be trained",
            "see that the forward pass goes through them: adapters switched on, nothing detached or under "
            "no_grad, no part of the model that this data never uses",
        )
    frozen = [name for name, p in examined.policy.module.named_parameters() if not p.requires_grad]
    adapters = [name for name in frozen if any(mark in name for mark in ADAPTER)]
    if adapters:
        yield Finding(
            f"{spelled(adapters)} look like an adapter and are frozen, while other weights learn",
            "load the adapter as trainable, or merge it into the weights",
        )


@check(on="start")
def fits_memory(examined: Examined, *, share: PositiveFloat = 0.9) -> Iterator[Finding]:
    """Check that the estimated memory of a run is at most `share` of the memory of the device."""
    needed, size = peak(examined.memory), room()[0]
    if size and needed > share * size:
        largest = sorted(examined.memory.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{name} {part / 1e9:.3g} GB" for name, part in largest)
        yield Finding(
            f"the run wants about {needed / 1e9:.3g} GB of {size / 1e9:.3g} GB; most of it: {parts}",
            "train an adapter (policy.lora_rank), lower learn.micro_batch_steps, turn gradient checkpointing "
            "on, let the engine generate fewer rows at once, or shard over more processes",
        )
