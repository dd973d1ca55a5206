"""Engines for experience replay: they store rows and add them to the rollouts of later steps.

Stored rows contain the tokens and log-probabilities that the engine recorded while sampling. An objective
with `against: engine` computes probability ratios to these log-probabilities. Conversations are stored with
their turns, replies and media, and all rows of a conversation are replayed together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, PositiveInt
from mmrl.config.registry import engine
from mmrl.core.episodes import EPISODE, episode_index, join_episodes
from mmrl.core.protocols import Engine, RecallsRows
from mmrl.core.reward_table import Collection, RewardTable, name_id
from mmrl.core.rng import Stream
from mmrl.core.tensor import group_index
from mmrl.core.types import CHANGED, Prompt, Rollouts, Trajectory
from mmrl.data.row_prompts import uids_of
from mmrl.engines.conversation_store import ConversationStore

RECALLED = frozenset({"token", "logp", "temperature"})  # notes that restore a rollout
TINY = 1e-6  # smaller advantages count as 0
REPLAY = "replay"  # tag of replayed rows
STORED = "stored"  # name of the id column with the number of a stored row, from 1
MAX_BYTES = 1 << 30  # default limit of the stored conversations


class Memory:
    """A replay buffer: rollouts of earlier steps as rows of reward tables, with the step of each."""

    notes: frozenset[str] = frozenset()

    def __init__(
        self,
        engine: Engine,
        stream: Stream,
        prompts: Sequence[Prompt],
        tables: int = 1,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if not isinstance(engine.policy, RecallsRows):
            raise ConfigError(
                f"replay makes rows again from their tokens, which the policy {type(engine.policy).__name__} "
                "cannot; it needs `recall`, as vision.tokens has it"
            )
        self.engine, self.policy, self.stream, self.prompts = engine, engine.policy, stream, prompts
        self.tables, self.steps = [RewardTable.empty()] * tables, torch.zeros(0, dtype=torch.int64)
        self.added = 0  # rows replayed since the last report
        self.count, self.max_bytes = 0, max_bytes  # `count`: number of the last stored row
        self.conversations = ConversationStore()
        self.gather: Callable[[Any], list[Any]] = lambda value: [value]

    def connect(self, ask: Callable[[Sequence[Prompt]], Rollouts], tell: Callable[[Any], list[Any]]) -> None:
        """Set the function `tell`, which gathers the conversations of all processes."""
        self.gather = tell

    @property
    def stored(self) -> RewardTable:
        """The stored rows with their rewards, before advantages were computed."""
        return self.tables[0]

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Maps the id of each prompt to the prompt's index in the data."""
        return {uid: i for i, uid in enumerate(uids_of(self.prompts))}

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample rollouts with the wrapped engine, and tag answers to changed prompts.

        Answers to prompts that a sampler changed, by a hint or by noise, get the tag `changed`. They are not
        stored, because only prompts of the data can be looked up again.
        """
        rows = self.engine.rollout(prompts)
        changed = {prompt.uid for prompt in prompts if not self._of_data(prompt)}
        # Not `row.prompt` for a conversation, which may end with an environment's first observation.
        same = [
            row.prompt.uid not in changed if row.transcript else self._of_data(row.prompt) for row in rows
        ]
        return tuple(row if kept else _marked(row) for row, kept in zip(rows, same, strict=True))

    def _of_data(self, prompt: Prompt) -> bool:
        if prompt.uid not in self.places:
            return False
        own = self.prompts[self.places[prompt.uid]]
        names = ([media.name for media in one.media] for one in (own, prompt))
        return own is prompt or (own.text == prompt.text and operator.eq(*names))

    def restore_rows(self, table: RewardTable) -> Rollouts:
        """Rebuild the rollouts of replayed rows from their recorded tokens."""
        return tuple(self._row(table, i, self.prompts[self.places[uid]]) for i, uid in enumerate(table.uids))

    def _row(self, table: RewardTable, i: int, prompt: Prompt) -> Trajectory:
        length = int(table.length[i])
        notes = {name: table.notes[name][i, :length] for name in table.notes}
        ends = table.ends[i, : int(table.present[i].sum())].tolist()
        if stored := self.conversations.read(int(table.ids[STORED][i, 0]), prompt):
            prompt, transcript, outcomes = stored
            row = self.policy.restore_rows(prompt, notes, transcript)
        else:
            row = self.policy.restore_rows(prompt, notes)
            outcomes = [row.outcomes[-1]] * len(ends)
        outcomes = tuple(
            replace(outcome, end=end, tags={**outcome.tags, REPLAY: "yes"})
            for outcome, end in zip(outcomes, ends, strict=True)
        )
        # Mark replayed rows, because metrics of the mismatch between engine and policy skip them.
        notes = {**row.notes, "replayed": torch.ones(length)}
        return replace(row, outcomes=outcomes, notes=notes)

    def remember(self, rows: Tensor, *tables: RewardTable, rollouts: Rollouts = ()) -> None:
        """Store rows (mask (N,)) of this step, except off-policy answers and prompts not in the data.

        `rollouts` are this process's rows of the tables, in order. Above `max_bytes`, old rows are dropped.
        """
        table = tables[0]
        rows = rows & (table.ids["on_policy"][:, 0] == 1) & ~tagged(table, REPLAY) & ~tagged(table, CHANGED)
        numbers = torch.where(rows, rows.cumsum(0) + self.count, 0)
        own = zip(numbers[table.mine].tolist(), rollouts, strict=False)
        packed = [
            self.conversations.pack(number, row, self.prompts[self.places[row.prompt.uid]])
            for number, row in own
            if number and row.transcript
        ]
        for part in self.gather(packed):
            self.conversations.add(part)
        self.count += int(rows.sum())
        stored = [of_step(new, EPISODE, self.stream.step) for new in tables]
        column = numbers[:, None].expand_as(table.ends).clone()
        stored[0] = stored[0].replace(ids={**stored[0].ids, STORED: column})
        self.tables = [old.join(new.select(rows)) for old, new in zip(self.tables, stored, strict=True)]
        self.steps = torch.cat([self.steps, torch.full((int(rows.sum()),), self.stream.step)])
        if self.conversations.texts:
            sizes = torch.tensor([self.conversations.size(number) for number in self._numbers()])
            self.keep_whole(sizes.flip(0).cumsum(0).flip(0) <= self.max_bytes)

    def _numbers(self) -> list[int]:
        return self.stored.ids[STORED][:, 0].tolist() if len(self.stored) else []

    def keep_whole(self, rows: Tensor) -> None:
        """Keep the stored rows in the mask `rows` (M,), but drop episodes that are only partly in it."""
        episode = episode_index(self.stored)
        self.keep(~torch.isin(episode, episode[~rows]))

    def keep(self, rows: Tensor) -> None:
        """Keep only the stored rows in the mask `rows` (M,), and drop all others."""
        self.tables, self.steps = [table.select(rows) for table in self.tables], self.steps[rows]

    def bring_back(self, rows: Tensor) -> list[RewardTable]:
        """Copy the stored rows with indices `rows` (n,) from every table, and tag them `replay`."""
        self.added += len(rows)
        self.conversations.keep(self._numbers())
        back = []
        for table in (table.select(rows) for table in self.tables):
            mark = torch.full_like(table.ends, name_id("yes"))
            back.append(table.replace(ids={**table.ids, REPLAY: mark, "on_policy": torch.zeros_like(mark)}))
        return back

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the number of rows replayed since the last report, and the number of stored rows."""
        metrics = {"replay/rows": float(self.added), "replay/stored": float(len(self.steps))}
        self.added = 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the stored rows with their training steps and conversations."""
        self.conversations.keep(self._numbers())
        tables = [dict(vars(table)) for table in self.tables]
        conversations = self.conversations.state_dict()
        return {"tables": tables, "steps": self.steps, "count": self.count, "conversations": conversations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the stored rows."""
        self.tables = [RewardTable(**{**table, "uids": tuple(table["uids"])}) for table in state["tables"]]
        self.steps, self.count = state["steps"], state["count"]
        self.conversations.load_state_dict(state["conversations"])


