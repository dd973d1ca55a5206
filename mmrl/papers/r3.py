"""R3 (arXiv 2601.19620): prompts that went badly are asked again with one of their own answers.

Title: R^3: Replay, Reflection, and Ranking Rewards for LLM Reinforcement Learning
Formula: reflect where the mean of a prompt's remembered rewards is below `threshold`.
Our reading: the threshold, the texts, the window, and that the newest wrong answer is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import sampler
from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Prompt, Rollouts
from mmrl.data.hints import TAG, with_hint
from mmrl.samplers.answers import ReadsAnswers

TEMPLATES = {
    "wrong": "\n\nAn earlier answer to this was wrong:\n{answer}\nFind its mistake, and answer anew.",
    "best": "\n\nThe best answer to this so far:\n{answer}\nAnswer anew, and better.",
}


@dataclass
class Known:
    """What is remembered of a prompt: its newest rewards, and one answer with its reward."""

    rewards: list[float] = field(default_factory=list)
    answer: str = ""
    reward: float = math.nan  # NaN: no answer yet

    @property
    def mean(self) -> float:
        """The mean of the rewards."""
        return sum(self.rewards) / len(self.rewards)


@sampler(sets_tags={TAG})
class WithReflection(ReadsAnswers):
    """Ask prompts that went badly again with one of their own answers (ISR of R3).

    arXiv 2601.19620. A prompt whose remembered rewards have a mean below `threshold` is asked with a wrong
    answer of the last time and an instruction to find its mistake, or with the best answer so far as a
    hint. Our reading: the threshold, the texts, the window of rewards, and that the newest wrong answer is
    shown; a prompt that was never asked stays plain, which is the paper's first epoch. Ids stay, and answers
    have the id `hint`, so that the engine `vision.without_hints` and the advantages of hints know them.

    Args:
        sampler: The wrapped sampler.
        show: "wrong" shows the newest answer with a reward below `threshold`, "best" the best one so far.
        threshold: A prompt is asked with an answer where its mean reward is below this.
        window: Rewards of a prompt that are remembered, the newest.
        of: Name of the reward; empty: the weighted sum.
        template: Text after the question, with `{answer}`; empty: one that fits `show`.
        max_letters: Letters of an answer that are remembered.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        show: Literal["wrong", "best"] = "wrong",
        threshold: float = 0.5,
        window: PositiveInt = 16,
        of: str = "",
        template: str = "",
        max_letters: PositiveInt = 4000,
    ) -> None:
        template = template or TEMPLATES[show]
        if "{answer}" not in template:
            raise ConfigError(f"'template' must contain {{answer}}, not be {template!r}")
        self.sampler, self.show, self.threshold, self.window = sampler, show, threshold, window
        self.of, self.template, self.max_letters = of, template, max_letters
        self.known: dict[str, Known] = {}
        self.shown = 0

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw prompts, and show those that went badly one of their answers."""
        drawn = self.sampler.draw(num_prompts, num_generations)
        low = {prompt.uid for prompt in drawn if self._low(prompt.uid)}
        self.shown += len(low)
        return [self._reflecting(prompt) if prompt.uid in low else prompt for prompt in drawn]

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Remember rewards, and the answers that may be shown."""
        rewards = (table.at_end(self.of) if self.of else table.reward()).tolist()
        for uid, text, reward in zip(table.uids, self.texts(rollouts, table), rewards, strict=True):
            if math.isnan(reward):
                continue
            known = self.known.setdefault(uid, Known())
            known.rewards = [*known.rewards, reward][-self.window :]
            better = not known.reward >= reward  # NaN, too
            if reward < self.threshold if self.show == "wrong" else better:
                known.answer, known.reward = text[: self.max_letters], reward

    def tell(self) -> Mapping[str, float]:
        """Report how many prompts were shown an answer since the last report."""
        shown, self.shown = self.shown, 0
        return {"reflection/prompts": float(shown)}

    def beliefs(self) -> dict[str, dict[str, float]]:
        """Return the mean of the remembered rewards of every prompt that was asked."""
        return {uid: {"mean": known.mean} for uid, known in self.known.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return rewards and answers by prompt."""
        return {"known": {uid: asdict(known) for uid, known in self.known.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore rewards and answers."""
        self.known = {uid: Known(**known) for uid, known in state["known"].items()}

    def _low(self, uid: str) -> bool:
        known = self.known.get(uid)
        return known is not None and not math.isnan(known.reward) and known.mean < self.threshold

    def _reflecting(self, prompt: Prompt) -> Prompt:
        template = self.template.replace("{answer}", "{hint}")
        return with_hint(prompt, self.known[prompt.uid].answer, tag=self.show, template=template)
