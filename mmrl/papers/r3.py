"""R3 (arXiv 2601.19620): replay, reflection on wrong answers, and entropy ranks for cut answers.

Title: R^3: Replay, Reflection, and Ranking Rewards for LLM Reinforcement Learning
Formula: reflect where the mean of a prompt's remembered rewards is below `threshold`; add stored answers of
the other kind to groups that are all right or all wrong; r = max_reward (1 - rank / (n - 1)) by entropies.
Our reading: the threshold, the texts, the window, that the newest wrong answer is shown, and
what ties and single answers earn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.config.ranges import NonNegativeFloat, PositiveInt, Probability, Tags
from mmrl.config.registry import advantage, engine, sampler
from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Engine, Sampler
from mmrl.core.reward_table import EQUAL, Collection, GroupStatistics, RewardTable, name_id
from mmrl.core.rng import Stream
from mmrl.core.types import CHANGED, Prompt, Rollouts
from mmrl.data.hints import TAG, with_hint
from mmrl.engines.replay import MAX_BYTES, RECALLED, REPLAY, ByPrompt, among
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
        """Draw prompts; those with low rewards get one of their wrong answers to reflect on."""
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

    def pop_metrics(self) -> Mapping[str, float]:
        """Report how many prompts were shown an answer since the last report."""
        shown, self.shown = self.shown, 0
        return {"reflection/prompts": float(shown)}

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


@advantage(notes={"entropy"})
def entropy_rank(
    table: RewardTable,
    *,
    of: str,
    max_reward: NonNegativeFloat = 0.1,
    share: Probability = 0.2,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Grade cut answers of groups without a right one by their entropies (SERR of R3, arXiv 2601.19620).

    One answer beats another whose peak entropy is lower and whose mean entropy is higher. Answers are
    ordered by how many they beat: the first earns `max_reward`, the last 0, those between at equal
    distances. The grade is added to all rewards of the chain; put it after `total`. Our readings: answers
    that beat equally many share their mean rank, and one alone earns nothing.

    Args:
        of: Name of the reward that is 0 for every wrong answer.
        max_reward: Grade of the first, in units of reward; below that of a right answer.
        share: Share of an answer's steps whose largest entropies make its peak, at least one step.
        by: Keys that define a group.
    """
    index, success = table.index(by), label(table, of)
    failed = GroupStatistics(success, ~success.isnan(), index).largest() <= EQUAL
    cut = (
        (table.ids["finish"] == name_id("length"))[:, None]
        if "finish" in table.ids
        else table.present[:, None]
    )
    entropy = table.notes["entropy"]
    ranked = failed & cut & table.present[:, None] & ~entropy.isnan().all(-1)[:, None, None]
    sizes = (share * (~entropy.isnan()).sum(-1).double() + 1e-9).long().clamp(min=1)
    ordered = entropy.nan_to_num(nan=-1.0).sort(-1, descending=True).values
    inside = torch.arange(entropy.shape[1]) < sizes[:, None]
    peak = torch.where(inside, ordered, 0.0).sum(-1) / sizes
    overall = entropy.nanmean(-1)
    grade = torch.zeros_like(success)
    for group in index[ranked[:, 0]].unique():
        rows, places = (ranked[:, 0] & (index == group)).nonzero(as_tuple=True)
        beats = (peak[rows, None] > peak[rows]) & (overall[rows, None] < overall[rows])
        wins = beats.sum(1)
        # Mean of the first and the last rank of a tie: the answers with more wins come before.
        rank = (wins > wins[:, None]).sum(1) + ((wins == wins[:, None]).sum(1).double() - 1) / 2
        if len(rows) > 1:
            grade[rows, 0, places] = max_reward * (1 - rank.double() / (len(rows) - 1))
    return table.put(table.values + grade)


@engine(notes=RECALLED, sets_tags={REPLAY, CHANGED})
class WithContrast(ByPrompt):
    """Add stored right answers to groups that are all wrong, and vice versa (R3, arXiv 2601.19620).

    Statistics of the group are over all of them. Numbers are our reading: the paper names none.

    Args:
        engine: The engine that samples.
        of: Reward that tells right from wrong; "": the weighted sum of all.
        above: An answer with more than this is right.
        per_group: Stored answers that join a group.
        capacity: Right, and wrong, answers that are stored of every prompt.
        learn_from_replay: Learn from stored answers too, not only compare with them.
        max_bytes: Largest size of the stored conversations with their media; the oldest are dropped first.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stream: Stream,
        train_prompts: Sequence[Prompt] = (),
        of: str = "",
        above: float = 0.5,
        per_group: PositiveInt = 2,
        capacity: PositiveInt = 4,
        learn_from_replay: bool = False,
        max_bytes: PositiveInt = MAX_BYTES,
    ) -> None:
        super().__init__(engine, stream, train_prompts, of, above, capacity, max_bytes)
        self.per_group, self.learn_from_replay = per_group, learn_from_replay

    def replay_before(self, collection: Collection) -> tuple[Tensor, RewardTable]:
        """Return that all rows stay (N,), and the stored rows that join them."""
        table = collection.table
        right, drawn = self.right(table), [torch.zeros(0, dtype=torch.int64)]
        for uid in dict.fromkeys(table.uids):
            of_group = right[among(table.uids, [uid])]
            if of_group.all() or not of_group.any():
                drawn.append(self.draw(uid, not of_group[0], self.per_group))
        (back,) = self.bring_back(torch.cat(drawn))
        self.store(collection, torch.ones(len(table), dtype=torch.bool))
        back = back.replace(learn=back.learn & self.learn_from_replay)
        return torch.ones(len(table), dtype=torch.bool), back
