"""TreeCUA-DPO (arXiv 2602.09662): tool conversations that branch at their turns, for preference pairs.

Title: TreeCUA: Efficiently Scaling GUI Automation with Tree-Structured Verifiable Evolution
Formula: pairs (turn that leads to a right answer, turn that does not) from one state, by `branch_pairs`.
Our reading: online conversations, and the construction of pairs; only the abstract was read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.advantages.trees import Node, leaf_of, parts_of
from mmrl.config.ranges import DividesGenerations, PositiveInt
from mmrl.config.registry import advantage, engine
from mmrl.config.schema import ConfigError
from mmrl.core.episodes import EPISODE, TURN
from mmrl.core.reward_table import RewardTable, name_id
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.tools.conversation import INSTEAD, Conversation, copied


@engine(scope="vision", sets_tags={EPISODE, TURN, "state", "finish", "branch"})
@dataclass(eq=False)
class WithTurnBranches(WithTools):
    """Hold conversations with tools as a tree: after its first turns, each goes on several times.

    Every leaf is a row with the whole conversation. Turns that rows share are sampled once, and their calls
    are made once. The note `node` tells of every token which part of the tree it belongs to, as
    `vision.with_branches` has it; `tree_values` (SPO, arXiv 2505.23564) and `branch_pairs` (TreeCUA-DPO,
    arXiv 2602.09662) read it. The tag `branch` tells which part the row's last one starts from. A
    conversation that ends does not part, so that there can be fewer rows than were asked for. Evaluations get
    conversations that share nothing. All else is as `vision.with_tools` does it, whose place this engine
    takes. A batch holds whole trees; a tree of more rows than `batch_size` of `vision.generate` is read anew
    in every turn.

    Args:
        branching: Continuations of every conversation after the first turn, after the second and so on. The
            answers to a prompt must be a multiple of their product; so many conversations begin.
        tool: Functions that the model may call, as `vision.with_tools` has them.
        max_turns: The most turns of the policy; a call in the last one is not made.
        max_completion_length: The most tokens that the policy chooses in a conversation.
        max_images: The most images and videos that tools show in a conversation.
        only_n_most_recent_images: Not of trees, whose conversations are one row each.
        max_context: The most tokens of a conversation, read and chosen; 0: the positions of the model.
        max_reply_chars: The most characters of the texts that a tool returns at once; the rest is cut off.
        max_image_pixels: The most pixels of an image, or of all of a video, that a tool returns; more are an
            error of the tool.
        turn_outcomes: Make an outcome of every turn, all of which rewards score, instead of the last alone.
        score_target: Not of conversations that part.
        opener: Goes with `score_target`.
    """

    _: KW_ONLY
    branching: Annotated[tuple[PositiveInt, ...], DividesGenerations()] = (2, 2)
    notes: ClassVar[frozenset[str]] = frozenset({"node"})
    instead: ClassVar[str] = INSTEAD

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only_n_most_recent_images:
            raise ConfigError(
                "`only_n_most_recent_images` gives several rows to a conversation, and a tree one to each; "
                "leave it out of `vision.with_turn_branches`"
            )
        if len(self.branching) >= self.max_turns:
            raise ConfigError(
                f"`vision.with_turn_branches` parts conversations after turn {len(self.branching)} at last "
                f"(the length of `branching`), but they end after {self.max_turns}; set `max_turns` higher, "
                "or name fewer turns in `branching`"
            )

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Hold a tree of conversations about every prompt, with as many leaves as it has entries."""
        if self.stream.purpose != "train":
            return super().rollout(prompts)
        distinct = {prompt.uid: prompt for prompt in prompts}
        begun = {
            uid: self._roots(uid, number) for uid, number in Counter(prompt.uid for prompt in prompts).items()
        }
        largest = max(begun.values(), default=1) * prod(self.branching)
        size = max(1, self.engine.batch_size // largest) if self.engine.batch_size else len(begun) or 1
        uids, rows = list(begun), []
        for at in range(0, len(uids), size):
            asked = [(distinct[uid], i) for uid in uids[at : at + size] for i in range(begun[uid])]
            grown = self._grow(self.begin(asked), begun)
            for uid in uids[at : at + size]:
                leaves = [(self._path(talk, begun[uid]), talk) for talk in grown if talk.prompt.uid == uid]
                rows += [self._leaf(talk, path) for path, talk in sorted(leaves, key=lambda leaf: leaf[0])]
        self.counts.update(conversations=len(rows))
        return tuple(rows)

    def _roots(self, uid: str, number: int) -> int:
        """Count the conversations that begin; raises `ValueError` where that is no whole number."""
        roots, rest = divmod(number, prod(self.branching))
        if rest:
            raise ValueError(
                f"`vision.with_turn_branches` makes multiples of {prod(self.branching)} answers (the product "
                f"of `branching`), but {number} were asked for prompt '{uid}'; set `num_generations` to "
                f"{(roots + 1) * prod(self.branching)}"
            )
        return roots

    def _grow(self, live: list[Conversation], begun: dict[str, int]) -> list[Conversation]:
        """Hold conversations to their ends, and part them after their first turns; returns the leaves."""
        turns, leaves = self.engine.converse(), []
        for turn in range(self.max_turns):
            if 0 < turn <= len(self.branching):
                parted = [(talk, self._children(talk, turn, begun[talk.prompt.uid])) for talk in live]
                turns.part({_key(new): _key(talk) for talk, children in parted for new in children})
                live = [child for _, children in parted for child in children]
            self.counts["turns"] += len(live)
            self._choose(live, turn, turns)
            self._reply([talk for talk in live if not talk.finish], turn + 1 == self.max_turns)
            leaves += [talk for talk in live if talk.finish]
            live = [talk for talk in live if not talk.finish]
            if not live:
                break
        return leaves

    def _children(self, talk: Conversation, turn: int, roots: int) -> list[Conversation]:
        """Copy a conversation for each of its continuations, which are numbered over the whole tree."""
        starts, number = self._starts(roots), self.branching[turn - 1]
        first = starts[turn] + (talk.index - starts[turn - 1]) * number
        return [copied(talk, index) for index in range(first, first + number)]

    def _starts(self, roots: int) -> list[int]:
        """Number the first conversation of every level of a full tree.

        So a number, by which its turns are drawn, depends on no other conversation.
        """
        return [0, *accumulate(accumulate(self.branching, mul, initial=roots))]

    def _path(self, talk: Conversation, roots: int) -> tuple[int, ...]:
        """List the numbers of the parts of the tree that lead to a leaf."""
        starts = self._starts(roots)
        level = next(i for i, (_, end) in enumerate(pairwise(starts)) if talk.index < end)
        path = [talk.index]
        for depth in range(level, 0, -1):
            path.append(starts[depth - 1] + (path[-1] - starts[depth]) // self.branching[depth - 1])
        return tuple(reversed(path))

    def _leaf(self, talk: Conversation, path: tuple[int, ...]) -> Trajectory:
        """Make the row of a leaf; the last part of its path goes on to its end."""
        row = self._row(talk)
        parts = [path[min(turn, len(path) - 1)] for turn in range(len(talk.turns))]
        lengths = torch.tensor([len(ids) for _, ids in talk.turns])
        node = torch.tensor(parts, dtype=torch.float32).repeat_interleave(lengths)
        state = str(path[-2]) if len(path) > 1 else "start"
        *before, last = row.outcomes
        last = replace(last, tags={**last.tags, "branch": state})
        return replace(row, outcomes=(*before, last), notes={**row.notes, "node": node})


def _key(talk: Conversation) -> tuple[str, int]:
    return talk.prompt.uid, talk.index


@advantage(notes={"node", "token"})
def branch_pairs(table: RewardTable, *, threshold: float = 0.5) -> RewardTable:
    """Prefer branches of a tree that lead to a right answer to siblings that lead to none (TreeCUA-DPO).

    arXiv 2602.09662, of which only the abstract was read; our reading. Where a tree parts, a branch whose
    best answer is right is chosen and a sibling without a right answer rejected: 1 and -1 on the tokens of
    the two branches alone, in a group of their own; all else is dropped. Siblings of the same tokens are one
    branch. A row takes part in one pair at most, and each parting makes one, those nearest to the ends first.
    `vision.with_turn_branches`, and `vision.with_branches` for answers, note the `node` of every token. Put
    it after `total`, before an objective of pairs.

    Args:
        threshold: An answer is right above this reward.
    """
    last = table.last.clamp(min=0)[:, None]
    known = table.valid[:, 0].gather(1, last)[:, 0].tolist()
    right = (table.values[:, 0].gather(1, last)[:, 0] > threshold).tolist()
    steps = per_step(table)
    number, token = (torch.where(steps.present, noted(steps, name), torch.nan) for name in ("node", "token"))
    branches: dict[Node, dict[tuple[float, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    inside: dict[tuple[Node, int], Tensor] = {}  # the steps of the branch that follows a part, in a row
    for i, group in enumerate(table.group.tolist()):
        for node, part in parts_of(leaf_of(group, number[i], i), number[i]) if known[i] else ():
            inside[node[:-1], i] = part & steps.present[i]
            branches[node[:-1]][tuple(token[i, inside[node[:-1], i]].tolist())].append(i)
    pair = torch.zeros(steps.present.shape, dtype=torch.float64)
    groups, used = steps.ids["group"].clone(), set[int]()
    for node in sorted(branches, key=len, reverse=True):
        listed = branches[node].values()
        chosen = [i for rows in listed for i in rows if right[i]]
        rejected = [i for rows in listed if not any(right[i] for i in rows) for i in rows]
        free = [[i for i in rows if i not in used] for rows in (chosen, rejected)]
        if all(free):
            for sign, (i, *_) in zip((1.0, -1.0), free, strict=True):
                pair[i, inside[node, i]] = sign
                groups[i] = name_id(f"{node[0]}/{free[0][0]}")
                used.add(i)
    return steps.replace(
        values=pair[:, None].expand_as(steps.values),
        ids={**steps.ids, "group": groups},
        learn=steps.learn & (pair != 0),
    )
