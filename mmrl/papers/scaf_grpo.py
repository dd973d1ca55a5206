"""Scaf-GRPO (arXiv 2510.19807): replace a failed answer of a group by a success with a hint.

Title: Scaf-GRPO: Scaffolded Group Relative Policy Optimization for Enhancing LLM Reasoning
Formula: ratio = p(y | x) / p_old(y | x) for y ~ p_old(. | x, hint); of a failed group one row is
that of the first hinted success.
Our reading: none in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mmrl.advantages.hinted import hint_of, keep_rows, successes
from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import advantage, engine
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Prompt, Rollouts
from mmrl.data.hints import TAG, without_hint
from mmrl.vision.decoding.continuing import ContinuingEngine

GIVEN_HINT = ("logp", "entropy")  # notes that hold for the prompt with its hint only


@engine(scope="vision")
class WithoutHints:
    """Learn the answers to prompts with hints as answers to the bare prompts (Scaf-GRPO's option).

    arXiv 2510.19807. The tokens stay those that were sampled with the hint of `with_hints`; their
    log-probabilities are those without it, of the policy before the update, so that the ratio begins at 1.
    The log-probabilities and entropies that the engine noted of such a row are dropped, and the row is
    off-policy. Rewards see the prompt with its hint. It wraps `vision.generate` or `vision.vllm`.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: ContinuingEngine) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, and put the bare prompt before the tokens of hinted answers."""
        encode = self.policy.prompt_encoder.encode
        return tuple(
            replace(
                row,
                steps=replace(row.steps, prompt=encode(without_hint(row.prompt))),
                notes={name: note for name, note in row.notes.items() if name not in GIVEN_HINT},
                on_policy=False,
            )
            if TAG in row.prompt.tags
            else row
            for row in self.engine.rollout(prompts)
        )


@advantage
def first_success(
    table: RewardTable, *, of: str = "", threshold: float = 0.0, replace: PositiveInt = 1
) -> RewardTable:
    """Put the first hinted success of a failed group in the place of its first row (Scaf-GRPO).

    arXiv 2510.19807. All other hinted rows are left out, so that the group keeps its size; a group without a
    hinted success is the plain one. Put it first in the chain, with the sampler `with_hints`. A group without
    plain rows stays as it is.

    Args:
        of: Name of the reward that must be above `threshold`; empty: the weighted sum.
        threshold: The highest reward that counts as a failure.
        replace: Plain rows that hinted successes replace.
    """
    hinted, success = hint_of(table) != 0, successes(table, of, threshold)
    kept = torch.ones(len(table), dtype=torch.bool)
    for group in table.group.unique().tolist():
        rows = table.group == group
        plain = (rows & ~hinted).nonzero()[:, 0]
        if not len(plain) or not (rows & hinted).any():
            continue
        kept[rows & hinted] = False
        if not success[plain].any():
            chosen = (rows & hinted & success).nonzero()[:replace, 0]
            kept[chosen] = True
            kept[plain[: len(chosen)]] = False
    return keep_rows(table, kept)
