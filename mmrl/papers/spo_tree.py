"""SPO tree (arXiv 2505.23564): answers branch in a tree, and each part earns its change in value.

Title: Segment Policy Optimization: Effective Segment-Level Credit Assignment in RL for Large Language
Models
Formula: V(node) = mean reward of the leaves below; A(part) = V(its end) - V(its start), by `tree_values`.
Our reading: none in this file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from math import prod
from typing import Annotated, ClassVar, Literal

import torch

from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.advantages.trees import Node, leaf_of, parts_of
from mmrl.config.ranges import DividesGenerations, NonNegativeFloat, NonNegativeInt, PositiveInt
from mmrl.config.registry import advantage, engine
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.branching import Branch, Grown
from mmrl.vision.decoding.continuing import ContinuingEngine


@engine(scope="vision", sets_tags={"branch"})
@dataclass(eq=False)
class WithBranches:
    """Sample the answers to a prompt as a tree of continuations (SPO, arXiv 2505.23564).

    Every leaf is a row with all of its tokens. Shared tokens are sampled once, and the note `node` tells of
    every token which part of the tree it belongs to: equal numbers in rows of one prompt are the same tokens,
    which `tree_values` credits once. The tag `branch` tells which state a row's last part starts from. A part
    that ends its answer has no continuations, so that there can be fewer rows than were asked for.
    Evaluations get answers of the wrapped engine, `vision.generate` or `vision.vllm`, whose settings hold.

    Args:
        engine: The wrapped engine.
        branching: Continuations of every part, after the first part, after the second and so on. The answers
            to a prompt must be a multiple of their product; so many parts start from the prompt.
        segment_length: Tokens of a part; the last one has no limit but that of the answer.
        batch_size: The most rows at once, as whole trees; 0: that of the wrapped engine.
    """

    engine: ContinuingEngine
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
                "`max_completion_length` of the wrapped engine higher, or `segment_length` lower"
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
        """List the branches of a prompt's tree level by level, numbered from `first`."""
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
        notes = {**made.notes, "node": node}
        row = self.engine.row(prompt, branches[number].encoded, notes, made.stopped)
        answer = row.outcomes[-1]
        return replace(row, outcomes=(replace(answer, tags={**answer.tags, "branch": state}),))


def _leaves(branches: Sequence[Branch], grown: Sequence[Grown | None], members: range) -> list[int]:
    """List the branches of a tree that have grown, and have no continuation that has."""
    inner = {branches[i].parent for i in members if grown[i] is not None}
    return [i for i in members if grown[i] is not None and i not in inner]


@advantage(notes={"node"})
def tree_values(
    table: RewardTable, *, scale: Literal["none", "siblings"] = "none", eps: NonNegativeFloat = 1e-8
) -> RewardTable:
    """Credit each part of a tree of answers with its change in value (SPO, arXiv 2505.23564).

    The value of a leaf is the reward of its answer, that of another part the mean of its continuations'. A
    part has its value less that of the part before it; the first parts have theirs less the mean of the
    group. Tokens that rows share are learned from in the first of these rows alone, and parts with an
    advantage of 0 not at all. `vision.with_branches`, and `vision.with_turn_branches` for conversations, note
    the `node` of every token; a row without it is a part of its own (our reading). Put it after `total`.

    Args:
        scale: Divide by nothing, or by the deviation (over their number) of the values of all continuations
            of the part before (`siblings`).
        eps: Added to that deviation.
    """
    last = table.last.clamp(min=0)[:, None, None].expand(-1, len(table.names), 1)
    reward, known = table.values.gather(2, last)[..., 0], table.valid.gather(2, last)[..., 0]  # (N, R)
    steps = per_step(table)
    number = torch.where(steps.present, noted(steps, "node"), torch.nan)  # (N, T)
    paths = [
        leaf_of(int(group), row, i) for i, (group, row) in enumerate(zip(table.group, number, strict=True))
    ]
    credit, valid = torch.zeros_like(steps.values), torch.zeros_like(steps.valid)
    for column in range(len(table.names)):
        edges = _edges(paths, reward[:, column].tolist(), known[:, column].tolist(), scale, eps)
        for i, path in enumerate(paths):
            for node, inside in parts_of(path, number[i]):
                if node in edges:
                    part = inside & steps.present[i]
                    credit[i, column, part], valid[i, column, part] = edges[node], True
    learn, seen = steps.learn & (credit != 0).any(1), set()
    for i, path in enumerate(paths):
        for node, inside in parts_of(path, number[i]):
            if node in seen:
                learn[i] &= ~inside
            seen.add(node)
    return steps.replace(values=credit, valid=valid, learn=learn)


def _edges(
    paths: list[Node], reward: list[float], known: list[bool], scale: str, eps: float
) -> dict[Node, float]:
    """Compute the advantage of every part that leads to a leaf with a reward."""
    below: dict[Node, list[float]] = defaultdict(list)  # values of the continuations of a part
    for path, value, applies in zip(paths, reward, known, strict=True):
        if applies:
            below[path].append(value)
    values: dict[Node, float] = {}
    spread: dict[Node, float] = {}
    # From the deepest parts up, each of which hands its mean on to the part before it.
    for depth in range(max(map(len, paths), default=0), 0, -1):
        for node in [node for node in below if len(node) == depth]:
            listed = torch.tensor(below[node], dtype=torch.float64)
            values[node], spread[node] = float(listed.mean()), float(listed.std(correction=0))
            if depth > 1:
                below[node[:-1]].append(values[node])
    divisor = {node: spread[node] + eps if scale == "siblings" else 1.0 for node in values}
    return {
        node: gain / divisor[node[:-1]] if (gain := value - values[node[:-1]]) else 0.0
        for node, value in values.items()
        if len(node) > 1
    }
