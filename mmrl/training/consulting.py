"""Values of prompts by a second model, before the prompts are answered."""

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
    """Return a second model's value before the first step of an answer to each prompt.

    Every process computes them, and those of the first count, so that all agree to the last bit. A prompt
    that cannot be read has the mean of the others: what to do with it is known when it is asked.
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
