"""GRPO-S of DR-IRL (arXiv 2503.18991): scale advantages by difficulty relative to the category.

Title: Inverse Reinforcement Learning with Dynamic Reward Scaling for LLM Alignment
Formula: A' = A sigmoid(x) / sigmoid(mean of x over the category), x the hardness or the gap of rewards.
Our reading: means are over the run so far; a gap is the largest less the smallest reward of a
group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.plain import as_list
from mmrl.config.ranges import PositiveInt, Tags
from mmrl.config.registry import advantage, reward
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.types import Outcome, Prompt, Rollouts
from mmrl.rewards.clip_score import ClipScore


@advantage
class CategoryScale:
    """Multiply advantages by sigmoid(x) / sigmoid(mean of x over the category) (DR-IRL, arXiv 2503.18991).

    For x the hardness of an answer this is the paper's alpha_D, for x the gap of rewards its alpha_M. The
    factors are positive, so that no sign flips. Our readings: the mean is over all that a run has seen of the
    category, this collection included; a gap is the largest less the smallest reward of a group, and the gap
    of a batch the mean over its answers of the category. An answer without the reward keeps its advantage.

    Args:
        of: Name of the reward or label.
        measure: x is the answer's own (`reward`), or the mean gap of rewards in this collection (`gap`).
        by: Tags that make a category; without any the whole data set is one.
    """

    def __init__(self, *, of: str, measure: Literal["reward", "gap"] = "reward", by: Tags = ()) -> None:
        self.of, self.measure, self.by = of, measure, by
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def __call__(self, table: RewardTable) -> RewardTable:
        """Scale the advantages."""
        batch = self._measured(table)
        x = (batch.values if self.measure == "reward" else batch.mean())[:, 0]
        usual = x.clone()  # of a category that was never observed: a factor of 1
        for key, member in self._categories(table):
            if key in self.counts:
                usual[member] = self.sums[key] / self.counts[key]
        factor = torch.where(batch.valid[:, 0], x.sigmoid() / usual.sigmoid(), 1.0)
        return table.put(table.values * factor[:, None])

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Update the means of every category with a round of rollouts."""
        batch = self._measured(table)
        for key, member in self._categories(table):
            x = batch.values[:, 0][member & batch.valid[:, 0]]
            if x.numel():
                self.sums[key] = self.sums.get(key, 0.0) + float(x.sum())
                self.counts[key] = self.counts.get(key, 0) + x.numel()

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts of the categories."""
        return {"sums": dict(self.sums), "counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore sums and counts."""
        self.sums, self.counts = dict(state["sums"]), dict(state["counts"])

    def _measured(self, table: RewardTable) -> GroupStatistics:
        """Return x of every answer, (N, 1, K), to be compared within its category."""
        if self.of not in table.scored:
            raise ValueError(f"no reward is called '{self.of}'; there are {', '.join(table.scored)}")
        x = table.scored[self.of][:, None]
        known = ~x.isnan()
        if self.measure == "gap":
            groups = GroupStatistics(x, known, table.index(BY_GROUP))
            x = groups.largest() - groups.smallest()
        return GroupStatistics(torch.where(known, x, 0.0), known, table.index(self.by))

    def _categories(self, table: RewardTable) -> Iterator[tuple[str, Tensor]]:
        """Yield every category, named by the ids of its tags, with its answers (N, K)."""
        index = table.index(self.by)
        for number in index.unique().tolist():
            member = index == number
            yield " ".join(str(int(table.tag(name)[member][0])) for name in self.by), member


@reward(packages={"open_clip": "clip"})
class ClipHardness(ClipScore):
    """How little of a reference text an answer says, by CLIP's text encoder: GRPO-S's hardness d (DR-IRL).

    arXiv 2503.18991: 1 minus the mean, over the sentences of the reference, of the largest cosine with a
    sentence of the answer. A label for `category_scale`: give it the weight 0. An empty answer has d = 1; a
    prompt without a reference has none. Our readings: what sentences are, and those that the model would
    truncate are split further, as in `clip_score`.

    Args:
        model: As for `clip_score`.
        pretrained: As for `clip_score`.
        references: The reference: `target`, or a column of the prompt with a text or a list of them.
        batch_size: Texts per forward pass.
        device: Torch device; `auto` is the current GPU, or the CPU.
    """

    def __init__(
        self,
        *,
        model: str = "ViT-L-14",
        pretrained: str | None = None,
        references: str = "target",
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        super().__init__(
            model=model, pretrained=pretrained, split="always", batch_size=batch_size, device=device
        )
        self.references = references

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the hardness of every answer; None where there is no reference."""
        answers = [self._parts(outcome.text or "", True) for outcome in outcomes]
        known = [{"target": prompt.target, **prompt.columns}.get(self.references) for prompt in prompts]
        wanted = [
            [part for text in as_list(texts) for part in self._parts(str(text), True)] for texts in known
        ]
        texts = [text for listed in (*answers, *wanted) for text in listed]
        reads = self._encode(self.towers.read, dict(zip(texts, texts, strict=True)))
        return [
            hardness([[float(reads[a] @ reads[b]) for a in own] for b in asked]) if asked else None
            for own, asked in zip(answers, wanted, strict=True)
        ]


def hardness(cosines: Sequence[Sequence[float]]) -> float:
    """1 minus the mean over references, one a row, of the largest cosine; without any it is 0."""
    return 1 - sum(max(row, default=0.0) for row in cosines) / len(cosines)
