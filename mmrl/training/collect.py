"""Sampling and scoring of a step's rollouts, in rounds until enough groups pass the group filter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.loading import ConfigError
from mmrl.core.episodes import of_episodes
from mmrl.core.protocols import Replay
from mmrl.core.reward_table import Collection, RewardTable
from mmrl.core.types import Prompt, Rollouts
from mmrl.runtime.distributed import place_of
from mmrl.training.ahead import requested_prompts, with_version
from mmrl.training.nonfinite import rolling_out
from mmrl.training.score import RewardFault, score
from mmrl.training.trainer import Run

ROUNDS = 10  # minimum rounds before an always absent reward is an error: it may need good answers
DRAWS = 10  # largest number of consecutive draws in which all prompts are unreadable
PROMPTS = 1000  # minimum prompts before it is an error: the reward's task may be rare in the data


def collect(run: Run) -> Collection:
    """Collect `num_prompts` groups in up to `max_rounds` rounds; replace groups that the filter drops."""
    rollouts, table, keep = (), RewardTable.empty(), torch.zeros(0, dtype=torch.bool)
    stand_in: Rollouts = ()
    method, size = run.method, run.config.rollout
    for number in range(size.max_rounds):
        run.stream.round = number  # selects the random draws of this round
        done = readable(run, size.num_prompts - table.num_groups(keep), table)
        if done is None:
            break
        order, fresh, sampled, local = done
        stand_in = stand_in or sampled
        with run.rollout_weights():
            run.processes.compare(method.engine)
        with run.report.timing("reward"):
            scored = run.processes.gather(local, order)
        for observer in run.observers:
            observer.observe(fresh, scored)
        rollouts, table = rollouts + fresh, table.join(scored)
        # Also replace groups with a failed reward.
        keep = of_episodes(method.group_filter, table) & table.learn.any(-1)
    run.stream.round = 0
    if not stand_in:
        raise ValueError(f"the sampler named no prompt at step {run.stream.step}, so there is nothing to do")
    kept, learned = pick(rollouts, table, keep)
    collection = Collection(kept, learned, table, (kept or rollouts or stand_in)[0])
    for replay in run.replays:
        keep, added = replay.replay_before(collection)
        collection, _ = exchange_rows(run, replay, collection, keep, added)
    return collection


def made_and_scored(
    run: Run, prompts: list[Prompt], table: RewardTable, version: int
) -> tuple[list[str], Rollouts, Rollouts, RewardTable] | None:
    """Sample and score the rollouts of this process; return None if a prompt was unreadable.

    `version` is the training step of the sampling weights. Returns the uids of all prompts in order, the
    rollouts to learn from (none if this process only has a padding prompt), all rollouts of this process, and
    the reward table of the rollouts to learn from.
    """
    method, order = run.method, [prompt.uid for prompt in prompts]
    mine, counts = run.processes.assign_prompts(prompts, table)
    result = None
    with run.processes.fail_together("making and scoring rollouts"), run.unreadable.catching():
        sampling = run.processes.sampling(method.engine)
        with run.report.timing("rollout"), run.rollout_weights(), sampling, rolling_out(run.stream.step):
            sampled = with_version(in_order(method.engine.rollout(mine), order), version, run.stream.step)
        fresh = sampled if counts else ()  # nothing to learn if the prompt only pads this process
        with run.report.timing("reward"):
            local = score(method.rewards, fresh, notes=method.noted, rank=run.processes.rank, log=run.log)
            result = order, run.log.onto(fresh), sampled, local
    return None if run.unreadable.agree(run.processes) else result


def readable(run: Run, missing: int, table: RewardTable) -> Any:
    """Draw prompts, sample and score answers; drop prompts whose media are unreadable, or raise."""
    number = run.stream.round
    for attempt in range(DRAWS):
        run.stream.round = number + attempt * run.config.rollout.max_rounds  # selects the random draws
        drawn_now, version = draw_prompts(run, missing)
        prompts = run.unreadable.rest(drawn_now)
        while prompts:
            if done := made_and_scored(run, prompts, table, version):
                return done
            prompts, version = run.without_unreadable(prompts), run.stream.step  # weights of this step
        if not drawn_now:
            return None
    raise ConfigError(f"none of the prompts of {DRAWS} draws can be read: {run.unreadable.error()}")


def draw_prompts(run: Run, missing: int) -> tuple[list[Prompt], int]:
    """Draw the prompts of a sampling round, or return the prompts whose rollouts were requested earlier.

    Also returns the training step of the weights that sample.
    """
    if asked := requested_prompts(run):
        return asked
    drawn = run.method.sampler.draw(missing, run.config.rollout.num_generations) if missing > 0 else []
    return drawn, run.stream.step


def replay_after(run: Run, collection: Collection, credit: RewardTable) -> tuple[Collection, RewardTable]:
    """Let replay pieces exchange some of this step's rollouts for earlier rows, which have advantages."""
    for replay in run.replays:
        keep, added, credited = replay.replay_after(collection, credit)
        collection, added = exchange_rows(run, replay, collection, keep, added)
        credit = credit.select(keep).join(credited.replace(process=added.process, rank=added.rank))
    return collection, credit


