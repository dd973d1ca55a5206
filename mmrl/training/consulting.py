"""Value estimates of prompts by a critic, before any answer is sampled."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config.registry import Needs
from mmrl.core.protocols import LogProbs, Policy
from mmrl.core.types import Outcome, Prompt, PromptError, Trajectory
from mmrl.runtime.distributed import Processes
from mmrl.training.loop import evaluate_references


def values_of(
    prompts: Sequence[Prompt],
    *,
    policy: Policy,
    model: LogProbs,
    processes: Processes,
    micro_batch_steps: int,
) -> list[float]:
    """Return the critic's value estimate of each prompt's initial state, before the first answer token.

    Every process computes all values and uses those of process 0, so that they agree bit for bit. An
    unreadable prompt gets the mean of the other values; its error is handled when the prompt is rolled out.
    """
    rows, unread = dict[int, Trajectory](), None
    for place, prompt in enumerate(prompts):
        try:
            rows[place] = policy.encode(prompt, Outcome(text=""))
        except PromptError as error:
            unread = error
    if unread is not None and not rows:
        raise unread
    batch = policy.collate(tuple(rows.values()))
    needs = Needs(others={"value": frozenset({"value"})})
    batch = evaluate_references(
        {"value": model}, batch, needs, micro_batch_steps, processes.pad_micro_batches
    )
    values = batch.others["value"].extra["value"][:, 0].double()
    read = dict(zip(rows, processes.all_gather_object(values.tolist())[0], strict=True))
    mean = sum(read.values()) / len(read)
    return [read.get(place, mean) for place in range(len(prompts))]
