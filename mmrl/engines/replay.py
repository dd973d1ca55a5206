"""Engines for experience replay: they store rows and add them to later collections.

Stored rows contain the tokens and log-probabilities that the engine recorded. An objective with `against:
engine` compares with these log-probabilities, which are those at sampling time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, PositiveInt
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine, RecallsRows
from mmrl.core.reward_table import RewardTable, name_id
from mmrl.core.rng import Stream
from mmrl.core.tensor import group_index
from mmrl.core.types import CHANGED, Outcome, Prompt, Rollouts, Trajectory
from mmrl.data.row_prompts import uids_of

RECALLED = frozenset({"token", "logp", "temperature"})  # notes that restore a rollout
TINY = 1e-6  # smaller advantages count as 0
REPLAY = "replay"  # tag of replayed rows


class Memory:
    """A replay buffer: rows of earlier steps in one or more reward tables, and the step of each."""

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine, stream: Stream, prompts: Sequence[Prompt], tables: int = 1) -> None:
        if not isinstance(engine.policy, RecallsRows):
            raise ConfigError(
                f"replay makes rows again from their tokens, which the policy {type(engine.policy).__name__} "
                "cannot; it needs `recall`, as vision.tokens has it"
            )
        self.engine, self.policy, self.stream, self.prompts = engine, engine.policy, stream, prompts
        self.tables, self.steps = [RewardTable.empty()] * tables, torch.zeros(0, dtype=torch.int64)
        self.added = 0  # rows replayed since the last report

    @property
    def stored(self) -> RewardTable:
        """The stored rows as they were scored, before the advantage chain."""
        return self.tables[0]

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Index of each prompt in the data."""
        return {uid: i for i, uid in enumerate(uids_of(self.prompts))}

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry with the wrapped engine.

        Answers to prompts that a sampler changed, by a hint or by noise, get the tag `changed`. They are not
        stored, because only prompts of the data can be looked up again.
        """
        rows = self.engine.rollout(prompts)
        return tuple(row if self._of_data(row.prompt) else _marked(row) for row in rows)

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
        row = self.policy.restore_rows(prompt, notes)
        tags = {REPLAY: "yes"}
        outcomes = tuple(
            Outcome(text=row.outcomes[-1].text, end=int(end), tags=tags) for end in table.ends[i]
        )
        outcomes = outcomes[: int(table.present[i].sum())]
        # A mark, because metrics of the mismatch between engine and policy skip replayed rows.
        notes = {**row.notes, "replayed": torch.ones(length)}
        return Trajectory(prompt, prompt.uid, outcomes, row.steps, length, notes, on_policy=False)

    def remember(self, rows: Tensor, *tables: RewardTable) -> None:
        """Store the rows (N,) bool of this step, except off-policy answers and prompts not in the data."""
        table = tables[0]
        rows = rows & (table.ids["on_policy"][:, 0] == 1) & ~tagged(table, REPLAY) & ~tagged(table, CHANGED)
        self.tables = [old.join(new.select(rows)) for old, new in zip(self.tables, tables, strict=True)]
        self.steps = torch.cat([self.steps, torch.full((int(rows.sum()),), self.stream.step)])

    def keep(self, rows: Tensor) -> None:
        """Keep only the stored rows of a mask (M,), and drop all others."""
        self.tables, self.steps = [table.select(rows) for table in self.tables], self.steps[rows]

    def bring_back(self, rows: Tensor) -> list[RewardTable]:
        """Copy the stored rows at indices (n,) from every table, with the tag `replay`."""
        self.added += len(rows)
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
        """Return the stored rows with their steps."""
        return {"tables": [dict(vars(table)) for table in self.tables], "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the stored rows."""
        self.tables = [RewardTable(**{**table, "uids": tuple(table["uids"])}) for table in state["tables"]]
        self.steps = state["steps"]


def tagged(table: RewardTable, tag: str) -> Tensor:
    """Whether each row has a tag, such as `replay`: (N,) bool."""
    return table.ids[tag].any(-1) if tag in table.ids else torch.zeros(len(table), dtype=torch.bool)


def _marked(row: Trajectory) -> Trajectory:
    """Add the tag `changed` to the outcomes of a row."""
    outcomes = (replace(outcome, tags={**outcome.tags, CHANGED: "yes"}) for outcome in row.outcomes)
    return replace(row, outcomes=tuple(outcomes))


def strength(credit: RewardTable) -> Tensor:
    """Compute the largest absolute advantage of each row; 0 for rows that are not learned from: (N,)."""
    learned = credit.valid[:, 0] & credit.learn
    return torch.where(learned, credit.values[:, 0].abs(), 0.0).amax(-1)


