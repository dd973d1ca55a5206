"""Engines that note which tokens stand inside a thought, or inside the final answer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import Prompt, Rollouts, Trajectory


@engine
class WithThinkRegion:
    """Note which tokens stand between the tags of a thought, for methods that treat thoughts differently.

    The note `think` is 1 from after the opening tag to before the closing one, else 0. An answer without an
    opening tag has been thinking from its start (the prompt may end with the tag), unless it has no closing
    one either; without a closing tag the thought lasts to the end. It wraps an engine of `vision.tokens`.

    Args:
        open: Opening tag.
        close: Closing tag.
    """

    notes: frozenset[str] = frozenset({"think"})

    def __init__(self, engine: Engine, *, open: str = "<think>", close: str = "</think>") -> None:
        self.engine, self.tags = engine, (open, close)
        self.policy: Any = engine.policy  # of tokens

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry with the wrapped engine, and note its thought."""
        return tuple(self._noted(row) for row in self.engine.rollout(prompts))

    def _noted(self, row: Trajectory) -> Trajectory:
        ids: Tensor = row.steps.ids
        text = self.policy.prompt_encoder.text
        answer = text(ids)
        opened, closed = self._find(answer)
        inside = torch.zeros(len(ids))
        if opened >= 0 or closed >= 0:

            def read(count: int) -> int:
                """Count the characters of the first tokens."""
                return len(text(ids[:count]))

            counts = range(len(ids) + 1)
            # After the token that ends the opening tag; before the one that begins the closing tag.
            first = bisect_left(counts, opened + len(self.tags[0]), key=read) if opened >= 0 else 0
            last = bisect_right(counts, closed, key=read) - 1 if closed >= 0 else len(ids)
            inside[first:last] = 1.0
        return replace(row, notes={**row.notes, **dict.fromkeys(self.notes, inside)})

    def _find(self, answer: str) -> tuple[int, int]:
        """Find the letters at which the tags begin; -1 for a tag that is not there."""
        opened, closed = (answer.find(tag) for tag in self.tags)
        return opened, closed


@engine
class WithAnswerRegion(WithThinkRegion):
    """Note which tokens stand inside the final answer, for methods that treat it differently (LLDS).

    The note `answer` is 1 from after the last opening tag to before the closing one that follows, else 0;
    without one the answer lasts to the end, and without an opening tag there is none. It wraps an engine of
    `vision.tokens`.

    Args:
        open: Opening tag.
        close: Closing tag.
    """

    notes: frozenset[str] = frozenset({"answer"})

    def __init__(self, engine: Engine, *, open: str = "<answer>", close: str = "</answer>") -> None:
        super().__init__(engine, open=open, close=close)

    def _find(self, answer: str) -> tuple[int, int]:
        opened = answer.rfind(self.tags[0])
        return opened, answer.find(self.tags[1], opened) if opened >= 0 else -1
