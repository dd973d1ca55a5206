"""Pending requests of several training steps, with rules for which weights sample which tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mmrl.core.types import Prompt
from mmrl.runtime.requests import taken
from mmrl.vision.serving.groups import AsksServers, Group, Part
from mmrl.vision.serving.server import Weights
from mmrl.vision.serving.servers import Asked


class Begun(NamedTuple):
    """The pending requests of one training step."""

    step: int  # the step that learns from the answers
    prompts: list[Prompt]
    groups: list[Group]
    weights: Weights  # weights that sample the first part of the answers


class StepsAhead:
    """The pending requests of an engine, one entry per training step.

    The servers work for one version of the weights at a time: they load the next version when all earlier
    requests are answered.
    """

    def __init__(self, engine: AsksServers) -> None:
        self.engine = engine
        self.begun: deque[Begun] = deque()
        self.partial = bool(engine.part_size()) and engine.recipe.max_staleness > 1
        self.published: tuple[Weights, int] | None = None  # (latest weights, number of steps)

    @property
    def now(self) -> int:
        """Number of finished training steps of the current weights."""
        return self.engine.recipe.clock().step

    def limit(self, step: int) -> int:
        """Return the largest number of tokens that an answer of a step gets from the current weights."""
        most, given = self.engine.max_completion_length, self.engine.part_size()
        if not self.partial or step <= self.now + 1:  # no newer weights will sample before that step
            return most
        return -(-most // self.engine.recipe.max_staleness) if given is True else min(most, int(given))

    def begin(self, prompts: Sequence[Prompt], groups: list[Group], weights: Weights) -> None:
        """Send the requests of a step; with partial rollouts, continue the answers of earlier requests."""
        if self.begun and self.begun[-1].step == self.engine.stream.step:
            self.begun.pop()  # the step is repeated, because another process dropped a prompt
        older = [begun for begun in self.begun if self.partial and begun.groups[0].newest < self.now]
        parts = [
            pair
            for begun in older
            for pair in self._continued(begun, weights, self.now, self.limit(begun.step))
        ]
        self._send(weights, groups, parts)
        self.published = weights, self.now
        self.begun.append(Begun(self.engine.stream.step, list(prompts), groups, weights))

    def take(self, prompts: Sequence[Prompt], ask: Callable[[Sequence[Prompt]], None]) -> Begun:
        """Pop the pending requests for prompts, calling `ask` if there are none; complete their answers.

        At the end of the run, no later step continues unfinished answers, so `take` itself does.
        """
        begun = taken(self.begun, self.engine.stream.step, prompts, ask)
        if self.partial and self.published and begun.groups[0].newest < begun.step - 1:
            most = self.engine.max_completion_length
            self._send(self.published[0], (), self._continued(begun, *self.published, most))
        return begun

    def _continued(
        self, begun: Begun, weights: Weights, version: int, limit: int
    ) -> list[tuple[Group, Part]]:
        """Add a part of at most `limit` tokens to the answers of a step."""
        stream = replace(self.engine.stream, step=begun.step)
        for group in begun.groups:
            make = lambda encoded, most, seed, temperature=group.temperature: self.engine.request(
                encoded, 1, most, seed, weights.version, temperature
            )
            generator = stream.generator("vllm", group.prompt.uid, len(group.parts) + 1)
            seeds = torch.randint(1 << 31, (group.request["sampling_params"]["n"],), generator=generator)
            group.parts.append(Part(version, limit, seeds.tolist(), make))
        return [(group, group.parts[-1]) for group in begun.groups]

    def _send(self, weights: Weights, groups: Sequence[Group], parts: Sequence[tuple[Group, Part]]) -> None:
        most = self.engine.max_completion_length

        def requests() -> list[Asked]:
            later = [asked for group, part in parts for asked in group.requests(part, most)]
            return [*later, *((group.answers, group.prompt.uid, group.request) for group in groups)]

        futures = [*(group.answers for group in groups), *(f for _, part in parts for f in part.futures)]
        self.engine.asking.begin(weights, futures, requests)
