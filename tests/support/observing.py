"""Samplers with a memory, shown rewards by hand: steps of draws, observed tables, advantages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mmrl.core.protocols import Engine
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts
from tests.support.tables import reward_table
from tests.support.toys import ToyGenerate, prompts


def made(piece: type, *, num: int = 4, seed: int = 0, data: Sequence[Prompt] = (), **options: Any) -> Any:
    """Make a sampler of `num` prompts, p0, p1, ..., with a stream of its own."""
    return piece(data or prompts(num=num), stream=Stream(seed), **options)


def uids(drawn: Sequence[Prompt]) -> list[str]:
    return [prompt.uid for prompt in drawn]


def next_step(sampler: Any) -> None:
    stream = sampler.stream
    stream.step, stream.round = stream.step + 1, 0


def shown(rewards: Mapping[str, Sequence[float | None]], **columns: Any) -> RewardTable:
    """Build the table of some groups: rewards by uid, one number per rollout."""
    flat = [value for group in rewards.values() for value in group]
    group = [uid for uid, values in rewards.items() for _ in values]
    return reward_table(flat, group=group, **columns)


def observe(sampler: Any, rewards: Mapping[str, Sequence[float | None]], **columns: Any) -> None:
    sampler.observe((), shown(rewards, **columns))


def by_source(*sources: str) -> list[Prompt]:
    """Give p0, p1, ... a source, and columns of numbers and of signals."""
    return [
        replace(
            prompt,
            split=source,
            columns={**prompt.columns, "source": source, "difficulty": i / 10, "signals": {"failures": i}},
        )
        for i, (prompt, source) in enumerate(zip(prompts(num=len(sources)), sources, strict=True))
    ]


def sourced(*, num: int = 8) -> list[Prompt]:
    """Give prompts of two sources in turn, with a column of numbers."""
    return by_source(*("even", "odd") * (num // 2))


def worded(*, num: int = 8) -> list[Prompt]:
    """Give every prompt its question as a column, and one paraphrase of it."""
    return [
        replace(prompt, columns={"question": prompt.text, "paraphrases": [f"please {prompt.text}"]})
        for prompt in prompts(num=num)
    ]


class ToyThoughts:
    """Note the first token of every answer as its thought."""

    notes = frozenset({"think"})

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        return tuple(
            replace(row, notes={**row.notes, "think": (torch.arange(row.length) == 0).float()})
            for row in self.engine.rollout(prompts)
        )


class ToyTokens(ToyGenerate):
    """An engine that notes its tokens, as the engine of vision-language models does."""

    notes = ToyGenerate.notes | {"token"}

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        return tuple(
            replace(row, notes={**row.notes, "token": row.steps[1].float()})
            for row in super().rollout(prompts)
        )


class ToyWriting(ToyTokens):
    """An engine that writes experiences where it is asked for them, from tokens that it samples."""

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        written = {"rules": lambda text: f"- say {text}\n\n2. not more", "changes": self.changes}
        return tuple(
            replace(row, outcomes=(replace(row.outcomes[0], text=write(row.outcomes[0].text)),))
            if (write := written.get(row.prompt.uid.partition("#")[2]))
            else row
            for row in super().rollout(prompts)
        )

    @staticmethod
    def changes(text: str) -> str:
        """Propose an experience, and to leave out one that may not exist."""
        return f"So: {json.dumps([{'add': f'rule {text}'}, {'delete': '1'}])}."


class ToyHinting(ToyTokens):
    """An engine that writes hints from tokens that it samples; one without a token cannot be used."""

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        return tuple(
            replace(row, outcomes=(replace(row.outcomes[0], text=f"<hint>{row.outcomes[0].text}</hint>"),))
            if "#hinter" in row.prompt.uid
            else row
            for row in super().rollout(prompts)
        )
