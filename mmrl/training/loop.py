"""The trainer. It names no method and no modality."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from mmrl.config.registry import Needs
from mmrl.core.protocols import Policy
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Batch, StepOutput, spread
from mmrl.core.tensor import pad_to
from mmrl.core.types import Unit
from mmrl.runtime.files import locked
from mmrl.runtime.signals import listening
from mmrl.training.collect import Collection, collect, pick
from mmrl.training.nonfinite import largest_first, within_memory

if TYPE_CHECKING:
    from mmrl.build import Run


def train(run: Run) -> None:
    """Collect, learn and report until `max_steps`; goes on where the last checkpoint of the run stands.

    A run that is asked to stop (SIGTERM, Ctrl-C) does so behind a step, saved, and without its last
    evaluation. `ConfigError` where another process trains in the same folder.
    """
    asked = listening(run.processes.main and not run.quiet)
    with run.processes.watching(), asked as stop, locked(run.folder, run.processes):
        for step in range(run.resume(), run.max_steps):
            run.tick(step)
            collection = collect(run)
            with run.timing("learn"):
                credit, batch = learnable(run, collection)
                for _ in range(run.num_iterations):
                    update(run, batch)
            run.finish(step, collection, credit)
            if run.processes.any(bool(stop.asked)):
                return run.leave(step + 1, stop.asked)
        run.close()


def learnable(run: Run, collection: Collection) -> tuple[RewardTable, Batch]:
    """Turn rewards into credit, lay it over a step table, and ask the other policies about it."""
    credit = run.advantage(collection.table)
    rollouts, learned = pick(collection.rollouts, credit, credit.learn.any(-1))
    batch = spread(learned.select(learned.mine), run.policy.collate(rollouts))
    drawn = float(collection.table.mine.sum())
    batch = batch.replace(order=tuple(dict.fromkeys(learned.group.tolist())), drawn=drawn)
    run.learned = rollouts
    return credit, within_memory(
        run, lambda: consult(run.others, batch, run.needs, run.micro_batch_steps, run.processes.even)
    )


def consult(
    policies: Mapping[str, Policy],
    batch: Batch,
    needs: Needs,
    micro_batch_steps: int,
    even: Callable[[list], Iterable[tuple]] = lambda cuts: ((cut, 1.0, False) for cut in cuts),
) -> Batch:
    """Ask other policies about every step, without gradient; the answers stay on the CPU. `even` makes as
    many cuts on every process, because sharded weights are gathered for each.

    `engine` is what the engine noted while it made the rollouts; where it noted nothing, it is `old`.
    """
    others = dict(batch.others)
    for name, policy in policies.items():
        extra = needs.others.get(name, frozenset())
        with torch.no_grad():
            told = [
                (rows, columns, policy(batch.select(rows, columns), extra).detach(), counts)
                for (rows, columns), counts, _ in even(list(batch.cuts(micro_batch_steps, Unit.STEP)))
            ]
        others[name] = _assemble(batch, [one[:3] for one in told if one[3]])
    if "engine" in needs.others:
        old = others["old"].logp
        noted = batch.notes.get("logp", torch.full_like(old, torch.nan))  # demonstrations have no notes
        others["engine"] = StepOutput(torch.where(noted.isnan(), old, noted.to(old)))
    return batch.replace(others=others)


def _assemble(batch: Batch, said: list) -> StepOutput:
    """Put the answers about micro-batches back in the places of the batch."""

    def whole(parts: list) -> torch.Tensor:
        first = parts[0][2]
        out = first.new_zeros((*batch.mask.shape, *first.shape[2:]), device="cpu")
        for rows, columns, value in parts:
            width = out[:, columns].shape[1]
            out[rows, columns] = pad_to(value.cpu(), width, 1)
        return out

    names = said[0][2].extra
    extra = {
        name: whole([(rows, columns, output.extra[name]) for rows, columns, output in said]) for name in names
    }
    return StepOutput(whole([(rows, columns, output.logp) for rows, columns, output in said]), extra)


def update(run: Run, batch: Batch) -> None:
    """Take one pass over the batch: an optimizer step for every part."""
    for part in batch.parts(run.minibatches):
        part = part.replace(totals=run.processes.rank_mean(part.count()))
        if not part.totals.steps:  # the filter dropped everything: there is no direction to step in
            continue
        part = part.replace(weight=run.objective.weigh(part))
        run.guard.begin(run, part)
        within_memory(run, partial(accumulate, run, part))
        run.step_optimizer()


def accumulate(run: Run, part: Batch) -> None:
    """Add up the gradients of the micro-batches of a part."""
    run.guard.forget(run)  # of a pass that ran out of memory
    micros = largest_first(part.split(run.micro_batch_steps, run.needs.unit))
    for micro, counts, last in run.processes.even(micros):
        micro = micro.on(run.processes.device)
        with run.processes.accumulating(run.policy.module, last):
            loss, metrics = run.objective(run.policy(micro, run.needs.extra), micro)
            run.backward(counts * loss, metrics, counts)
        if counts:
            run.guard.note(loss, micro)
