"""HAPO (arXiv 2509.16591): entropy sets temperatures, clip ranges and the size of advantages.

Title: From Uniform to Heterogeneous: Tailoring Policy Optimization to Every Token's Nature
Formula: T_t = T (1 + tau h_t), with the entropy h_t on a scale from -1 to 1.
Our reading: the scale is that of the entropies noted in the round before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat, Probability, ShareBelowOne, Tags
from mmrl.config.registry import advantage, engine
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.types import Prompt, Rollouts
from mmrl.vision.decoding.decoding import GenerationRequest, LogitsReader
from mmrl.vision.engines.generate import Generate


@dataclass(frozen=True)
class EntropyScale:
    """HAPO's scale of entropies: the distance of log H to a quantile, over the largest on its side.

    Args:
        middle: The quantile of log H.
        spread: Root mean square distance to it.
        high: Largest distance above it, in units of `spread`.
        low: Largest distance below it, above 0.
    """

    middle: float
    spread: float
    high: float
    low: float

    @staticmethod
    def of(entropy: Tensor, pivot: float) -> EntropyScale:
        """Measure the scale of the entropies (M,) of a collection, one at least."""
        ordered = entropy.double().clamp(min=1e-8).log().sort().values
        away = ordered - ordered[round(pivot * (len(ordered) - 1))]
        spread = away.square().mean().clamp(min=1e-8).sqrt()
        ends = (float(away[-1] / spread), float(-away[0] / spread))
        return EntropyScale(float(ordered[0] - away[0]), float(spread), *(max(end, 1e-8) for end in ends))

    def __call__(self, entropy: Tensor) -> Tensor:
        """Map entropies to the scale of the last collection, [-1, 1] within it."""
        h = (entropy.clamp(min=1e-8).log() - self.middle) / self.spread
        return torch.where(h > 0, h / self.high, h / self.low)


@engine(scope="vision", notes={"entropy"})
@dataclass(eq=False)
class WithEntropyTemperature:
    """Multiply the temperature of every token by 1 + tau h, h its entropy on HAPO's scale, -1 to 1.

    arXiv 2509.16591. The scale is that of `entropy_width`, over the round of rollouts before; in the first
    one there is none, and the temperature is that of the engine. Answers are learned from at the engine's
    temperature, as in the released code, so that metrics of how well the engine samples from the policy show
    a difference. Our reading: the round before is measured by the entropies that were noted, which are those
    after the change. It wraps `vision.generate`.

    Args:
        engine: The wrapped engine.
        tau: Largest relative change of the temperature.
        pivot: Quantile of the entropies whose tokens keep the temperature.
    """

    engine: Generate
    _: KW_ONLY
    tau: ShareBelowOne = 0.05
    pivot: Probability = 0.8
    notes: ClassVar[frozenset[str]] = frozenset()
    scale: EntropyScale | None = field(default=None, init=False)
    in_process: ClassVar[str] = "sets the temperature of every token by its entropy"

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order."""
        return self.engine.decode(prompts, self._begin if self.scale else None)

    def factor(self, entropy: Tensor) -> Tensor:
        """Return the temperature factor for tokens with these entropies."""
        return (
            torch.ones_like(entropy)
            if self.scale is None
            else 1 + self.tau * self.scale(entropy).clamp(-1, 1)
        )

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Measure the entropies of a round."""
        if not len(table):
            return
        entropy = table.notes["entropy"][(table.ids["on_policy"] == 1).any(-1)]
        if (known := entropy[~entropy.isnan()]).numel():
            self.scale = EntropyScale.of(known, self.pivot)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": list(astuple(self.scale)) if self.scale else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scale."""
        self.scale = EntropyScale(*state["scale"]) if state["scale"] else None

    def _begin(self, rows: Sequence[GenerationRequest]) -> LogitsReader:
        return TemperedReader(self.engine.reader([row.encoded for row in rows]), self)


class TemperedReader:
    """Divides the logits of every row by a factor that depends on its entropy."""

    def __init__(self, reader: LogitsReader, settings: WithEntropyTemperature) -> None:
        self.reader, self.settings = reader, settings

    def read(self, token: Tensor | None) -> Tensor:
        """Read a token of every row, and return logits at its own temperature."""
        logits = self.reader.read(token)
        logp = (logits / (self.settings.engine.temperature or 1.0)).log_softmax(-1)
        entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)  # as `draw_tokens` notes it
        return logits / self.settings.factor(entropy)[:, None]

    def keep(self, rows: Tensor) -> None:
        """Continue with some rows."""
        self.reader.keep(rows)


@advantage
def group_normalize_by_step(
    table: RewardTable,
    *,
    by: Tags = ("group",),
    limit: NonNegativeFloat = 5.0,
    eps: NonNegativeFloat = 1e-6,
) -> RewardTable:
    """Normalise rewards by the mean and deviation over the steps of the group (HAPO, arXiv 2509.16591).

    Every step counts with the reward of its answer, so that long answers weigh more; the deviation divides by
    the number of steps. A group in which lengths are so uneven that an advantage has the size `limit` has
    those of `group_normalize` instead. The result is (N, R, T).

    Args:
        by: Keys that define a group.
        limit: Size of an advantage from which answers count alike.
        eps: Added to both deviations.
    """
    steps = group_normalize(per_step(table), by=by, std="population", eps=eps)
    answers = per_step(group_normalize(table, by=by, eps=eps))
    largest = GroupStatistics(steps.values.abs(), steps.valid, steps.index(by)).largest()
    return steps.put(torch.where(largest >= limit, answers.values, steps.values))


@advantage(notes={"entropy"})
def entropy_width(
    table: RewardTable,
    *,
    alpha: NonNegativeFloat = 1.0,
    beta: NonNegativeFloat = 1.0,
    pivot: Probability = 0.8,
) -> RewardTable:
    """Widen the upper clip range of steps of high entropy, the lower one of low (HAPO, arXiv 2509.16591).

    h = (log H - m) / s, where m is the `pivot` quantile of log H and s the root mean square distance to it,
    is divided by its largest value above 0 and by its largest size below. Above 0 the upper range grows by
    1 + alpha h, below the lower one by 1 + alpha |h|; `elastic_clip` also multiplies advantages by 1 + beta
    h, above 0 outside of half the ranges, below 0 inside. Our readings: entropies are those noted when
    sampling, over the collection, and the sign of low entropies is that of the paper, not of its code.

    Args:
        alpha: Growth of the clip range at the extremes.
        beta: Redistribution of advantages, 0 for none.
        pivot: Quantile (nearest rank) of entropy whose steps keep their range.
    """
    table = per_step(table)
    entropy = noted(table, "entropy")
    known = table.present & ~entropy.isnan()
    h = torch.zeros_like(entropy)
    if known.any():
        h = torch.where(known, EntropyScale.of(entropy[known], pivot)(entropy), 0.0)
    table = table.note("redistribution", 1 + beta * h).note("high_entropy", (h > 0).double())
    return table.note("clip_low", 1 + alpha * (-h).clamp(min=0)).note("clip_high", 1 + alpha * h.clamp(min=0))
