"""Rollouts that are asked for one step ahead, so that workers make them while the policy learns.

The lag is one step, always: every token of a step is sampled with the weights that the step before began
with. So a run gives the same numbers however long its workers take, and its objective can correct for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from mmrl.core.protocols import AsyncEngine
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Clock, Prompt
from mmrl.runtime.fsdp import local_copy, reshard_state
from mmrl.training.trainer import InFlight, Run


def prefetch(run: Run) -> None:
    """Ask for the rollouts of the next step, where `rollout.max_staleness` is 1 and there is one.

    Options of the engine that follow a schedule have their values of this step.
    """
    size, step = run.config.rollout, run.stream.step
    if not size.max_staleness or step + 1 >= run.config.max_steps:
        return
    run.stream.step = step + 1
    try:
        prompts = run.unreadable.rest(run.method.sampler.draw(size.num_prompts, size.num_generations))
        _check_unchanged(run, prompts)
        run.ahead = _ask(run, prompts, run.pieces.clock)
    finally:
        run.stream.step = step


def draw_prompts(run: Run, missing: int) -> list[Prompt]:
    """Draw the prompts of a round, or return those that were asked for ahead."""
    ahead, run.ahead = run.ahead, None
    if ahead is None:
        return run.method.sampler.draw(missing, run.config.rollout.num_generations) if missing > 0 else []
    prompts = [run.prompts_by_uid[uid] for uid in ahead.uids]
    return prompts if ahead.asked else _ask_again(run, ahead, prompts)


def _ask(run: Run, prompts: list[Prompt], clock: Clock) -> InFlight | None:
    """Ask for rollouts with the weights of now; None where no prompt can be read."""
    with run.rollout_weights():
        # Process 0 saves them; of shards every process has its own.
        saves = run.processes.main or run.processes.shards
        weights = tuple(map(local_copy, run.method.trained)) if saves else ()
        prompts = _asked(run, prompts)
        if prompts:
            run.processes.compare(run.method.engine)
    return InFlight(tuple(prompt.uid for prompt in prompts), weights, clock) if prompts else None


def _asked(run: Run, prompts: list[Prompt]) -> list[Prompt]:
    """Ask the engine; return the prompts without those that turned out to be unreadable, or raise."""
    while prompts:
        mine, _ = run.processes.assign_prompts(prompts, RewardTable.empty())
        sampling = run.processes.sampling(run.method.engine)
        with run.processes.fail_together("asking for rollouts"), run.unreadable.catching(), sampling:
            cast(AsyncEngine, run.method.engine).ask(mine)
        if not run.unreadable.agree(run.processes):
            break
        prompts = run.without_unreadable(prompts)
    return prompts


def _ask_again(run: Run, ahead: InFlight, prompts: list[Prompt]) -> list[Prompt]:
    """Ask once more, with the weights of that time, what was asked before the run was stopped."""
    now = [p.detach().clone() for p in run.method.trained]
    clock, run.pieces.clock = run.pieces.clock, ahead.clock
    try:
        _copy(run, reshard_state(tuple(ahead.weights), run.method.trained))
        prompts = _asked(run, prompts)
        if prompts:
            run.processes.compare(run.method.engine)
        return prompts
    finally:
        _copy(run, now)
        run.pieces.clock = clock


@torch.no_grad()
def _copy(run: Run, weights: Sequence[Tensor]) -> None:
    for parameter, value in zip(run.method.trained, weights, strict=True):
        parameter.copy_(value)


def _check_unchanged(run: Run, prompts: Sequence[Prompt]) -> None:
    """Raise for prompts that are not as the data have them: a checkpoint names what is in flight by uid."""
    for prompt in prompts:
        if run.prompts_by_uid.get(prompt.uid) is not prompt:
            raise ValueError(
                f"the sampler changed the prompt '{prompt.uid}', which cannot be asked a step ahead; set "
                "`rollout.max_staleness: 0`"
            )
