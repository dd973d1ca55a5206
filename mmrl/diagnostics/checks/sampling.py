"""Startup checks that the engine samples reproducibly and with the configured parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from mmrl.config.registry import check
from mmrl.core.types import Outcome
from mmrl.diagnostics.context import Examined, Finding

REPEATED = 2  # number of prompts that are sampled twice
MEASURABLE = 30  # minimum number of steps for a statistical test
STRANGE = 6.0  # number of standard errors above which a difference is reported
# Options that truncate the distribution, with the values that switch truncation off.
OFF = {"top_p": 1, "top_k": 0, "min_p": 0}
GREEDY = ("temperature", 0)


@check(on="start")
def sampling_params(examined: Examined) -> Iterator[Finding]:
    """Check that the engine samples with the configured parameters, not with defaults of the checkpoint.

    The mean of -log p over sampled steps should be near the mean entropy of these steps. A much lower value
    indicates greedy sampling, a lower temperature or a truncated distribution that is not configured.
    """
    yield from _overwritten(examined)
    rows = [row for row in examined.rollouts if row.on_policy]
    surprises = [
        -row.notes["logp"].double() - row.notes["entropy"].double()
        for row in rows
        if {"logp", "entropy"} <= row.notes.keys()
    ]
    entropies = [row.notes["entropy"].double() for row in rows if "entropy" in row.notes]
    surprises, entropies = ([note[~note.isnan()] for note in listed] for listed in (surprises, entropies))
    options = [item for piece in examined.config.rollout.engine for item in piece.options.items()]
    # A temperature above 0 is no problem: the recorded log-probabilities include it.
    truncating = {
        name: value for name, value in options if (name, value) == GREEDY or value != OFF.get(name, value)
    }
    if surprises and not truncating:
        difference, entropy = torch.cat(surprises), float(torch.cat(entropies).mean())
        mean, count = float(difference.mean()), len(difference)
        # The expected difference is 0; `error` is the standard error of its mean.
        error = float(difference.std()) / math.sqrt(count) if count > 1 else math.inf
        if count >= MEASURABLE and mean < -STRANGE * error and mean < -0.1 * entropy and entropy > 0.01:
            yield Finding(
                f"sampled steps are likelier than chance allows: {entropy + mean:.3g} nats each, where the "
                f"entropy is {entropy:.3g}",
                "the engine samples greedily or at a lower temperature than configured: look for settings "
                "that come with the checkpoint (generation_config: do_sample, temperature, top_p, top_k)",
            )
    if _all_alike(examined) and len(rows) > 1:
        how = f" ({', '.join(f'{k}={v}' for k, v in truncating.items())})" if truncating else ""
        yield Finding(
            f"all answers of every prompt are the same{how}",
            "sample: a group of equal answers has no advantage; set the temperature above 0, and see that "
            "every rollout draws from its own random stream",
        )


@check(on="start")
def repeatable_rollouts(examined: Examined) -> Iterator[Finding]:
    """Check that the engine gives the same answers to the same prompts and seed, bit for bit.

    Otherwise a run cannot be resumed exactly. Only `mmrl doctor` runs this check, as it samples twice more.
    """
    prompts = [prompt for prompt in examined.prompts[:REPEATED] for _ in range(2)]
    first, second = ([outcome for row in examined.ask(prompts) for outcome in row.outcomes] for _ in range(2))
    apart = sum(not _alike(*pair) for pair in zip(first, second, strict=False))
    if apart or len(first) != len(second):
        yield Finding(
            f"{apart + abs(len(first) - len(second))} of {len(first)} answers differ when the same prompts "
            "are answered again with the same seed",
            "draw from `stream.generator(...)`, never from torch's own generator or the time; give servers "
            "and environments a seed",
        )


def _overwritten(examined: Examined) -> Iterator[Finding]:
    """Find overwritten numeric options: those whose engine attribute differs from the configuration."""
    pieces = examined.config.rollout.engine
    engines: list[Any] = [examined.engine]
    while hasattr(engines[-1], "engine"):  # a wrapper's inner engine
        engines.append(engines[-1].engine)
    for piece, engine in zip(reversed(pieces), engines, strict=False):
        for name, value in piece.options.items():
            actual = getattr(engine, name, value)
            if type(value) in (int, float) and type(actual) in (int, float) and actual != value:
                yield Finding(
                    f"the engine '{piece.name}' was given {name}={value:g} and works with {actual:g}",
                    "something overwrites it: look at what the checkpoint brings, and at wrappers",
                )


def _all_alike(examined: Examined) -> bool:
    """Whether the sampled answers within every group are equal; False if no group has several answers."""
    groups: dict[str, list[Outcome]] = {}
    for row in examined.rollouts:
        if row.on_policy:
            groups.setdefault(row.group, []).append(row.outcomes[-1])
    pairs = [(answers[0], other) for answers in groups.values() for other in answers[1:]]
    return bool(pairs) and all(_alike(first, other) for first, other in pairs)


def _alike(first: Outcome, other: Outcome) -> bool:
    """Whether two answers are equal in text and, bit for bit, in image and video."""
    return first.text == other.text and all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in ((first.image, other.image), (first.video, other.video))
    )
