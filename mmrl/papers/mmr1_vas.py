"""VAS of MMR1 (arXiv 2509.21268): sample prompts by variance of rewards and diversity of answers.

Title: MMR1: Enhancing Multimodal Reasoning with Variance-Aware Sampling and Open Resources
Formula: score = variance_weight p (1 - p) + diversity_weight d, scaled to [0, 1] over the data.
Our reading: diversity is 1 - self-BLEU; scores are those of a prompt's last group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import torch

from mmrl.config.ranges import NonNegativeFloat, PositiveInt, Probability, ShareBelowOne
from mmrl.config.registry import sampler
from mmrl.core.edit_distance import levenshtein
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts
from mmrl.samplers.candidates import Candidates, evenness, reward_of

EPSILON = 1e-8  # of the min-max normalisation, as in the code


@sampler(notes={"token"})
class VarianceAware:
    """Mix uniform prompts with prompts whose rewards and answers vary (MMR1's VAS, arXiv 2509.21268).

    The score of a prompt is variance_weight p(1 - p) + diversity_weight d: p its pass rate, d the diversity
    of its answers. Scores are scaled to [0, 1] over the data and become the weights of a part of each draw;
    the rest is uniform. Our readings: diversity is 1 - self-BLEU (the code weighs self-BLEU itself, which
    favours groups that are alike); no prompt comes twice in a draw; a prompt without a score weighs as the
    mean of the others; where all weights are equal, draws are uniform.

    With `refresh: running`, our reading and the default, a score is that of the prompt's last group, so
    scores cost nothing, and every `update_steps` steps they become weights. With `refresh: full`, the
    paper's, the first draw of every `update_steps` steps is the whole data, whose rollouts alone are scored.
    The step learns from them like from any others; with `learn.num_iterations: 0` it only observes.

    Args:
        of: Name of the reward that tells how far a rollout passed, by its part in [0, 1]; "": the
            weighted sum.
        variance_weight: Weight of p(1 - p), the outcome variance (the paper's alpha).
        diversity_weight: Weight of the diversity (beta).
        diversity: How the answers to a prompt differ: `1-self_bleu_123`, `distinct_3` (distinct 3-grams over
            all), or `edit_distance` (mean over pairs, divided by the longer answer). All are in [0, 1].
        weighted_share: Share of a draw that is weighted, rounded down (lambda).
        momentum: Share of the old weights in the new ones.
        update_steps: Steps from one set of weights to the next (the paper's T, 28 to 56; its code 4).
        refresh: What scores are made from.
    """

    def __init__(
        self,
        data: Sequence[Prompt],
        *,
        stream: Stream,
        of: str = "",
        variance_weight: NonNegativeFloat = 0.8,
        diversity_weight: NonNegativeFloat = 0.2,
        diversity: Literal["1-self_bleu_123", "distinct_3", "edit_distance"] = "1-self_bleu_123",
        weighted_share: Probability = 0.5,
        momentum: ShareBelowOne = 0.0,
        update_steps: PositiveInt = 4,
        refresh: Literal["running", "full"] = "running",
    ) -> None:
        if not variance_weight and not diversity_weight:
            raise ValueError("`variance_weight` and `diversity_weight` are both 0, so no prompt has a score")
        self.of, self.diversity = of, DIVERSITY[diversity]
        self.variance_weight, self.diversity_weight = variance_weight, diversity_weight
        self.weighted_share, self.momentum = weighted_share, momentum
        self.update_steps, self.full = update_steps, refresh == "full"
        self.stream, self.candidates = stream, Candidates(data, stream)
        unknown = torch.full((len(data),), torch.nan, dtype=torch.float64)
        self.scores, self.pass_rate, self.weights = unknown, unknown.clone(), torch.zeros_like(unknown)
        self.steps = 0  # that were drawn
        self.walked = 0  # prompts of the uniform part
        self.measuring = False  # whether the current draw is a full pass

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw the weighted part, then the uniform one, `num_generations` entries each; no prompt twice."""
        if self.candidates.begins():
            due = self.steps % self.update_steps == 0
            if due and not self.full:
                self._weigh()
            self.measuring = due and self.full
            self.steps += 1
            if self.measuring:
                every = self.candidates.highest(torch.zeros(len(self.weights)), len(self.weights), "full")
                return self.candidates.prompts(sorted(every), num_generations)
        self.measuring = False
        num = min(num_prompts, len(self.weights))
        chosen = []
        if (self.weights > 0).any():
            part = int(round(num * self.weighted_share, 9))  # 0.29 * 100 is 28.999999999999996
            weighted = min(part, int((self.weights > 0).sum()))
            chosen = self.candidates.weighted(self.weights, weighted, "variance_aware")
        chosen += self._uniform(num - len(chosen))
        return self.candidates.prompts(chosen, num_generations)

    def _uniform(self, num: int) -> list[int]:
        """Take the next places of a fixed permutation, which begins anew at its end."""
        order = torch.randperm(len(self.weights), generator=self.stream.fixed("variance_aware"))
        turn = torch.empty_like(order)
        turn[order] = (torch.arange(len(order)) - self.walked) % len(order)
        chosen = self.candidates.highest(-turn.double(), num, "uniform")
        if chosen:  # up to the last of them; prompts that were asked in this step are passed over
            self.walked = (self.walked + int(turn[chosen].max()) + 1) % len(order)
        return chosen

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Score the prompts of a round."""
        if self.full and not self.measuring:
            return
        reward = reward_of(table, self.of)
        tokens = table.notes["token"]
        for place, rows in self.candidates.rows(table, ~reward.isnan()).items():
            rate = float(reward[rows].clamp(0.0, 1.0).mean())
            answers = [row[~row.isnan()].long().tolist() for row in tokens[rows]]
            varies = self.diversity(answers) if self.diversity_weight else 0.0
            self.pass_rate[place] = rate
            self.scores[place] = self.variance_weight * rate * (1 - rate) + self.diversity_weight * varies
        if self.full:
            self._weigh()

    def _weigh(self) -> None:
        """Turn scores into weights."""
        known = ~self.scores.isnan()
        if not known.any():
            return
        low, high = self.scores[known].min(), self.scores[known].max()
        weights = (self.scores - low) / (high - low + EPSILON)
        weights = torch.where(known, weights, weights[known].mean())
        # The first weights have no older ones to be mixed with.
        momentum = self.momentum if (self.weights > 0).any() else 0.0
        self.weights = momentum * self.weights + (1 - momentum) * weights

    def pop_metrics(self) -> Mapping[str, float]:
        """Report how much of the data has a score, how high scores are, and how even the weights."""
        known = ~self.scores.isnan()
        return {
            "sampler/seen": float(known.double().mean()),
            "sampler/score": float(self.scores[known].mean()) if known.any() else 0.0,
            "sampler/entropy": evenness(self.weights),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return scores and weights (M,), and the counters."""
        columns = {name: getattr(self, name) for name in ("scores", "pass_rate", "weights")}
        return {**columns, "steps": self.steps, "walked": self.walked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore scores, weights and counters."""
        for name in ("scores", "pass_rate", "weights"):
            setattr(self, name, self.candidates.fitting(state[name]))
        self.steps, self.walked = state["steps"], state["walked"]


Tokens = Sequence[int]
SMOOTHING = 0.1  # of n-gram precisions that are 0: method 1 of Chen and Cherry, with NLTK's epsilon


def ngrams(tokens: Tokens, size: int) -> list[tuple[int, ...]]:
    """List the n-grams of an answer."""
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


def distinct_3(answers: Sequence[Tokens]) -> float:
    """Compute the share of distinct 3-grams among all; 0 without any."""
    listed = [gram for answer in answers for gram in ngrams(answer, 3)]
    return len(set(listed)) / len(listed) if listed else 0.0


def self_bleu_123(answers: Sequence[Tokens]) -> float:
    """Average the BLEU of each answer against all others, of 1- to 3-grams; 0 for fewer than two answers.

    Precisions of 0 are smoothed as NLTK's method 1; an answer that shares no token with another has BLEU 0.
    """
    if len(answers) < 2:
        return 0.0
    log_bleu = [0.0] * len(answers)
    for size in (1, 2, 3):
        counts = [Counter(ngrams(answer, size)) for answer in answers]
        # The two largest counts of every n-gram: the most among the others is the second for who has most.
        most: dict[tuple[int, ...], tuple[int, int]] = {}
        for counted in counts:
            for gram, count in counted.items():
                first, second = most.get(gram, (0, 0))
                most[gram] = (max(first, count), max(second, min(first, count)))
        for i, counted in enumerate(counts):
            matches = sum(
                min(count, most[gram][1] if count == most[gram][0] else most[gram][0])
                for gram, count in counted.items()
            )
            if matches == 0 and size == 1:
                log_bleu[i] = -math.inf
            log_bleu[i] += math.log((matches or SMOOTHING) / max(1, counted.total())) / 3
    lengths = [len(answer) for answer in answers]
    for i, length in enumerate(lengths):
        others = lengths[:i] + lengths[i + 1 :]
        closest = min(others, key=lambda other: (abs(other - length), other))
        if 0 < length <= closest:  # the brevity penalty
            log_bleu[i] += 1 - closest / length
    return sum(map(math.exp, log_bleu)) / len(answers)


def one_minus_self_bleu_123(answers: Sequence[Tokens]) -> float:
    """Compute 1 - `self_bleu_123`: 0 where all answers are alike; fewer than two have no diversity, 0."""
    return 1.0 - self_bleu_123(answers) if len(answers) > 1 else 0.0


def edit_distance(answers: Sequence[Tokens]) -> float:
    """Average the edit distance of all pairs over the length of the longer; 0 for fewer than two answers.

    Our reading: the source does not divide by the length.
    """
    pairs = list(combinations(answers, 2))
    if not pairs:
        return 0.0
    return sum(levenshtein(a, b) / max(len(a), len(b), 1) for a, b in pairs) / len(pairs)


DIVERSITY: dict[str, Callable[[Sequence[Tokens]], float]] = {
    "1-self_bleu_123": one_minus_self_bleu_123,
    "distinct_3": distinct_3,
    "edit_distance": edit_distance,
}
