"""Data sets around other data sets: several as one, and demonstrations that skip their thought."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import Probability
from mmrl.config.registry import data as dataset
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt

ReadData = Callable[[], Sequence[Prompt]]


@dataset
def mixture(*, data: tuple[ReadData, ...], sources: tuple[str, ...]) -> list[Prompt]:
    """Read several data sets as one, each row with the name of its own in the column `source`.

    Ids get that name before them: `gui/row-3`. A reward applies to the rows of one data set by `where:
    {source: gui}`, so one run, and one batch, may hold several tasks. The sampler draws from all rows alike.

    Args:
        data: The data sets.
        sources: A name for each of them.
    """
    if len(set(sources)) != len(data):
        raise ConfigError(
            f"`mixture` wants a name of its own in `sources` for each of {len(data)} data sets, got "
            f"{', '.join(sources) or 'none'}"
        )
    return [
        replace(prompt, uid=f"{source}/{prompt.uid}", columns={**prompt.columns, "source": source})
        for source, read in zip(sources, data, strict=True)
        for prompt in read()
    ]


@dataset
def drop_thoughts(
    *, data: ReadData, stream: Stream, share: Probability = 0.5, tag: str = "think"
) -> list[Prompt]:
    """Empty the thought of a share of a data set's demonstrations (TON, arXiv 2505.16854).

    This is thought dropout. What is inside the first block of the tag becomes two line breaks, as in the
    source; all else stays. The draw is keyed by the row's id, so neither the order of rows nor `limit`
    matters, and a resumed run drops the same thoughts. Raises ConfigError where no demonstration has one.

    Args:
        data: The data set, whose rows have demonstrations.
        share: Share of the demonstrations that lose their thought; the source's is 0.5.
        tag: Name of the thought's tag.
    """
    block = re.compile(rf"(<{tag}>).*?(</{tag}>)", re.DOTALL | re.IGNORECASE)
    thoughts = 0

    def dropped(prompt: Prompt) -> Prompt:
        nonlocal thoughts
        generator = stream.fixed("drop_thoughts", prompt.uid)
        answers: list[Outcome] = []
        for answer in prompt.answers:
            drop = float(torch.rand((), generator=generator)) < share
            thoughts += bool(answer.text and block.search(answer.text))
            emptied = block.sub(r"\1\n\n\2", answer.text or "", count=1)
            answers.append(replace(answer, text=emptied) if drop and answer.text else answer)
        return replace(prompt, answers=tuple(answers))

    prompts = [dropped(prompt) for prompt in data()]
    if not thoughts:
        raise ConfigError(
            f"`drop_thoughts` found no demonstration with a block <{tag}> in {len(prompts)} rows; let `data` "
            'write some, such as `demo: "<think>{thought}</think><answer>{answer}</answer>"`'
        )
    return prompts