def exchange_rows(
    run: Run, replay: Replay, collection: Collection, keep: Tensor, added: RewardTable
) -> tuple[Collection, RewardTable]:
    """Drop this step's rollouts outside the mask `keep` (N,), and add replayed rows.

    Returns the remaining rollouts, and the replayed rows with the process that each was assigned to.
    """
    kept, table = pick(collection.rollouts, collection.table, keep)
    homes = run.processes.homes(Counter(added.uids), table)
    ranks = torch.tensor([homes[uid] for uid in added.uids], dtype=torch.int64)
    added = added.replace(process=ranks, rank=run.processes.rank)
    with run.processes.fail_together("bringing rollouts back"):
        kept = kept + replay.restore_rows(added.select(added.mine))
    return replace(collection, rollouts=kept, table=table.join(added)), added


def in_order(rollouts: Rollouts, order: Sequence[str]) -> Rollouts:
    """Sort rollouts by the position of their prompt's uid in `order`, as on a single process."""
    place = place_of(order)
    return tuple(sorted(rollouts, key=lambda row: place(row.prompt.uid)))


def pick(rollouts: Rollouts, table: RewardTable, keep: Tensor) -> tuple[Rollouts, RewardTable]:
    """Select the rows of a table in the mask `keep` (N,), and the rollouts of this process among them."""
    mine = keep[table.mine].tolist()
    return tuple(row for row, kept in zip(rollouts, mine, strict=True) if kept), table.select(keep)


class RewardCoverage:
    """Observer that stops a run in which a reward returned None for every answer.

    It raises after `ROUNDS` sampling rounds and `PROMPTS` prompts (or all prompts), or at the end of a run in
    which no reward applied at all. Rounds in which a reward failed do not count. Rewards with `on_absent:
    warn`, and labels (weight 0) that no advantage function reads, are not checked.

    Args:
        rewards: The rewards of the run.
        prompts: Number of prompts in the data.
        read: Names of the labels that advantage functions read.
    """

    def __init__(self, rewards: Sequence[Bound], prompts: int, read: Set[str] = frozenset()) -> None:
        raising = [b for b in rewards if b.call.get("on_absent", "raise") == "raise"]
        watched = [b.name for b in raising if b.weight or b.name in read]
        self.absent = dict.fromkeys(watched, 0)  # prompts so far for each reward that never applied
        self.rounds, self.enough = 0, min(prompts, PROMPTS)
        self.weighted, self.ended = {b.name for b in rewards if b.weight}, False

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Count a sampling round; raise `RewardFault` if a reward returned only None in too many rounds."""
        self.rounds += 1
        never = set(table.absent)
        for name in list(self.absent):
            if name in never:
                self.absent[name] += len(set(table.uids))
            elif f"fault/{name}" not in table.ids:
                del self.absent[name]
        for name, count in self.absent.items():
            if self.rounds >= ROUNDS and count >= self.enough:
                raise RewardFault(
                    f"reward '{name}' gave None for every answer to {count} prompts in {self.rounds} rounds, "
                    "so nothing is learned from it; see whether it reads what the data or the engine have, "
                    "take it out, or set `on_absent: warn` on it if it will apply later"
                )

    def on_event(self, event: str, step: int, metrics: Mapping[str, float]) -> None:
        """Raise `RewardFault` at the end of a run in which no reward applied to any answer."""
        if event == "train_end" and self.rounds and self.weighted and self.weighted <= self.absent.keys():
            names = ", ".join(f"'{name}'" for name in sorted(self.weighted))
            raise RewardFault(
                f"nothing was learned: no reward applied to any answer of the run ({names}); see what they "
                "read of the data, by `mmrl check --data`"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of sampling rounds and prompts so far."""
        return {"rounds": self.rounds, "absent": dict(self.absent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers of sampling rounds and prompts."""
        self.rounds, self.absent = state["rounds"], dict(state["absent"])
