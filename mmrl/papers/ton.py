"""TON (arXiv 2505.16854): demonstrations with an empty thought in half of the cases teach to skip it.

Title: Think or Not? Selective Reasoning via Reinforcement Learning for Vision-Language Models
Formula: thought = two line breaks with probability `share`, else the thought itself.
Our reading: none.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import Probability
from mmrl.config.registry import data, reward
from mmrl.core.answer_text import tagged
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.datasets.around import ReadData
from mmrl.rewards.adapters import per_outcome


@data
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


@reward
@per_outcome
def skip_ratio(prompt: Prompt, outcome: Outcome, *, tag: str = "think") -> float:
    """Return 1 if the answer has a thought of nothing but space, else 0: its mean is TON's share of skips.

    Every block of the tag must be empty; an answer without one has skipped nothing (arXiv 2505.16854). A
    label: give it the weight 0, because to skip is not rewarded by itself.
    """
    thoughts = tagged(outcome.text or "", tag)
    return float(bool(thoughts) and not any(map(str.strip, thoughts)))
