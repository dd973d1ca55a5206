"""The objective of reward models: Bradley-Terry on pairs, with margins, ties, labels and centred scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import Needs, objective
from mmrl.core.reward_table import EQUAL
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Unit


@objective
@dataclass(frozen=True, kw_only=True)
class BradleyTerry:
    """Loss of a reward model on pairs: -log sigmoid(score of the better - score of the worse).

    This is the loss of InstructGPT (arXiv 2203.02155) and of TRL's `RewardTrainer`, averaged over pairs. An
    unnamed score learns which answer has the larger advantage. A score for the label NAME learns which has
    the larger reward NAME, which the advantage function `pairs_with_ties` records; pairs without this label
    add 0. The loss is the mean over labels; every label has its own `rewards/...` metrics.

    With `tie_threshold` above 0, pairs follow the model of Rao and Kupper (1967, doi
    10.1080/01621459.1967.10482901) with theta = exp(tie_threshold): for a score
    difference d, the first answer wins with probability sigmoid(d - tie_threshold), the second with
    sigmoid(-d - tie_threshold), and otherwise they tie.

    In `rewards/accuracies`, ties and missing labels count 1/2. In `rewards/chosen` and `rewards/rejected`
    they count with the mean of both scores.

    Args:
        margin: Name of the reward whose difference between the better and the worse answer the scores must
            exceed (Llama 2, arXiv 2307.09288; the column `margin` of TRL). Empty: no margin.
        center_rewards_coefficient: Coefficient of the squared sum of the scores of a pair, which centres
            scores at 0 (arXiv 2312.09244; TRL's name).
        tie_threshold: Half the width of the range of score differences that are ties; 0: ties add no loss.
    """

    margin: str = ""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    tie_threshold: NonNegativeFloat = 0.0
    needs: ClassVar[Needs] = Needs(unit=Unit.GROUP, outputs=frozenset({"score"}))

    def weigh(self, batch: Batch) -> Tensor:
        """Return the mask (N, 1): pairs have equal weights."""
        return batch.mask

    def __call__(self, new: StepOutput, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the contributions of a micro-batch of whole pairs to loss and metrics of the update."""
        first, second = pairs_of(batch)
        groups = batch.totals.groups or 1.0
        scores = {
            name[5:]: v for name, v in new.extra.items() if name == "score" or name.startswith("score/")
        }
        loss, metrics = new.logp.new_zeros(()), dict[str, Tensor]()
        for label, score in scores.items():  # key: "" or "/NAME"
            better = _difference(self._better(label, batch), first, second)
            sign = torch.where(better.abs() > EQUAL, better.sign(), better * 0)  # NaN: no label
            ones, others = score[first, 0], score[second, 0]
            margin = 0.0
            if self.margin:
                margin = sign * _difference(_noted(batch, self.margin), first, second)
                if margin.isnan().any():
                    raise ValueError(f"the margin '{self.margin}' is missing for some pairs; give it to all")
            loss = loss + self._loss(ones, others, sign, margin).sum() / (groups * len(scores))
            metrics |= _metrics(label, ones.detach(), others.detach(), sign, groups)
        return loss, metrics

    def _better(self, label: str, batch: Batch) -> Tensor:
        """Return the preference signal (N, 1) of a label: larger for the better row of a pair."""
        return _noted(batch, label.removeprefix("/")) if label else batch.advantage

    def _loss(self, ones: Tensor, others: Tensor, sign: Tensor, margin: Tensor | float) -> Tensor:
        """Compute the loss of every pair (P,); `sign` is 1 if the first is better, 0 for ties, or NaN."""
        gap, width = ones - others, self.tie_threshold
        won = softplus(margin + width - sign.nan_to_num() * gap)
        tie = torch.zeros_like(gap)
        if width:
            # (theta^2 - 1) sigmoid(d - width) sigmoid(-d - width) is the probability of a tie.
            tie = softplus(width - gap) + softplus(width + gap) - math.log(math.expm1(2 * width))
        loss = torch.where(sign == 0, tie, torch.where(sign.isnan(), 0.0, won))
        return loss + self.center_rewards_coefficient * (ones + others).square()


def pairs_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the indices (P,) of the first and of the second row of every pair.

    A single row, whose partner is not trained on, is ignored. Raises `ValueError` for more than two rows.
    """
    rows = (batch.mask.sum(-1) > 0).nonzero()[:, 0]
    order = rows[batch.group[rows].argsort(stable=True)]
    _, place, sizes = batch.group[order].unique_consecutive(return_inverse=True, return_counts=True)
    if (sizes > 2).any():
        raise ValueError(
            f"`bradley_terry` learns from pairs, but a group has {int(sizes[sizes > 2][0])} rows; end the "
            "advantage chain with `pairs_with_ties` or `best_vs_worst`"
        )
    order = order[sizes[place] == 2]
    return order[::2], order[1::2]


def _noted(batch: Batch, name: str) -> Tensor:
    if f"reward/{name}" not in batch.notes:
        named = [note.removeprefix("reward/") for note in batch.notes if note.startswith("reward/")]
        raise ValueError(
            f"`bradley_terry` reads a reward called '{name}', which the run does not have; it has "
            f"{', '.join(named) or 'none (add the advantage `pairs_with_ties`)'}"
        )
    return batch.notes[f"reward/{name}"]


def _difference(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return values[first, 0] - values[second, 0]


def _metrics(label: str, ones: Tensor, others: Tensor, sign: Tensor, groups: float) -> dict[str, Tensor]:
    """Compute the mean scores of better and worse rows, their difference, and the accuracy."""
    sign = sign.nan_to_num()
    mean, half = (ones + others) / 2, sign * (ones - others) / 2
    right = torch.where(sign == 0, 0.5, (half > 0).to(half.dtype))
    named = {"chosen": mean + half, "rejected": mean - half, "margins": 2 * half, "accuracies": right}
    return {f"rewards/{name}{label}": value.sum() / groups for name, value in named.items()}
