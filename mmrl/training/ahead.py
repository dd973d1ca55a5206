"""Rollout requests one step ahead, so that workers sample while the policy learns.

The lag is always one step: the tokens of a step are sampled with the weights from the start of the previous
step. So results do not depend on the speed of workers, and the objective can correct for the lag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from mmrl.core.protocols import AsyncEngine
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Clock, Prompt
from mmrl.runtime.fsdp import local_copy, reshard_state
from mmrl.training.trainer import InFlight, Run


def prefetch(run: Run, step: int, clock: Clock) -> InFlight | None:
    """Draw the prompts of a step and request their rollouts; return None if no prompt can be read.

    The random draws are those of `step`. Scheduled options of the engine have their values at `clock`.
    """
    size, trained = run.config.rollout, run.learner.trained
    with _at(run, step, clock):
        prompts = run.unreadable.rest(run.method.sampler.draw(size.num_prompts, size.num_generations))
        for prompt in prompts:  # a checkpoint stores requested prompts by uid
            if run.prompts_by_uid.get(prompt.uid) is not prompt:
                raise ValueError(
                    f"the sampler changed the prompt '{prompt.uid}', which cannot be asked a step ahead; set "
                    "`rollout.max_staleness: 0`"
                )
        with run.rollout_weights():
            # Process 0 stores full weights; if they are sharded, every process stores its shards.
            saves = run.processes.main or run.processes.shards
            weights = tuple(map(local_copy, trained)) if saves else ()
            prompts = _request(run, prompts)
    return InFlight(tuple(prompt.uid for prompt in prompts), weights, clock) if prompts else None


def requested_prompts(run: Run, ahead: InFlight) -> list[Prompt]:
    """Return the prompts whose rollouts were requested; after a resume, request them again first."""
    prompts = [run.prompts_by_uid[uid] for uid in ahead.uids]
    if ahead.requested:
        return prompts
    trained = run.learner.trained
    now = [parameter.detach().clone() for parameter in trained]
    try:
        _copy(reshard_state(tuple(ahead.weights), trained), trained)
        with _at(run, run.stream.step, ahead.clock):
            return _request(run, prompts)
    finally:
        _copy(now, trained)


def _request(run: Run, prompts: list[Prompt]) -> list[Prompt]:
    """Request rollouts for prompts; return the readable prompts, or raise if unreadable ones are an error."""
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
def _at(run: Run, step: int, clock: Clock) -> Iterator[None]:
    """Set the step of the random streams and the clock of the schedules inside this context."""
    before = run.stream.step, run.pieces.clock
    run.stream.step, run.pieces.clock = step, clock
    try:
        yield
    finally:
        run.stream.step, run.pieces.clock = before


@torch.no_grad()
def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for old, new in zip(target, source, strict=True):
        old.copy_(new)
