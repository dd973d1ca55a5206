"""Sampling of prompts with similar lengths, so that the rows of a step need little padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import sampler
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.samplers.sources import numbers_of
from mmrl.samplers.uniform import Uniform


@sampler
class GroupByLength(Uniform):
    """Draw every prompt once per epoch, with prompts of similar length in each step, as in transformers.

    In every epoch, the shuffled prompts are divided into mega-batches of `mega_batch` steps. Each is sorted
    by length and cut into steps, and the steps of the epoch come in random order.

    Args:
        mega_batch: Number of steps that are sorted together; transformers sorts 50.
        length_column: Column with the length of every row, such as its tokens; "": the number of characters
            of the messages and the first recorded answer, without media.
    """

    def __init__(
        self,
        data: Sequence[Prompt],
        *,
        stream: Stream,
        mega_batch: PositiveInt = 50,
        length_column: str = "",
    ) -> None:
        super().__init__(data, stream=stream)
        self.mega_batch, self.length_column = mega_batch, length_column
        self.step_size = 0  # prompts per step, set by the first draw
        if length_column:
            _ = self.lengths  # fail early if the column is missing

    @cached_property
    def lengths(self) -> list[float]:
        """The length of every prompt, including its first recorded answer."""
        if self.length_column:
            return numbers_of(self.data, self.length_column, "group_by_length")
        return [
            float(sum(len(text) for text in (prompt.text, *(a.text or "" for a in prompt.answers[:1]))))
            for prompt in self.data
        ]

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw the next prompts, `num_generations` entries each; the first draw sets the size of a step."""
        self.step_size = self.step_size or num_prompts
        return super().draw(num_prompts, num_generations)

    def order_of(self, epoch: int) -> list[int]:
        """Return the shuffled indices of all prompts, step by step; seed and epoch determine the order."""
        order, size = super().order_of(epoch), max(1, self.step_size)
        begun = -epoch * len(order) % size  # prompts that fill up the last step of the previous epoch
        mega, steps = size * self.mega_batch, list[list[int]]()
        for at in range(begun, len(order), mega):
            part = sorted(order[at : at + mega], key=self.lengths.__getitem__, reverse=True)
            steps += [part[first : first + size] for first in range(0, len(part), size)]
        tail = steps.pop() if steps and len(steps[-1]) < size else []
        shuffled = torch.randperm(len(steps), generator=self.stream.fixed("group_by_length", epoch)).tolist()
        return [*order[:begun], *(place for i in shuffled for place in steps[i]), *tail]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of prompts drawn so far, and the size of a step."""
        return {**super().state_dict(), "step_size": self.step_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the prompts that were drawn before."""
        super().load_state_dict(state)
        self.step_size = state["step_size"]
