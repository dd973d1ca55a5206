"""Prefetch of rollouts for later training steps, so that workers sample while the policy learns.

With `rollout.max_staleness: k`, the rollouts of step t are requested at the start of step t - k, with the
weights of that time (of step 0 for the first k steps). So results do not depend on the speed of workers, and
the objective can correct for the lag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from mmrl.core.protocols import AsyncEngine
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import VERSION, Prompt, Rollouts
from mmrl.runtime.fsdp import local_copy, reshard_state
from mmrl.training.trainer import InFlight, Run


def prefetch(run: Run) -> None:
    """Draw prompts and request rollouts for all steps up to `max_staleness` steps after this one."""
    now, size = run.stream.step, run.config.rollout
    last = min(now + size.max_staleness, run.config.max_steps - 1)
    for step in range(now + 1 + len(run.ahead), last + 1):
        run.ahead.append(_request_step(run, step))


def _request_step(run: Run, step: int) -> InFlight:
    """Draw the prompts of a step and request their rollouts; request nothing if no prompt is readable.

    Random draws are those of training step `step`. Scheduled options of the engine keep their current values.
    """
    size, trained, clock = run.config.rollout, run.learner.trained, run.pieces.clock
    with _at_step(run, step):
        prompts = run.unreadable.rest(run.method.sampler.draw(size.num_prompts, size.num_generations))
        for prompt in prompts:  # a checkpoint stores requested prompts by uid
            if run.prompts_by_uid.get(prompt.uid) is not prompt:
                raise ValueError(
                    f"the sampler changed the prompt '{prompt.uid}', which cannot be asked ahead; set "
                    "`rollout.max_staleness: 0`"
                )
        with run.rollout_weights():
            if run.ahead and run.ahead[-1].clock.step == clock.step:  # same weights: share one copy
                weights = run.ahead[-1].weights
            else:  # process 0 copies all weights; with sharding, each process copies its shards
                saves = run.processes.main or run.processes.shards
                weights = tuple(map(local_copy, trained)) if saves else ()
            prompts = _request(run, prompts)
    uids = tuple(prompt.uid for prompt in prompts)
    return InFlight(step, uids, weights, clock, dict(run.pieces.scheduled))


def requested_prompts(run: Run) -> tuple[list[Prompt], int] | None:
    """Return this step's prefetched prompts, and the training step of the weights that sample them.

    After a resume, first repeats all requests that the checkpoint stores, in their order. Returns None if
    nothing was requested for this step.
    """
    _request_again(run)
    if not run.ahead or run.ahead[0].step != run.stream.step:
        return None
    ahead = run.ahead.popleft()
    prompts = [run.prompts_by_uid[uid] for uid in ahead.uids]
    return (prompts, ahead.clock.step) if prompts else None


def _request_again(run: Run) -> None:
    """Repeat the requests of a resumed run, with the weights, clock and options of each request."""
    trained, pieces = run.learner.trained, run.pieces
    lost = [ahead for ahead in run.ahead if not ahead.requested]
    if not lost:
        return
    now = [weight.detach().clone() for weight in trained]
    clock, scheduled = pieces.clock, {**pieces.scheduled}
    try:
        for ahead in lost:
            _copy(reshard_state(tuple(ahead.weights), trained), trained)
            pieces.tick(ahead.clock, {**scheduled, **ahead.scheduled})
            with _at_step(run, ahead.step):
                prompts = _request(run, [run.prompts_by_uid[uid] for uid in ahead.uids])
            ahead.uids, ahead.requested = tuple(prompt.uid for prompt in prompts), True
    finally:
        _copy(now, trained)
        pieces.tick(clock, scheduled)


def with_version(rows: Rollouts, version: int, step: int) -> Rollouts:
    """Add the note `VERSION` (training step of the sampling weights) to rows that older weights sampled."""
    if version == step:
        return rows
    return tuple(
        row
        if VERSION in row.notes
        else replace(row, notes={**row.notes, VERSION: torch.full((row.length,), float(version))})
        for row in rows
    )


def _request(run: Run, prompts: list[Prompt]) -> list[Prompt]:
    """Request rollouts for prompts; return the readable ones, or raise if unreadable ones are an error."""
    engine = cast(AsyncEngine, run.method.engine)
    while prompts:
        mine, _ = run.processes.assign_prompts(prompts, RewardTable.empty())
        sampling = run.processes.sampling(engine)
        with run.processes.fail_together("asking for rollouts"), run.unreadable.catching(), sampling:
            engine.ask(mine)
        if not run.unreadable.agree(run.processes):
            run.processes.compare(engine)
            break
        prompts = run.without_unreadable(prompts)
    return prompts


@contextmanager
def _at_step(run: Run, step: int) -> Iterator[None]:
    """Make random draws inside this context those of another training step."""
    before, run.stream.step = run.stream.step, step
    try:
        yield
    finally:
        run.stream.step = before


@torch.no_grad()
def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for old, new in zip(target, source, strict=True):
        old.copy_(new)
