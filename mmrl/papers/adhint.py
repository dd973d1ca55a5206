"""ADHint (arXiv 2512.13095): half of each group sees part of the solution, more for harder prompts.

Title: ADHint: Adaptive Hints with Difficulty Priors for Reinforcement Learning
Formula: hint = (1 - acc) max_hint of the solution; A > 0 of hinted rows times (1 - a_hinted) / (1 -
a_plain) in [0, 1].
Our reading: difficulty, length and factor, since only the abstract was read; departs: hint tokens are not
learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mmrl.advantages.hinted import hint_of
from mmrl.config.ranges import PositiveFloat, Probability
from mmrl.config.registry import advantage, sampler
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import RewardTable
from mmrl.core.tensor import group_count, group_index, group_mean
from mmrl.core.types import Prompt, Rollouts
from mmrl.data.hints import TAG, TEMPLATE, check_hints, sentences, tiers, with_hint
from mmrl.samplers.hints import rewards_of


@advantage
def scale_hinted(
    table: RewardTable, *, of: str, max_reward: PositiveFloat = 1.0, eps: PositiveFloat = 1e-6
) -> RewardTable:
    """Shrink positive advantages of hinted rows by how much easier the hint made the prompt (ADHint).

    arXiv 2512.13095. Our reading, from the abstract: the factor is (1 - a_h) / max(1 - a_p, eps) within [0,
    1], with a_h and a_p the mean accuracy of the hinted and of the plain rows of the group. Put it after
    `{name: group_normalize, by: [group, place, hint]}`. Groups without plain rows stay as they are.

    Args:
        of: Name of the reward that measures accuracy.
        max_reward: The reward of a perfect answer.
        eps: Smallest difficulty of the plain prompt.
    """
    accuracy = table.at_end(of) / max_reward
    hinted, known = hint_of(table) != 0, ~accuracy.isnan()
    group = group_index([table.group])
    # Over the plain and over the hinted rows of each group, laid over all rows of it.
    plain, shown = (group_mean(accuracy.nan_to_num(), group, known & rows) for rows in (~hinted, hinted))
    compared = hinted & (group_count(group, known & ~hinted) > 0)
    factor = ((1.0 - shown) / (1.0 - plain).clamp(min=eps)).clamp(0.0, 1.0)
    factor = torch.where(compared, factor, 1.0)[:, None, None]
    return table.put(torch.where(table.values > 0, table.values * factor, table.values))


@sampler(sets_tags={TAG})
class WithDifficultyHints:
    """Ask a share of every group with a hint that is longer the harder the prompt is (ADHint).

    arXiv 2512.13095, of which only the abstract was at hand. Our reading: the difficulty is 1 minus the mean
    reward of the prompt's plain answers so far, with two answers of mean 1/2 added, so that a prompt that
    was never asked has 1/2; the hint is that share times `max_hint` of the sentences of the solution,
    rounded down. Plain and hinted answers are one group; put `{name: group_normalize, by: [group, place,
    hint]}` and then `scale_hinted` into the advantage. The hint is a part of the prompt, not of the answer,
    so that its tokens are not learned: the paper's weights of hint tokens are not offered.

    Args:
        sampler: The wrapped sampler.
        hint_column: Column of the data with solutions; a prompt whose cell is empty stays plain.
        hint_template: Text after the question; `{hint}` is the hint.
        max_hint: Share of the solution for a prompt that was never solved.
        share: Share of the rollouts of a group that get the hint, rounded down.
        of: Name of the reward that measures accuracy; empty: the weighted sum.
        max_reward: The reward of a perfect answer.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        train_prompts: Sequence[Prompt] = (),
        hint_column: str,
        hint_template: str = TEMPLATE,
        max_hint: Probability = 0.5,
        share: Probability = 0.5,
        of: str = "",
        max_reward: PositiveFloat = 1.0,
    ) -> None:
        check_hints(train_prompts, hint_column, hint_template)
        self.sampler, self.hint_column, self.hint_template = sampler, hint_column, hint_template
        self.max_hint, self.share, self.of, self.max_reward = max_hint, share, of, max_reward
        self.answers: dict[str, list[float]] = {}  # number and sum of accuracies of plain answers, by id
        self.lengths: list[float] = []  # shares of solutions that were shown since `tell`

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw prompts, and add hints to the last rollouts of every one."""
        drawn = self.sampler.draw(num_prompts, num_generations)
        entries: dict[str, list[Prompt]] = {}
        for prompt in drawn:
            entries.setdefault(prompt.uid, []).append(prompt)
        return [prompt for group in entries.values() for prompt in self._partly_hinted(group)]

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Count the accuracies of answers without a hint."""
        hinted = table.ids[TAG][:, 0].tolist() if TAG in table.ids else [0] * len(table)
        for uid, reward, hint in zip(table.uids, rewards_of(table, self.of), hinted, strict=True):
            if not hint and not math.isnan(reward):
                count, total = self.answers.get(uid, (0, 0.0))
                self.answers[uid] = [count + 1, total + min(max(reward / self.max_reward, 0.0), 1.0)]

    def difficulty(self, uid: str) -> float:
        """Return 1 minus the running accuracy of a prompt."""
        count, total = self.answers.get(uid, (0, 0.0))
        return 1.0 - (total + 1.0) / (count + 2.0)

    def pop_metrics(self) -> Mapping[str, float]:
        """Report the number of prompts with hints, and their mean share of the solution."""
        lengths, self.lengths = self.lengths, []
        return {"hints/prompts": float(len(lengths)), "hints/share": sum(lengths) / max(len(lengths), 1)}

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and sums of accuracies."""
        return {"answers": dict(self.answers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore numbers and sums of accuracies."""
        self.answers = dict(state["answers"])

    def _partly_hinted(self, group: Sequence[Prompt]) -> Iterable[Prompt]:
        """Add the hint to the last entries of a group."""
        prompt = group[0]
        texts = tiers(prompt.columns.get(self.hint_column), 1)
        parts = [part for text in texts for part in sentences(text)]
        count = int(self.max_hint * self.difficulty(prompt.uid) * len(parts))
        hinted = int(self.share * len(group))
        if not count or not hinted:  # an empty tag, because the advantage reads it in every step
            return [replace(entry, tags={**entry.tags, TAG: ""}) for entry in group]
        self.lengths.append(count / len(parts))
        shown = with_hint(prompt, " ".join(parts[:count]), tag="partial", template=self.hint_template)
        return [*group[: len(group) - hinted], *[shown] * hinted]