def tagged(table: RewardTable, tag: str) -> Tensor:
    """Return a mask (N,) bool of the rows that have a tag, such as `replay`."""
    return table.ids[tag].any(-1) if tag in table.ids else torch.zeros(len(table), dtype=torch.bool)


def of_step(table: RewardTable, name: str, step: int) -> RewardTable:
    """Make the ids in column `name`, if any, unique to a training step; the id 0 stays."""
    if name not in table.ids:
        return table
    old, place = table.ids[name].unique(return_inverse=True)
    new = torch.tensor([name_id(f"{one}/{step}") if one else 0 for one in old.tolist()], dtype=torch.int64)
    return table.replace(ids={**table.ids, name: new[place]})


def _marked(row: Trajectory) -> Trajectory:
    """Add the tag `changed` to the outcomes of a row."""
    outcomes = (replace(outcome, tags={**outcome.tags, CHANGED: "yes"}) for outcome in row.outcomes)
    return replace(row, outcomes=tuple(outcomes))


def strength(credit: RewardTable) -> Tensor:
    """Compute the largest absolute advantage (N,) of each row; 0 for rows that do not train the policy."""
    learned = credit.valid[:, 0] & credit.learn
    return torch.where(learned, credit.values[:, 0].abs(), 0.0).amax(-1)


