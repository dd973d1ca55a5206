"""Whether rollouts were sampled as the configuration asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mmrl.config.registry import check
from mmrl.core.types import Outcome
from mmrl.diagnostics.context import Examined, Finding

MEASURABLE = 30  # steps below which chance explains anything
STRANGE = 6.0  # standard errors


@check(on="start")
def sampling_params(examined: Examined) -> Iterator[Finding]:
    """See whether the engine samples with the settings that it was given, not with others that came along.

    Sampled steps are as likely, on average, as the entropy says; much likelier ones were taken greedily, or
    from a colder or a cut distribution. That the configuration itself asks for those is taken into account.
    """
    yield from _settings(examined)
    rows = [row for row in examined.rollouts if row.on_policy]
    surprises = [
        -row.notes["logp"].double() - row.notes["entropy"].double()
        for row in rows
        if {"logp", "entropy"} <= row.notes.keys()
    ]
    entropies = [row.notes["entropy"].double() for row in rows if "entropy" in row.notes]
    asked = _asked(examined)
    if surprises and not asked:
        difference, entropy = torch.cat(surprises), float(torch.cat(entropies).mean())
        mean, count = float(difference.mean()), len(difference)
        error = float(difference.std()) / math.sqrt(count) if count > 1 else math.inf
        if count >= MEASURABLE and mean < -STRANGE * error and mean < -0.1 * entropy and entropy > 0.01:
            yield Finding(
                f"sampled steps are likelier than chance allows: {entropy + mean:.3g} nats each, where the "
                f"entropy is {entropy:.3g}",
                "the engine samples greedily or colder than it was told: look for settings that come with "
                "the checkpoint (generation_config: do_sample, temperature, top_p, top_k)",
            )
    if _all_alike(examined) and len(rows) > 1:
        how = f" ({', '.join(f'{k}={v}' for k, v in asked.items())})" if asked else ""
        yield Finding(
            f"all answers of every prompt are the same{how}",
            "sample: a group of equal answers has no advantage; set the temperature above 0, and see that "
            "every rollout draws from its own random stream",
        )


# A temperature above 0 is in what is noted.
_COLDER: Mapping[str, Callable[[Any], bool]] = {
    "temperature": lambda value: value == 0,
    "top_p": lambda value: value != 1,
    "top_k": lambda value: value != 0,
    "min_p": lambda value: value != 0,
}


def _asked(examined: Examined) -> dict[str, Any]:
    """List the settings of the configuration by which samples may be likelier than chance."""
    given = [item for piece in examined.config.rollout.engine for item in piece.options.items()]
    return {name: value for name, value in given if name in _COLDER and _COLDER[name](value)}


def _settings(examined: Examined) -> Iterator[Finding]:
    """Compare the options of the innermost engine with what it holds; those that follow a schedule move."""
    listed, engine = list(examined.config.rollout.engine), examined.engine
    engines = [engine]
    while hasattr(engines[-1], "engine"):  # wrappers keep what they wrap under this name
        engines.append(engines[-1].engine)
    for piece, made in zip(reversed(listed), engines, strict=False):
        for name, value in piece.options.items():
            held = getattr(made, name, value)
            if type(value) in (int, float) and type(held) in (int, float) and held != value:
                yield Finding(
                    f"the engine '{piece.name}' was given {name}={value:g} and works with {held:g}",
                    "something overwrites it: look at what the checkpoint brings, and at wrappers",
                )


def _all_alike(examined: Examined) -> bool:
    answers: dict[str, list[Outcome]] = {}
    for row in examined.rollouts:
        if row.on_policy:
            answers.setdefault(row.group, []).append(row.outcomes[-1])
    several = [group for group in answers.values() if len(group) > 1]
    return bool(several) and all(_same(group[0], other) for group in several for other in group[1:])


def _same(one: Outcome, other: Outcome) -> bool:
    media = [(getattr(one, name), getattr(other, name)) for name in ("image", "video")]
    return one.text == other.text and all(a is b or (a is not None and torch.equal(a, b)) for a, b in media)
