"""MiMo-VL-Miloco (arXiv 2512.17436): tuning on thoughts and on direct answers, before GRPO on three domains.

Title: Xiaomi MiMo-VL-Miloco Technical Report
Formula: demonstration = thought and answer, or with probability `share` the answer alone, if asked for it.
Our reading: the share, the words that ask for the answer alone, and that one row is either of both.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import Probability
from mmrl.config.registry import data
from mmrl.core.rng import Stream
from mmrl.core.types import Part, Prompt
from mmrl.datasets.around import ReadData


@data
def token_budget(
    *,
    data: ReadData,
    stream: Stream,
    share: Probability = 0.5,
    ask: str = "Do not think first: give the answer alone.",
    tag: str = "think",
) -> list[Prompt]:
    """Ask a share of a data set for the answer alone, and remove the thought of its demonstrations.

    This is the token-budget-aware part of the first stage of MiMo-VL-Miloco (arXiv 2512.17436). The draw is
    keyed by the row's id. Raises ConfigError if no demonstration has a thought, unless `share` is 0.

    Args:
        data: The data set, whose rows have demonstrations with thoughts.
        share: Fraction of the rows that ask for the answer alone (our reading).
        ask: Line after the question of these rows.
        tag: Name of the thought's tag.
    """
    block, thoughts = re.compile(rf"\s*<{tag}>.*?</{tag}>\s*", re.DOTALL | re.IGNORECASE), 0

    def direct(prompt: Prompt) -> Prompt:
        nonlocal thoughts
        thoughts += any(block.search(answer.text or "") for answer in prompt.answers)
        if float(torch.rand((), generator=stream.fixed("token_budget", prompt.uid))) >= share:
            return prompt
        *before, last = prompt.messages
        last = replace(last, parts=(*last.parts, Part(f"\n{ask}", quoted=True)))
        answers = [
            replace(answer, text=block.sub("", answer.text or "", count=1)) for answer in prompt.answers
        ]
        return replace(prompt, messages=(*before, last), answers=tuple(answers))

    prompts = [direct(prompt) for prompt in data()]
    if share and not thoughts:
        raise ConfigError(
            f"`token_budget` found no demonstration with a block <{tag}> in {len(prompts)} rows"
        )
    return prompts
