"""VADE (arXiv 2511.18902): Thompson sampling of prompts by a running estimate of their pass rate.

Title: VADE: Variance-Aware Dynamic Sampling via Online Sample-Level Difficulty Estimation for Multimodal RL
Formula: p ~ Beta(alpha + 1, beta + 1); prompts with the highest p (1 - p)^2; counts decay.
Our reading: beliefs start uniform; prompts of this step are drawn again only where there are no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, Probability
from mmrl.config.registry import sampler
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts
from mmrl.samplers.candidates import Candidates, evenness, reward_of

NEGLIGIBLE = 1e-12  # pseudo-counts below are 0


@sampler
class Vade:
    """Draw the prompts with the most informative estimated pass rates (VADE, arXiv 2511.18902).

    Every prompt has a Beta(alpha + 1, beta + 1) belief about its pass rate p. A draw samples p for each
    prompt and takes those with the highest score. Counts of passed and failed rollouts are added to alpha and
    beta, which decay, so that a belief follows a policy that learns. There is no epoch: any prompt may come
    at any step. Our readings: all beliefs start uniform; a reward counts as a pass by its part in [0, 1];
    prompts that were drawn in this step are drawn again only where there are no others; a prompt without any
    known reward counts as not drawn.

    Args:
        of: Name of the reward that tells how far a rollout passed; "": the weighted sum.
        score: Value of a pass rate. `p(1-p)^2`, the paper's, is highest at 1/3, `p(1-p)` at 1/2.
        thompson: Score a sample of each belief; false: its mean (the paper's ablation).
        decay_drawn: Factor of the old counts of a prompt that was drawn (the paper's lambda 1).
        decay_others: Factor of the counts of all other prompts, per step (lambda 2).
        init_pass_rate: Pass rate that is assumed of every prompt at first; null: none, Beta(1, 1).
        init_count: Rollouts that are assumed to have had that rate.
        binarize: Count a reward of 0.5 or more as a pass, and any other as none.
    """

    def __init__(
        self,
        data: Sequence[Prompt],
        *,
        stream: Stream,
        of: str = "",
        score: Literal["p(1-p)^2", "p(1-p)"] = "p(1-p)^2",
        thompson: bool = True,
        decay_drawn: Probability = 0.2,
        decay_others: Probability = 0.999,
        init_pass_rate: Probability | None = None,
        init_count: NonNegativeFloat = 8.0,
        binarize: bool = False,
    ) -> None:
        self.of, self.power, self.thompson = of, 2 if score == "p(1-p)^2" else 1, thompson
        self.decay_drawn, self.decay_others, self.binarize = decay_drawn, decay_others, binarize
        self.stream, self.candidates = stream, Candidates(data, stream)
        rate, count = (0.0, 0.0) if init_pass_rate is None else (init_pass_rate, init_count)
        self.passed = torch.full((len(data),), rate * count, dtype=torch.float64)  # alpha
        self.failed = torch.full((len(data),), (1 - rate) * count, dtype=torch.float64)  # beta
        self.updated = torch.ones(len(data), dtype=torch.bool)  # in this step; others decay at its end
        self.seen = torch.zeros(len(data), dtype=torch.bool)

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw the prompts with the highest scores, `num_generations` entries each; none twice."""
        if self.candidates.begins():
            self._decay()
        rate = self._sampled() if self.thompson else self.pass_rate
        chosen = self.candidates.highest(self.information(rate), num_prompts, "vade")
        return self.candidates.prompts(chosen, num_generations)

    @property
    def pass_rate(self) -> Tensor:
        """The mean of every belief: (M,)."""
        return (self.passed + 1) / (self.passed + self.failed + 2)

    def information(self, rate: Tensor) -> Tensor:
        """Score pass rates (M,)."""
        return rate * (1 - rate) ** self.power

    def _sampled(self) -> Tensor:
        # Distributions draw from the global stream, which is put back afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.stream.generator("vade").initial_seed())
            return torch.distributions.Beta(self.passed + 1, self.failed + 1).sample()

    def _decay(self) -> None:
        """Let the counts of the prompts decay that the step before did not update."""
        for counts in (self.passed, self.failed):
            counts[~self.updated] *= self.decay_others
            counts[counts < NEGLIGIBLE] = 0.0
        self.updated.zero_()

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Count passed and failed rollouts of every prompt."""
        reward = reward_of(table, self.of)
        passed = (reward >= 0.5).double() if self.binarize else reward.clamp(0.0, 1.0)
        for place, rows in self.candidates.rows(table, ~reward.isnan()).items():
            count = float(passed[rows].sum())
            # A prompt that two rounds of a step asked has one group of all their rollouts.
            decay = 1.0 if self.updated[place] else self.decay_drawn
            self.passed[place] = decay * self.passed[place] + count
            self.failed[place] = decay * self.failed[place] + (len(rows) - count)
            self.updated[place] = self.seen[place] = True

    def pop_metrics(self) -> Mapping[str, float]:
        """Report the share of the data drawn so far, the mean pass rate, and the entropy of the weights."""
        weights = self.information(self.pass_rate)
        return {
            "sampler/seen": float(self.seen.double().mean()),
            "sampler/pass_rate": float(self.pass_rate.mean()),
            "sampler/entropy": evenness(weights),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts (M,)."""
        return {"passed": self.passed, "failed": self.failed, "updated": self.updated, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        for name in ("passed", "failed", "updated", "seen"):
            setattr(self, name, self.candidates.fitting(state[name]))
