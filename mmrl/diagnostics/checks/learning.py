"""Whether what should learn can."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.ranges import PositiveFloat
from mmrl.config.registry import checkup
from mmrl.diagnostics.context import Examined, Symptom, spelled


@checkup
def gradient_flow(examined: Examined) -> Iterator[Symptom]:
    """See whether a gradient reaches every trained parameter, and whether an adapter is trained at all."""
    if examined.untouched:
        yield Symptom(
            f"no gradient reaches {spelled(examined.untouched)}, though they are to be trained",
            "see that the forward pass goes through them: adapters switched on, nothing detached or under "
            "no_grad, no part of the model that this data never uses",
        )
    if examined.idle:
        yield Symptom(
            f"{spelled(examined.idle)} look like an adapter and are frozen, while other weights learn",
            "load the adapter as trainable, or merge it into the weights",
        )


@checkup
def fits_memory(examined: Examined, *, share: PositiveFloat = 0.9) -> Iterator[Symptom]:
    """Compare what a run will take with the memory of the machine; `share` of it may be used."""
    needed = sum(examined.plan.values())
    if examined.room and needed > share * examined.room:
        largest = sorted(examined.plan.items(), key=lambda item: -item[1])[:3]
        told = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in largest)
        yield Symptom(
            f"the run wants about {needed / 1e9:.3g} GB of {examined.room / 1e9:.3g} GB; most of it: {told}",
            "train an adapter (policy.lora_rank), lower learn.micro_batch_steps, turn gradient checkpointing "
            "on, let the engine hold fewer rows at once, or shard over more processes",
        )
