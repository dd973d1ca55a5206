"""Random draws of prompts from sources (splits or values of a column) with given probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.samplers.candidates import Candidates


class Sources:
    """The prompts of a run, grouped by source, with draws without repetition."""

    def __init__(self, data: Sequence[Prompt], stream: Stream, named: Sequence[str], name: str) -> None:
        self.candidates, self.name = Candidates(data, stream), name  # `named`: source per prompt
        self.names = tuple(dict.fromkeys(named))
        numbers = {source: i for i, source in enumerate(self.names)}
        self.source = torch.tensor([numbers[source] for source in named])  # (M,)

    def draw(self, probabilities: Tensor, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw sources with probabilities (S,), and for each drawn source a random prompt.

        A source whose prompts were all used in this step passes its probability to the others. If too few
        unused prompts are left, all prompts may come again.
        """
        usable = probabilities > 0
        left = self._sizes(~self.candidates.asked)
        if int(left[usable].sum()) < num_prompts:
            left = self._sizes(torch.ones_like(self.candidates.asked))
        generator = self.candidates.stream.generator(self.name)
        wanted = torch.zeros_like(left)
        for _ in range(min(num_prompts, int(left[usable].sum()))):
            open_ = torch.where(left > wanted, probabilities, 0.0)
            wanted[torch.multinomial(open_, 1, generator=generator)] += 1
        chosen = []
        for i, count in enumerate(wanted.tolist()):
            inside = torch.where(self.source == i, 0.0, -math.inf)
            chosen += self.candidates.highest(inside, count, f"{self.name}/{self.names[i]}")
        return self.candidates.prompts(chosen, num_generations)

    def _sizes(self, counted: Tensor) -> Tensor:
        return torch.bincount(self.source[counted], minlength=len(self.names))

    def of(self, column: Tensor) -> dict[str, float]:
        """Map the names of the S sources to the values of a tensor (S,)."""
        return dict(zip(self.names, column.tolist(), strict=True))


def sources_of(data: Sequence[Prompt], by: str, name: str) -> list[str]:
    """Return the source of every prompt: its column `by`, or its split if `by` is empty.

    Raises `ConfigError` if a prompt lacks the column, or no prompt has a split.
    """
    if by:
        return [str(value) for value in column_of(data, by, name)]
    splits = [prompt.split for prompt in data]
    if not any(splits):
        columns = dict.fromkeys(str(column) for prompt in data for column in prompt.columns)
        raise ConfigError(
            f"sampler '{name}': the data have no splits to tell sources by; name a column, such as "
            f"`by: source` (there are {', '.join(columns) or 'none'})"
        )
    return splits


def column_of(data: Sequence[Prompt], by: str, name: str) -> list:
    """Return the values of a column; raises `ConfigError` if a prompt lacks it."""
    values = []
    for prompt in data:
        if prompt.columns.get(by) is None:
            raise ConfigError(
                f"sampler '{name}': prompt '{prompt.uid}' has no column '{by}' (`by`); name one that every "
                f"row has (it has {', '.join(map(str, prompt.columns)) or 'none'})"
            )
        values.append(prompt.columns[by])
    return values


def numbers_of(data: Sequence[Prompt], by: str, name: str) -> list[float]:
    """Return the numbers in a column; raises `ConfigError` for a value that is no finite number."""
    values = column_of(data, by, name)
    for place, value in enumerate(values):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(
                f"sampler '{name}': the column '{by}' (`by`) must hold numbers, but that of prompt "
                f"'{data[place].uid}' is {value!r}"
            )
    return [float(value) for value in values]
