"""The training loop: collect rollouts, learn, report. It is the same for all methods and modalities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce

import torch

from mmrl.config.binding import Bound
from mmrl.config.registry import Needs
from mmrl.core.progress import advance, showing
from mmrl.core.protocols import LogProbs
from mmrl.core.ragged import Gathered
from mmrl.core.reward_table import Collection, RewardTable
from mmrl.core.step_table import Batch, StepOutput, spread
from mmrl.core.types import Unit
from mmrl.runtime.files import locked
from mmrl.runtime.watchdog import listening
from mmrl.training.ahead import prefetch
from mmrl.training.checkpointing import publish, resume, save
from mmrl.training.collect import collect, pick, replay_after
from mmrl.training.learner import Learner
from mmrl.training.method import per_step_only, through_chain
from mmrl.training.trainer import Run


def train(run: Run) -> bool:
    """Train until `max_steps`, starting from the last checkpoint of the run if there is one.

    After SIGTERM or Ctrl-C the run finishes its step, saves, and ends without the final evaluation. Returns
    False after such a signal, otherwise True. Raises `ConfigError` if another process trains in the folder.
    """
    signals = listening(not run.report.console.quiet)
    shown = showing(run.report.console.work)
    with shown, run.processes.watching(), signals as stop, locked(run.folder, run.processes):
        start = resume(run)
        run.notify("train_begin")
        run.begin(start)
        for step in range(start, run.config.max_steps):
            if run.processes.any(run.ended):  # a callback ended the run, perhaps before it was resumed
                break
            run.tick(step)
            collection = collect(run)
            prefetch(run)
            with run.report.timing("learn"):
                collection, credit, batch = learnable(run, collection)
                for _ in range(run.config.learn.num_iterations):
                    update(run.learner, batch)
            run.finish(step, collection, credit)
            due = run.saves_at(step + 1) or run.processes.any(run.ended)
            if due:
                save(run)
                run.notify("save")
            if run.processes.any(bool(stop.asked)):
                if not due:
                    save(run)
                run.report.leave(step + 1, stop.asked)
                return False
        run.close()
        with run.processes.waiting_for_main():
            publish(run)
        stopped = run.processes.any(bool(stop.asked))  # all steps are done, but later stages must not start
    run.notify("train_end")
    return not stopped


def learnable(run: Run, collection: Collection) -> tuple[Collection, RewardTable, Batch]:
    """Update the additional models (critics), compute advantages, and build the policy's training batch."""
    first = [learner for learner in run.seconds.values() if learner.second and learner.second.learns_first]
    later = [learner for learner in run.seconds.values() if learner not in first]
    for second in first:
        learn(run, second, collection, add_reference_outputs(run, collection, second.chain))
    chains = [*run.learner.chain, *(piece for second in later for piece in second.chain)]
    table = add_reference_outputs(run, collection, chains)
    for second in later:
        learn(run, second, collection, table)
    collection, credit = replay_after(run, collection, run.advantage(table))
    return collection, credit, make_batch(run, run.learner, collection, credit)


def learn(run: Run, second: Learner, collection: Collection, table: RewardTable) -> None:
    """Update an additional model, such as a critic; `table` has the model outputs that its targets read."""
    credit = through_chain(second.chain, table, run.stream.step)
    batch = make_batch(run, second, collection, credit)
    for _ in range(second.num_iterations):
        update(second, batch)


def make_batch(run: Run, learner: Learner, collection: Collection, credit: RewardTable) -> Batch:
    """Create the training batch of a step's rollouts, with advantages and other policies' outputs."""
    rollouts, learned = pick(collection.rollouts, credit, credit.learn.any(-1))
    rollouts = rollouts or (collection.stand_in,)
    batch = spread(learned.select(learned.mine), run.policy.collate(rollouts))
    num_rollouts = float(collection.table.mine.sum())
    batch = batch.replace(order=tuple(dict.fromkeys(learned.group.tolist())), drawn=num_rollouts)
    learner.guard.rollouts = rollouts

    def evaluated() -> Batch:
        steps = learner.guard.micro_batch_steps
        return evaluate_references(
            learner.others, batch, learner.needs, steps, run.processes.pad_micro_batches
        )

    return learner.guard.within_memory(evaluated)


