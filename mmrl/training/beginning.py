"""Start of a run from another run's weights (`init_from`) and parts of its state (`carry`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from mmrl.config.changes import inside
from mmrl.runtime import checkpoint
from mmrl.runtime.checkpoint import CheckpointError
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import one_line
from mmrl.runtime.fsdp import gathered, reshard_state
from mmrl.runtime.watchdog import ProcessFailed
from mmrl.training.trainer import Run

T = TypeVar("T")


def begin_from(run: Run, folder: Path) -> None:
    """Load initial policy weights from a folder; with `init_references`, also into `frozen` references."""
    with (
        gathered(run.policy.module, changed=True) as loads,
        run.processes.fail_together(f"loading '{folder}'"),
    ):
        try:
            if loads:
                run.policy.load(folder)
        except (KeyError, ValueError, RuntimeError, TypeError, OSError) as error:
            raise CheckpointError(
                f"the weights in '{folder}' (init_from) do not fit the policy: {one_line(error, 300)}; "
                "set up the policy as it was for them (policy.model, lora_rank), or name another folder"
            ) from error
    for reference in run.method.references.values():
        # Moving averages of the weights (EMA references) start from the loaded weights.
        if reference.decay < 1 or run.config.init_references:
            reference.snapshot()
    if run.config.carry:
        _carry(run, folder.parent)
    run.report.console.say(f"beginning from the weights in {folder}")


def _carry(run: Run, folder: Path) -> None:
    """Restore state from the checkpoint of another run; the key `carry` of the configuration lists it."""
    carried, learner = run.config.carry, run.learner
    state = together(run.processes, partial(checkpoint.read_state, folder))
    pieces = run.stateful["pieces"]
    places = {place for place in {*pieces, *state["pieces"]} if inside(place, *carried)}
    try:
        if "optimizer" in carried:
            groups = learner.optimizer.param_groups
            configured = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            learner.optimizer.load_state_dict(reshard_state(state["optimizer"], learner.trained))
            for group, options in zip(learner.optimizer.param_groups, configured, strict=True):
                group |= options  # keep the moments, but use the weight decay and betas of this run
        if "references" in carried:
            with run.whole_weights(changed=True) as loads, run.processes.fail_together(f"loading '{folder}'"):
                for second in run.seconds.values() if loads else ():
                    second.load(folder)
            for name, reference in run.stateful["references"].items():
                like = () if name in run.seconds else learner.trained
                reference.load_state_dict(reshard_state(state["references"][name], like))
        for place in sorted(places):
            pieces[place].load_state_dict(state["pieces"][place])
    except ProcessFailed:  # a RuntimeError, but another process failed, not the checkpoint
        raise
    except (KeyError, ValueError, RuntimeError, TypeError, OSError) as error:
        raise CheckpointError(
            f"cannot carry {', '.join(carried)} over from '{folder}': {one_line(error, 300)}; both runs "
            "need the same pieces there; leave out of `carry` what does not fit"
        ) from error
    run.report.console.say(f"carried over from {folder}: {', '.join(carried)}")


def together(processes: Processes, work: Callable[[], T]) -> T:
    """Run `work`, a step of loading a checkpoint, so that all processes succeed or all raise.

    If process 0 cannot use the checkpoint, all processes raise `CheckpointError`. If only another process
    cannot use it, all processes raise `ProcessFailed`.
    """
    error: CheckpointError | None = None
    results: list[T] = []
    try:
        results.append(work())
    except CheckpointError as raised:
        error = raised
    except ProcessFailed:  # another process reports the reason
        processes.known = False  # reset, because an older checkpoint may be usable
    reasons = processes.all_gather_object(None if error is None else error.args[0])
    if reasons[0] is not None:
        raise CheckpointError(reasons[0]) from error
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        processes.disagree(failed, f"cannot take up what process 0 can: {reasons[failed[0]]}")
    return results[0]
