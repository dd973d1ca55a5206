"""Rollouts and what they are worth: ask, answer, score, filter, and ask again for what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Rollouts
from mmrl.training.nonfinite import rolling_out
from mmrl.training.score import score

if TYPE_CHECKING:
    from mmrl.build import Run


@dataclass(frozen=True)
class Collection:
    """One collection. `rollouts` are this process's rows of `table`, in order; `seen` is the table before
    groups were dropped."""

    rollouts: Rollouts
    table: RewardTable
    seen: RewardTable


def collect(run: Run) -> Collection:
    """Collect `num_prompts` groups, asking the sampler up to `max_rounds` times for what the filter
    dropped."""
    rollouts, table, keep = (), RewardTable.empty(), torch.zeros(0, dtype=torch.bool)
    for number in range(run.max_rounds):
        run.stream.round = number
        missing = run.num_prompts - table.num_groups(keep)
        prompts = run.sampler.draw(missing, run.num_generations) if missing > 0 else []
        if not prompts:
            break
        order = [prompt.uid for prompt in prompts]
        mine, counts = run.processes.share(prompts, table)
        with run.processes.agreeing("making and scoring rollouts"):
            whole = run.processes.whole(run.policy.module)
            with run.timing("rollout"), run.acting(), whole, rolling_out(run.stream.step):
                fresh = in_order(run.engine.rollout(mine), order)
            with run.timing("reward"):
                local = score(
                    run.rewards, fresh if counts else (), notes=run.chain_notes, rank=run.processes.rank
                )
        with run.timing("reward"):
            scored = run.processes.gather(local, order)
        for observer in run.observers:
            observer.observe(fresh if counts else (), scored)
        rollouts, table = _behind(rollouts, table, fresh, counts), table.join(scored)
        keep = run.group_filter(table) & table.learn.any(-1)  # groups with a faulty reward are asked anew
    run.stream.round = 0
    if not rollouts:
        raise ValueError(f"the sampler named no prompt at step {run.stream.step}, so there is nothing to do")
    return Collection(*pick(rollouts, table, keep), table)


def in_order(rollouts: Rollouts, order: Sequence[str]) -> Rollouts:
    """Sort rollouts by where their prompt was first asked, so that rows stand alike on one process and on
    many."""
    place = {uid: i for i, uid in enumerate(dict.fromkeys(order))}
    return tuple(sorted(rollouts, key=lambda row: place[row.prompt.uid]))


def _behind(rollouts: Rollouts, table: RewardTable, fresh: Rollouts, counts: bool) -> Rollouts:
    """Append a round. Rows that only kept the process in step are kept as long as there is nothing else."""
    if not table.mine.any():
        return fresh if counts or not rollouts else rollouts
    return rollouts + fresh if counts else rollouts


def pick(rollouts: Rollouts, table: RewardTable, keep: Tensor) -> tuple[Rollouts, RewardTable]:
    """Keep rows (N,) bool. A process that is left without any keeps one rollout, which `spread` will
    blank."""
    mine = keep[table.mine].tolist()
    kept = tuple(row for row, wanted in zip(rollouts, mine, strict=False) if wanted)
    return kept or rollouts[:1], table.select(keep)
