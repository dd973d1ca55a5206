"""S-GRPO (arXiv 2505.07686): one chain of thought with answers from several early exits.

Title: S-GRPO: Early Exit via Reinforcement Learning in Reasoning Models
Formula: exits at uniform places t_1 < ... < t_m; y_i ~ p(. | x, y_(<t_i), exit text); the c-th right
one earns r / 2^(c - 1).
Our reading: how many exits there are, and their text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Tags
from mmrl.config.registry import advantage, engine
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import CHANGED, Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.branching import Branch, Grown
from mmrl.vision.decoding.continuing import ContinuingEngine


@engine(scope="vision", sets_tags={CHANGED})
@dataclass(eq=False)
class WithExits:
    """Answer a prompt once, and answer again from earlier exits of that answer (S-GRPO, arXiv 2505.07686).

    Of the entries of a prompt one is the whole answer, which comes last; each other one stops at a place of
    it, reads the exit text and answers. Places are drawn uniformly and differ, so that an answer with fewer
    tokens than entries gives fewer rows; rows are in the order of places, as `serial_decay` wants them.
    Tokens of the exit text are not learned; `with_replay` and its relatives remember no exits, only whole
    answers. Evaluations get answers of the wrapped engine, `vision.generate` or `vision.vllm`.

    Args:
        engine: The wrapped engine.
        exit_text: Text after which an exit answers; that of a model that thinks in tags ends with `</think>`.
        max_exit_length: The most tokens of an answer after the exit text.
        batch_size: The most rows at once, as whole groups; 0: that of the wrapped engine.
    """

    engine: ContinuingEngine
    _: KW_ONLY
    stream: Stream
    exit_text: str = "\n\nTime is up. The final answer is"
    max_exit_length: PositiveInt = 64
    batch_size: NonNegativeInt = 0
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every prompt once, and from as many exits as it has further entries."""
        if self.stream.purpose != "train":
            return self.engine.rollout(prompts)
        counts = Counter(prompt.uid for prompt in prompts)
        distinct = {prompt.uid: prompt for prompt in prompts}
        chains = self.engine.rollout(list(distinct.values()))
        text = self.policy.prompt_encoder.answer(self.exit_text)[:-1]
        branches: list[Branch] = []
        exits: list[list[int]] = []  # numbers of the branches of every chain
        for chain in chains:
            places = self._places(chain, counts[chain.prompt.uid] - 1)
            first = len(branches)
            if places:
                prompt, read = chain.steps.prompt, chain.steps.ids[: places[-1]]
                branches.append(Branch(prompt, torch.zeros(0), read, scored=False))
                for place in places:
                    generator = self.stream.generator("exit", chain.prompt.uid, place)
                    uniform = torch.rand(self.max_exit_length, generator=generator)
                    branches.append(Branch(prompt, uniform, text, first, place, scored=False))
            exits.append(list(range(first + 1, len(branches))))
        grown = self.engine.grow(branches, batch_size=self.batch_size)
        rows: list[Trajectory] = []
        for chain, numbers in zip(chains, exits, strict=True):
            for number in numbers:
                made = grown[number]
                assert made is not None  # what it starts with holds no end token
                rows.append(self._row(chain, made, branches[number].start, len(text)))
            rows.append(chain)
        return tuple(rows)

    def _places(self, chain: Trajectory, number: int) -> list[int]:
        """Draw the numbers of tokens of an answer that its exits have, in order."""
        generator = self.stream.generator("exits", chain.prompt.uid)
        drawn = torch.randperm(chain.length - 1, generator=generator)[:number] + 1
        return sorted(drawn.tolist())

    def _row(self, chain: Trajectory, made: Grown, place: int, text: int) -> Trajectory:
        """Make the row of an exit: tokens of the whole answer keep their notes, the text has none."""

        def joined(noted: Tensor, after: Tensor) -> Tensor:
            unknown = after.new_full((text,), torch.nan)
            return torch.cat([noted[:place].to(after), unknown, after[place + text :]])

        after = {name: note for name, note in made.notes.items() if name != "token"}
        notes = {"token": made.ids} | {name: joined(chain.notes[name], after[name]) for name in after}
        chosen = torch.ones_like(made.ids, dtype=torch.bool)
        chosen[place : place + text] = False
        row = self.engine.row(chain.prompt, chain.steps.prompt, notes, made.stopped, chosen)
        # A replayed row is made from its tokens alone, so the exit text would count as the policy's own.
        (outcome,) = row.outcomes
        return replace(row, outcomes=(replace(outcome, tags={**outcome.tags, CHANGED: "yes"}),))


@advantage
def serial_decay(table: RewardTable, *, by: Tags = BY_GROUP, base: PositiveFloat = 2.0) -> RewardTable:
    """Divide the reward of the c-th right answer of a group by 2^(c - 1) (S-GRPO, arXiv 2505.07686).

    For answers from successive cuts of one chain of thought, in the order of rows: earlier right exits earn
    more. An answer is right where its reward is not 0. With `by: [row]` the order is that of a row's
    outcomes. Put it after `total`, before `group_center`.
    """
    groups = table.groups(by)
    right = table.valid & (table.values.abs() > EQUAL)
    order = torch.arange(table.ends.numel(), dtype=torch.float64).view(table.ends.shape)[:, None]
    before = GroupStatistics(order.expand_as(table.values), right, groups.index).rank()
    return table.put(torch.where(right, table.values * base ** -before.double(), 0.0))