def add_reference_outputs(run: Run, collection: Collection, chain: Sequence[Bound]) -> RewardTable:
    """Add the reference outputs that advantage functions read, such as "ref/logp", to the reward table."""
    needs = reduce(Needs.__or__, (piece.needs for piece in chain), Needs())
    if not needs.others:
        return collection.table
    batch = run.policy.collate(collection.rollouts or (collection.stand_in,))
    policies = {name: run.method.references.get(name, run.policy) for name in needs.others}
    steps = run.learner.guard.micro_batch_steps
    batch = evaluate_references(policies, batch, needs, steps, run.processes.pad_micro_batches)
    mine = collection.table.select(collection.table.mine)
    for name, output in batch.others.items():
        for key, value in {"logp": output.logp, **output.extra}.items():
            per_step_only(f"{name}/{key}", value)
            mine = mine.note(
                f"{name}/{key}", value.double().where(batch.mask.cpu() > 0, torch.nan)[: len(mine)]
            )
    return run.processes.joined(mine)


def evaluate_references(
    policies: Mapping[str, LogProbs],
    batch: Batch,
    needs: Needs,
    micro_batch_steps: int,
    even: Callable[[list], Iterable[tuple]] = lambda cuts: ((cut, 1.0, False) for cut in cuts),
) -> Batch:
    """Add the outputs of other policies to a batch, without gradient and on the CPU.

    The entry `engine` gets the log-probabilities that the engine recorded while sampling; steps without a
    record get the log-probabilities of `old`.

    Args:
        policies: Policies to evaluate, by name.
        batch: The steps to evaluate the policies on.
        needs: The outputs to compute besides log-probabilities, by policy.
        micro_batch_steps: Largest number of steps in one forward pass.
        even: Pads the list of micro-batches to the same number on every process, for sharded weights.
    """
    others = dict(batch.others)
    for name, policy in policies.items():
        gathered = Gathered(batch.mask.shape)
        cuts = list(batch.cuts(micro_batch_steps, Unit.STEP))
        for number, ((rows, steps), counts, _) in enumerate(even(cuts)):
            advance(f"evaluating the policy '{name}', micro-batches", min(number, len(cuts)), len(cuts))
            with torch.no_grad():
                output = policy(batch.select(rows, steps), needs.others.get(name, frozenset()))
            if counts:
                gathered.put(rows, steps, {"logp": output.logp, **output.extra})
        columns = gathered.columns()
        others[name] = StepOutput(columns.pop("logp"), columns)
    if "engine" in needs.others:
        old = others["old"].logp
        noted = batch.notes.get("logp", torch.full_like(old, torch.nan))  # NaN for demonstrations
        others["engine"] = StepOutput(torch.where(noted.isnan(), old, noted.to(old)))
    return batch.replace(others=others)


def update(learner: Learner, batch: Batch) -> None:
    """Make one pass over the batch, with an optimizer step for each of its minibatches."""
    for part in batch.parts(learner.minibatches):
        part = part.replace(totals=learner.processes.rank_mean(part.count()))
        # `totals` are equal on all processes, so every process skips the same minibatches.
        if not part.totals.steps:  # all rows were filtered out: no gradient
            continue
        part = part.replace(weight=learner.objective.weigh(part))
        learner.guard.begin(part)
        learner.guard.within_memory(partial(accumulate, learner, part))
        learner.step_optimizer()


def accumulate(learner: Learner, part: Batch) -> None:
    """Accumulate the gradients of the micro-batches of `part`, a minibatch."""
    guard, processes, needs = learner.guard, learner.processes, learner.needs
    guard.forget()  # on a retry: discard the pass that ran out of memory
    micros = largest_first(part.split(guard.micro_batch_steps, needs.unit))
    for number, (micro, counts, last) in enumerate(processes.pad_micro_batches(micros)):
        advance("learning, micro-batches", min(number, len(micros)), len(micros))
        micro = micro.on(processes.device)
        with processes.accumulating(learner.policy.module, last):
            loss, metrics = learner.objective(learner.policy(micro, needs.outputs), micro)
            processes.backward(counts * loss)
        guard.note(loss, metrics, micro, counts)


def largest_first(micros: list[Batch]) -> list[Batch]:
    """Sort micro-batches from large to small, so that a run out of memory fails at once."""
    return sorted(micros, key=lambda micro: micro.steps.cost(torch.arange(len(micro))), reverse=True)