def among(uids: Sequence[str], wanted: Iterable[str]) -> Tensor:
    """Return a mask (len(uids),) bool of the uids that are in `wanted`."""
    wanted = set(wanted)
    return torch.tensor([uid in wanted for uid in uids], dtype=torch.bool)


def answers_of(table: RewardTable, rows: Tensor) -> list[Tensor]:
    """Group rows (n,) of a table by answer: all rows of a conversation, or a single row."""
    episode = episode_index(table.select(rows))
    return [rows[episode == one] for one in dict.fromkeys(episode.tolist())]


@engine(notes=RECALLED, sets_tags={REPLAY, CHANGED})
class WithReplay(Memory):
    """Replace rows without an advantage by stored rows that had one (SSB, arXiv 2504.16656).

    Stored rows are drawn without replacement, with probabilities that grow with their absolute advantage,
    and keep their advantage. Rows of this step's prompts are not drawn. The paper gives neither a formula nor
    numbers: this is our reading.

    Args:
        engine: The engine that samples.
        capacity: Largest number of stored rows; the oldest are dropped first.
        max_age: Steps after which a row is dropped.
        power: Exponent of the absolute advantage in the probability of a row; 0: uniform.
        granularity: "row" replaces single rows (all rows of a conversation); "group" replaces a group without
            any advantage by the stored rows of one prompt and step, such as a tree of conversations.
        max_bytes: Largest size of the stored conversations with their media, in memory and in checkpoints;
            the oldest are dropped first.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stream: Stream,
        train_prompts: Sequence[Prompt] = (),
        capacity: PositiveInt = 2048,
        max_age: PositiveInt = 4,
        power: NonNegativeFloat = 1.0,
        granularity: Literal["row", "group"] = "row",
        max_bytes: PositiveInt = MAX_BYTES,
    ) -> None:
        super().__init__(engine, stream, train_prompts, tables=2, max_bytes=max_bytes)
        self.capacity, self.max_age, self.power, self.granularity = capacity, max_age, power, granularity

    def replay_before(self, collection: Collection) -> tuple[Tensor, RewardTable]:
        """Add nothing before advantages are computed, because stored rows keep their advantage."""
        table = collection.table
        return torch.ones(len(table), dtype=torch.bool), table.select(torch.zeros(0, dtype=torch.int64))

    def replay_after(
        self, collection: Collection, credit: RewardTable
    ) -> tuple[Tensor, RewardTable, RewardTable]:
        """Return a mask (N,) of the rows to keep, and the stored rows that replace the others.

        The replacements are returned twice: with their rewards, and with their advantages. Rows of this step
        with an advantage are stored.
        """
        table, alive = collection.table, strength(credit) > TINY
        self.keep(self.stream.step - self.steps <= self.max_age)
        units = self._units(table)
        dead = units[~torch.isin(units, units[alive])].unique()
        rows, count = self._choose(len(dead), ~among(self.stored.uids, table.uids))
        back = self.bring_back(rows)
        episode = episode_index(table)
        alive = torch.isin(episode, episode[alive])  # all rows of a conversation
        # Groups of the same prompt from different steps stay separate.
        tables = [of_step(one, "group", self.stream.step) for one in (table, credit)]
        self.remember(alive, *tables, rollouts=collection.rollouts)
        self.keep_whole(torch.arange(len(self.steps)) >= len(self.steps) - self.capacity)
        return ~torch.isin(units, dead[:count]), back[0], back[1]

    def _units(self, table: RewardTable) -> Tensor:
        """Return the index of the unit that is replaced as a whole: each row's conversation or group."""
        return episode_index(table) if self.granularity == "row" else group_index([table.group])

    def _choose(self, wanted: int, eligible: Tensor) -> tuple[Tensor, int]:
        """Draw up to `wanted` stored units; return the indices (n,) of their rows, and the number drawn."""
        units = self._units(self.stored) if len(self.steps) else self.steps
        size = strength(self.tables[1]) if len(self.steps) else self.steps.double()
        names = units[eligible].unique()
        wanted = min(wanted, len(names))
        if not wanted:
            return torch.zeros(0, dtype=torch.int64), 0
        weights = torch.stack([size[units == name].mean() for name in names]) ** self.power
        chosen = torch.multinomial(weights, wanted, generator=self.stream.generator("replay"))
        return torch.isin(units, names[chosen]).nonzero()[:, 0], wanted