def among(uids: Sequence[str], wanted: Iterable[str]) -> Tensor:
    """Whether each of `uids` is in `wanted`: (len(uids),) bool."""
    wanted = set(wanted)
    return torch.tensor([uid in wanted for uid in uids], dtype=torch.bool)


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
        granularity: "row" replaces single rows; "group" replaces a group without any advantage by the stored
            rows of one prompt and step.
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
    ) -> None:
        super().__init__(engine, stream, train_prompts, tables=2)
        self.capacity, self.max_age, self.power, self.granularity = capacity, max_age, power, granularity

    def replay_before(self, table: RewardTable) -> tuple[Tensor, RewardTable]:
        """Add nothing before the advantage chain, because stored rows keep their advantage."""
        return torch.ones(len(table), dtype=torch.bool), table.select(torch.zeros(0, dtype=torch.int64))

    def replay_after(
        self, table: RewardTable, credit: RewardTable
    ) -> tuple[Tensor, RewardTable, RewardTable]:
        """Return a mask (N,) of the rows to keep, and their replacements before and after the chain.

        Also store the rows of this step that have an advantage.
        """
        alive = strength(credit) > TINY
        self.keep(self.stream.step - self.steps <= self.max_age)
        units = self._units(table.group, torch.zeros_like(table.group))
        dead = units[~torch.isin(units, units[alive])].unique()
        rows, count = self._choose(len(dead), ~among(self.stored.uids, table.uids))
        back = self.bring_back(rows)
        self.remember(alive, table, credit)
        self.keep(torch.arange(len(self.steps)) >= len(self.steps) - self.capacity)
        return ~torch.isin(units, dead[:count]), back[0], back[1]

    def _units(self, group: Tensor, steps: Tensor) -> Tensor:
        """Return the number of each row's unit of replacement: the row itself, or its group and step."""
        return torch.arange(len(group)) if self.granularity == "row" else group_index([group, steps])

    def _choose(self, wanted: int, eligible: Tensor) -> tuple[Tensor, int]:
        """Draw up to `wanted` stored units; return the indices (n,) of their rows, and the number drawn."""
        units = self._units(self.stored.group, self.steps) if len(self.steps) else self.steps
        size = strength(self.tables[1]) if len(self.steps) else self.steps.double()
        names = units[eligible].unique()
        wanted = min(wanted, len(names))
        if not wanted:
            return torch.zeros(0, dtype=torch.int64), 0
        weights = torch.stack([size[units == name].mean() for name in names]) ** self.power
        chosen = torch.multinomial(weights, wanted, generator=self.stream.generator("replay"))
        return torch.isin(units, names[chosen]).nonzero()[:, 0], wanted


class ByPrompt(Memory):
    """A replay buffer of right and wrong answers per prompt, which acts before the advantage chain."""

    def __init__(
        self, engine: Engine, stream: Stream, prompts: Sequence[Prompt], of: str, above: float, capacity: int
    ) -> None:
        super().__init__(engine, stream, prompts)
        self.of, self.above, self.capacity = of, above, capacity

    def right(self, table: RewardTable) -> Tensor:
        """Whether each answer is right (its reward is above the threshold): (N,) bool."""
        return (table.at_end(self.of) if self.of else table.reward()) > self.above

    def of_prompt(self, uid: str, right: bool) -> Tensor:
        """Return the indices of the stored right answers to a prompt, or wrong ones if `right` is False."""
        if not len(self.steps):
            return self.steps
        return (among(self.stored.uids, [uid]) & (self.right(self.stored) == right)).nonzero()[:, 0]

    def draw(self, uid: str, right: bool, count: int) -> Tensor:
        """Draw up to `count` stored answers to a prompt, without replacement."""
        places = self.of_prompt(uid, right)
        order = torch.randperm(len(places), generator=self.stream.generator("replay", uid))
        return places[order[:count]]

    def store(self, table: RewardTable, rows: Tensor) -> None:
        """Store rows (N,) bool; keep the newest `capacity` right and wrong answers of every prompt."""
        self.remember(rows, table)
        keep = torch.ones(len(self.steps), dtype=torch.bool)
        for uid in dict.fromkeys(table.uids):
            for right in (True, False):
                places = self.of_prompt(uid, right)
                keep[places[: max(0, len(places) - self.capacity)]] = False
        self.keep(keep)

    def replay_after(
        self, table: RewardTable, credit: RewardTable
    ) -> tuple[Tensor, RewardTable, RewardTable]:
        """Change nothing after the advantage chain."""
        none = torch.zeros(0, dtype=torch.int64)
        return torch.ones(len(table), dtype=torch.bool), table.select(none), credit.select(none)


@engine(notes=RECALLED, sets_tags={REPLAY, CHANGED})
class WithSuccesses(ByPrompt):
    """In a group without any success, replace one answer by a stored success (arXiv 2508.15144).

    Args:
        engine: The engine that samples.
        of: Name of the reward that decides on success; "": the weighted sum of all.
        above: An answer with a higher reward is a success.
        capacity: Largest number of stored successes per prompt.
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
    ) -> None:
        super().__init__(engine, stream, train_prompts, of, above, capacity)

    def replay_before(self, table: RewardTable) -> tuple[Tensor, RewardTable]:
        """Return a mask (N,) of the rows to keep, and the stored successes that replace the others."""
        right, drawn = self.right(table), [torch.zeros(0, dtype=torch.int64)]
        keep = torch.ones(len(table), dtype=torch.bool)
        for uid in dict.fromkeys(table.uids):
            places = among(table.uids, [uid]).nonzero()[:, 0]
            success = self.draw(uid, True, 1)
            if len(success) and not right[places].any():
                generator = self.stream.generator("failure", uid)
                keep[places[torch.randint(len(places), (1,), generator=generator)]] = False
                drawn.append(success)
        (back,) = self.bring_back(torch.cat(drawn))
        self.store(table, right)
        return keep, back
