"""SPO tree (arXiv 2505.23564): answers to a prompt part from each other in a tree.

Title: Segment Policy Optimization: Effective Segment-Level Credit Assignment in RL for Large Language
Models
Formula: V(node) = mean reward of the leaves below; A(part) = V(its end) - V(its start), by `tree_values`.
Our reading: none in this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from math import prod
from typing import Annotated, ClassVar

import torch

from mmrl.config.ranges import DividesGenerations, NonNegativeInt, PositiveInt
from mmrl.config.registry import engine
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.branching import Branch, Grown
from mmrl.vision.engines.generate import Generate


@engine(scope="vision", sets_tags={"branch"})
@dataclass(eq=False)
class WithBranches:
    """Sample the answers to a prompt as a tree of continuations (SPO, arXiv 2505.23564).

    Every leaf is a row with all of its tokens. Shared tokens are sampled once, and the note `node` tells of
    every token which part of the tree it belongs to: equal numbers in rows of one prompt are the same tokens,
    which `tree_values` credits once. The tag `branch` tells which state a row's last part starts from. A part
    that ends its answer has no continuations, so that there can be fewer rows than were asked for.
    Evaluations get answers of the wrapped engine, `vision.generate`, whose settings hold.

    Args:
        engine: The wrapped engine.
        branching: Continuations of every part, after the first part, after the second and so on. The answers
            to a prompt must be a multiple of their product; so many parts start from the prompt.
        segment_length: Tokens of a part; the last one has no limit but that of the answer.
        batch_size: The most rows at once, as whole trees; 0: that of the wrapped engine.
    """

    engine: Generate
    _: KW_ONLY
    stream: Stream
    branching: Annotated[tuple[PositiveInt, ...], DividesGenerations()] = (6, 6)
    segment_length: PositiveInt = 600
    batch_size: NonNegativeInt = 0
    notes: ClassVar[frozenset[str]] = frozenset({"node"})
    instead: ClassVar[str] = (
        "conversations with tools part at their turns with `vision.with_turn_branches`, which takes the "
        "place of `vision.with_tools`"
    )

    def __post_init__(self) -> None:
        self.policy = self.engine.policy
        longest, last = self.engine.max_completion_length, self.segment_length * len(self.branching)
        if last >= longest:
            raise ValueError(
                f"`vision.with_branches` parts answers after {last} tokens at last ({len(self.branching)} "
                f"times `segment_length` {self.segment_length}), but they end after {longest}; set "
                "`max_completion_length` of `vision.generate` higher, or `segment_length` lower"
            )

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every prompt with a tree that has as many leaves as the prompt has entries."""
        if self.stream.purpose != "train":
            return self.engine.rollout(prompts)
        branches: list[Branch] = []
        trees: list[tuple[Prompt, range]] = []
        distinct = {prompt.uid: prompt for prompt in prompts}
        for uid, number in Counter(prompt.uid for prompt in prompts).items():
            first = len(branches)
            branches += self._tree(distinct[uid], number, first)
            trees.append((distinct[uid], range(first, len(branches))))
        grown = self.engine.grow(branches, batch_size=self.batch_size)
        return tuple(
            self._row(prompt, number, first=members[0], branches=branches, grown=grown)
            for prompt, members in trees
            for number in _leaves(branches, grown, members)
        )

    def _tree(self, prompt: Prompt, number: int, first: int) -> list[Branch]:
        """Lay out the tree of a prompt, whose first part is branch number `first`: level after level."""
        roots, rest = divmod(number, prod(self.branching))
        if rest:
            raise ValueError(
                f"`vision.with_branches` makes multiples of {prod(self.branching)} answers (the product of "
                f"`branching`), but {number} were asked for prompt '{prompt.uid}'; set `num_generations` to "
                f"{(roots + 1) * prod(self.branching)}"
            )
        encoded = self.policy.prompt_encoder.encode(prompt)
        tree: list[Branch] = []
        level: list[int | None] = [None]
        for depth, children in enumerate((roots, *self.branching)):
            start = depth * self.segment_length
            room = self.engine.max_completion_length - start
            if depth < len(self.branching):
                room = self.segment_length
            parents, level = level, []
            for parent in parents:
                for _ in range(children):
                    generator = self.stream.generator("branch", prompt.uid, len(tree))
                    level.append(first + len(tree))
                    uniform = torch.rand(room, generator=generator)
                    tree.append(Branch(encoded, uniform, parent=parent, start=start))
        return tree

    def _row(
        self,
        prompt: Prompt,
        number: int,
        *,
        first: int,
        branches: Sequence[Branch],
        grown: Sequence[Grown | None],
    ) -> Trajectory:
        """Make the row of a leaf; parts of the tree are numbered from 0."""
        made, branch = grown[number], branches[number]
        assert made is not None  # a leaf has grown
        node = torch.full((len(made.ids),), float(number - first))
        state, parent = "start" if branch.parent is None else str(branch.parent - first), branch.parent
        while parent is not None:
            node[: branch.start] = float(parent - first)
            branch = branches[parent]
            parent = branch.parent
        notes = {"token": made.ids, "logp": made.logp, "entropy": made.entropy, "node": node}
        row = self.engine.row(prompt, branches[number].encoded, notes, made.stopped)
        answer = row.outcomes[-1]
        return replace(row, outcomes=(replace(answer, tags={**answer.tags, "branch": state}),))


def _leaves(branches: Sequence[Branch], grown: Sequence[Grown | None], members: range) -> list[int]:
    """List the branches of a tree that have grown, and have no continuation that has."""
    inner = {branches[i].parent for i in members if grown[i] is not None}
    return [i for i in members if grown[i] is not None and i not in inner]