class ByPrompt(Memory):
    """A replay buffer of right and wrong answers per prompt; replays before advantages are computed."""

    def __init__(
        self,
        engine: Engine,
        stream: Stream,
        prompts: Sequence[Prompt],
        of: str,
        above: float,
        capacity: int,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(engine, stream, prompts, max_bytes=max_bytes)
        self.of, self.above, self.capacity = of, above, capacity

    def right(self, table: RewardTable) -> Tensor:
        """Return a mask (N,) bool of the right answers, whose reward is above the threshold.

        All rows of a conversation have its reward.
        """
        whole = join_episodes(table)
        return ((whole.at_end(self.of) if self.of else whole.reward()) > self.above)[episode_index(table)]

    def of_prompt(self, uid: str, right: bool) -> Tensor:
        """Return the indices of the stored right answers to a prompt, or wrong ones if `right` is False."""
        if not len(self.steps):
            return self.steps
        rows = among(self.stored.uids, [uid]).nonzero()[:, 0]
        return rows[self.right(self.stored.select(rows)) == right]

    def draw(self, uid: str, right: bool, count: int) -> Tensor:
        """Draw up to `count` stored answers to a prompt, without replacement."""
        answers = answers_of(self.stored, self.of_prompt(uid, right))
        order = torch.randperm(len(answers), generator=self.stream.generator("replay", uid))
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(answers[i] for i in order[:count].tolist())])

    def store(self, collection: Collection, rows: Tensor) -> None:
        """Store the rows in a mask (N,); keep the newest `capacity` right and wrong answers per prompt."""
        self.remember(rows, collection.table, rollouts=collection.rollouts)
        keep = torch.ones(len(self.steps), dtype=torch.bool)
        for uid in dict.fromkeys(collection.table.uids):
            for right in (True, False):
                answers = answers_of(self.stored, self.of_prompt(uid, right))
                for old in answers[: max(0, len(answers) - self.capacity)]:
                    keep[old] = False
        self.keep(keep)

    def replay_after(
        self, collection: Collection, credit: RewardTable
    ) -> tuple[Tensor, RewardTable, RewardTable]:
        """Change nothing after advantages are computed."""
        table, none = collection.table, torch.zeros(0, dtype=torch.int64)
        return torch.ones(len(table), dtype=torch.bool), table.select(none), credit.select(none)


@engine(notes=RECALLED, sets_tags={REPLAY, CHANGED})
class WithSuccesses(ByPrompt):
    """Replace one answer of each group without a success by a stored success (arXiv 2508.15144).

    Args:
        engine: The engine that samples.
        of: Name of the reward that decides on success; "": the weighted sum of all rewards.
        above: An answer with a higher reward is a success.
        capacity: Largest number of stored successes per prompt.
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
        capacity: PositiveInt = 4,
        max_bytes: PositiveInt = MAX_BYTES,
    ) -> None:
        super().__init__(engine, stream, train_prompts, of, above, capacity, max_bytes)

    def replay_before(self, collection: Collection) -> tuple[Tensor, RewardTable]:
        """Return a mask (N,) of the rows to keep, and the stored successes that replace the others."""
        table = collection.table
        right, drawn = self.right(table), [torch.zeros(0, dtype=torch.int64)]
        keep = torch.ones(len(table), dtype=torch.bool)
        for uid in dict.fromkeys(table.uids):
            places = among(table.uids, [uid]).nonzero()[:, 0]
            success = self.draw(uid, True, 1)
            if len(success) and not right[places].any():
                answers, generator = answers_of(table, places), self.stream.generator("failure", uid)
                keep[answers[int(torch.randint(len(answers), (1,), generator=generator))]] = False
                drawn.append(success)
        (back,) = self.bring_back(torch.cat(drawn))
        self.store(collection, right)
        return keep, back
