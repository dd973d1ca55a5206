"""Startup checks that rewards apply, vary within groups, and prefer known-good answers."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mmrl.config.binding import Bound
from mmrl.config.registry import check
from mmrl.core.episodes import join_episodes
from mmrl.core.reward_table import EQUAL
from mmrl.core.tensor import group_index, group_range
from mmrl.core.types import Outcome, Prompt
from mmrl.diagnostics.context import Examined, Finding, spelled
from mmrl.runtime.scoring import handed


@check(on="start")
def rewards_apply(examined: Examined) -> Iterator[Finding]:
    """Check that every reward and label applies to at least one answer."""
    for what in examined.table.absent.values():
        yield Finding(
            what,
            "see whether it reads the column or target that the data have; `on_absent: warn` is for one that "
            "applies later",
        )


@check(on="start")
def zero_variance_groups(examined: Examined) -> Iterator[Finding]:
    """Check that rewards differ between the answers to a prompt, if the run learns from their differences.

    KTO has advantages from single labelled answers; distillation learns from a teacher, without advantages.
    """
    table, credit = join_episodes(examined.table), examined.credit
    if not len(table) or examined.config.rollout.num_generations < 2:
        return
    index = group_index([table.group])
    constant = []
    for name in table.names:
        values = table.at_end(name)
        valid = ~values.isnan()
        spread = group_range(values, index, valid)
        if valid.any() and not bool((spread[valid] > EQUAL).any()):
            levels = sorted({round(value, 6) for value in values[valid].tolist()})[:3]
            constant.append(f"{name} ({', '.join(f'{value:g}' for value in levels)})")
    if not constant:
        return
    groups = len(set(table.group.tolist()))
    if len(constant) < len(table.names):
        yield Finding(
            f"these rewards are the same for all answers of every prompt: {', '.join(constant)}",
            "see whether they read what they should; a reward that never differs changes no advantage",
        )
        return
    if examined.taught:
        return
    if credit is not None and bool((credit.values[credit.valid].abs() > EQUAL).any()):
        return
    yield Finding(
        f"in all {groups} groups every answer has the same reward, so nothing is learned: "
        f"{', '.join(constant)}",
        "see whether the reward can tell answers apart at all, raise the temperature, ask easier or harder "
        "prompts, or begin with demonstrations",
    )


@check(on="start")
def reward_sanity(examined: Examined) -> Iterator[Finding]:
    """Check that known-good answers earn more than empty answers and answers to other prompts.

    A known-good answer is the first recorded answer, or the target if it is a text. The check compares
    weighted sums, since a single reward can rightly prefer short answers or not depend on the prompt.
    """
    prompts = [prompt for prompt in examined.prompts if prompt.answers or type(prompt.target) is str]
    if not prompts:
        return
    answers = [prompt.answers[0] if prompt.answers else Outcome(text=prompt.target) for prompt in prompts]
    # Empty answers: no text, black images and videos. Recorded rewards are those of the good answer.
    empty = [
        replace(
            good,
            recorded={},
            text=None if good.text is None else "",
            image=None if good.image is None else torch.zeros_like(good.image),
            video=None if good.video is None else torch.zeros_like(good.video),
        )
        for good in answers
    ]
    spoilt = {"an empty one": empty}
    if len(prompts) > 1:
        spoilt["one to another prompt"] = [replace(x, recorded={}) for x in [*answers[1:], answers[0]]]
    bounds = [bound for bound in examined.rewards if bound.weight]
    good = {bound.name: _measured(bound, prompts, answers) for bound in bounds}
    equal = []
    for kind, worse in spoilt.items():
        margins = {b.name: b.weight * (good[b.name] - _measured(b, prompts, worse)) for b in bounds}
        usable = {name: margin for name, margin in margins.items() if not margin.isnan().all()}
        if usable:
            yield from _reversed(kind, usable, prompts)
            equal.append(all(bool((margin.nan_to_num().abs() <= EQUAL).all()) for margin in usable.values()))
    if equal and all(equal):
        yield Finding(
            f"a known-good answer earns exactly as much as {' or '.join(spoilt)}, for every prompt",
            "see whether the rewards read the target, and how they parse an answer",
        )


def _reversed(kind: str, margins: dict[str, torch.Tensor], prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Yield a finding if good answers earn less than worse answers, on average and for most prompts."""
    valid = ~torch.stack(list(margins.values())).isnan().all(0)
    total = torch.stack([margin.nan_to_num() for margin in margins.values()]).sum(0)
    wrong = (total < -EQUAL) & valid
    if int(wrong.sum()) * 2 > int(valid.sum()) and float(total[valid].mean()) < -EQUAL:
        guilty = [name for name, margin in margins.items() if float(margin.nanmean()) < 0]
        first = prompts[int(wrong.nonzero()[0])].uid
        yield Finding(
            f"a known-good answer earns less than {kind} for {int(wrong.sum())} of {int(valid.sum())} "
            f"prompts (the first is '{first}'), which {spelled(guilty)} prefer",
            "higher must be better: turn the reward, or its weight, around, or set it beside one that looks "
            "at the answer",
        )


def _measured(bound: Bound, prompts: Sequence[Prompt], answers: Sequence[Outcome]) -> torch.Tensor:
    """Return one reward for every answer (num_answers,); NaN if it does not apply, all NaN if it raises."""

    async def awaited(values: Awaitable[Any]) -> Any:
        return await values

    try:
        values = bound(*handed(prompts, answers))
        if inspect.isawaitable(values):
            values = asyncio.run(awaited(values))
        numbers = [math.nan if value is None else float(value) for value in values]
        return torch.tensor(numbers, dtype=torch.float64)
    except Exception:  # ignored here: made-up answers may be invalid; training reports errors
        return torch.full((len(prompts),), math.nan, dtype=torch.float64)
