"""XRPO (arXiv 2510.06672): failed prompts show solved examples, and rare right answers earn more.

Title: XRPO: Pushing the limits of GRPO with Targeted Exploration and Exploitation
Formula: x' = x + the k solved questions with the largest cosine similarity to x; novelty = 1 - exp(s - mean
s), s the mean log-probability of an answer.
Our reading: similarity of word counts, and that a prompt is asked again the next time it is drawn.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import row_mean
from mmrl.config.ranges import PositiveInt, Tags
from mmrl.config.registry import advantage, sampler
from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.types import Prompt, Rollouts
from mmrl.data.hints import TAG, with_hint
from mmrl.samplers.answers import ReadsAnswers

TEMPLATE = "\n\nSimilar questions, with right answers:\n{examples}"
SOLVED = "solved"  # the word of the tag `hint` of answers that saw examples


@dataclass(frozen=True)
class Example:
    """A question and a right answer to it, both shortened."""

    question: str
    answer: str


@sampler(sets_tags={TAG})
class WithSolvedExamples(ReadsAnswers):
    """Show prompts of which every answer failed similar ones with right answers (XRPO's seeding).

    arXiv 2510.06672. Answers are verified by their reward. Our readings: a prompt is asked with examples the
    next time that it is drawn, where the paper asks it again in the same step; questions are similar by the
    cosine of their counts of words, where the paper compares embeddings; examples follow the question. Ids
    stay, and answers have the id `hint`, so that the engine `vision.without_hints` and the advantages of
    hints know them.

    Args:
        sampler: The wrapped sampler.
        examples: Examples that a prompt is shown, the most similar first (the paper's K).
        threshold: A reward above it is that of a right answer.
        of: Name of the reward; empty: the weighted sum.
        capacity: Solved prompts that are remembered, the newest.
        max_letters: Letters of a question and of an answer that are shown.
        template: Text after the question, with `{examples}`.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        examples: PositiveInt = 2,
        threshold: float = 0.5,
        of: str = "",
        capacity: PositiveInt = 2048,
        max_letters: PositiveInt = 1000,
        template: str = TEMPLATE,
    ) -> None:
        if "{examples}" not in template:
            raise ConfigError(f"'template' must contain {{examples}}, not be {template!r}")
        self.sampler, self.examples, self.threshold, self.of = sampler, examples, threshold, of
        self.capacity, self.max_letters, self.template = capacity, max_letters, template
        self.solved: dict[str, Example] = {}  # by uid, the newest last
        self.failed: set[str] = set()  # uids of which every answer of the last time failed
        self.asked: dict[str, str] = {}  # the questions of this draw, without examples
        self.shown = 0

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw prompts; failed ones get solved examples."""
        drawn = self.sampler.draw(num_prompts, num_generations)
        self.asked = {prompt.uid: prompt.text for prompt in drawn}
        seeded = {uid: found for uid in self.asked if uid in self.failed and (found := self._similar(uid))}
        self.shown += len(seeded)
        return [_shown(prompt, seeded.get(prompt.uid, []), self.template) for prompt in drawn]

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Remember which prompts failed, and the first right answer to the others."""
        rewards = (table.at_end(self.of) if self.of else table.reward()).tolist()
        first: dict[str, str | None] = {}
        for uid, text, reward in zip(table.uids, self.texts(rollouts, table), rewards, strict=True):
            if uid in self.asked and not math.isnan(reward):
                right = text if reward > self.threshold else None
                first[uid] = right if first.get(uid) is None else first[uid]
        for uid, answer in first.items():
            if answer is None:
                self.failed.add(uid)
                continue
            self.failed.discard(uid)
            self.solved.pop(uid, None)
            self.solved[uid] = Example(self.asked[uid][: self.max_letters], answer[: self.max_letters])
        self.solved = dict(list(self.solved.items())[-self.capacity :])

    def pop_metrics(self) -> Mapping[str, float]:
        """Report how many prompts were shown examples since the last report, and how many are solved."""
        shown, self.shown = self.shown, 0
        return {"examples/prompts": float(shown), "examples/solved": float(len(self.solved))}

    def state_dict(self) -> dict[str, Any]:
        """Return solved and failed prompts."""
        solved = {uid: asdict(example) for uid, example in self.solved.items()}
        return {"solved": solved, "failed": sorted(self.failed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore solved and failed prompts."""
        self.solved = {uid: Example(**example) for uid, example in state["solved"].items()}
        self.failed = set(state["failed"])

    def _similar(self, uid: str) -> list[Example]:
        """Find the solved prompts that are most like a prompt; of equals the newest."""
        question = self.asked[uid]
        others = [example for known, example in self.solved.items() if known != uid][::-1]
        return sorted(others, key=lambda example: -similarity(question, example.question))[: self.examples]


def similarity(one: str, other: str) -> float:
    """Return the cosine of the counts of words of two texts; 0 for a text without any."""
    a, b = (Counter(re.findall(r"\w+", text.lower())) for text in (one, other))
    norm = math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
    return sum(n * b[word] for word, n in a.items()) / norm if norm else 0.0


def _shown(prompt: Prompt, examples: list[Example], template: str) -> Prompt:
    if not examples:
        return prompt
    text = "\n".join(f"{example.question}\n{example.answer}" for example in examples)
    return with_hint(prompt, text, tag=SOLVED, template=template.replace("{examples}", "{hint}"))


@advantage(notes={"logp"})
def novelty(table: RewardTable, *, by: Tags = BY_GROUP) -> RewardTable:
    """Record how much less likely than its group an answer was, as the label `novelty` (arXiv 2510.06672).

    1 - exp(s - mean s), where s is the mean log-probability of an answer's tokens: above 0 for rare ones.
    Values stay; put `{name: capped_bonus, of: novelty}` after it (XRPO). Without noted log-probabilities
    (demonstrations) there is no label.
    """
    logp = row_mean(table, "logp")[:, None, None].expand(table.present[:, None].shape)
    known = table.present[:, None] & ~logp.isnan()
    relative = logp - GroupStatistics(logp, known, table.index(by)).mean()
    found = torch.where(known, 1 - relative.clamp(max=20).exp(), torch.nan)[:, 0]
    return table.replace(scored={**table.scored, "novelty": found})
