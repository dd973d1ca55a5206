"""Checks at the start: gradients reach the trained parameters, and the run fits into memory."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.ranges import PositiveFloat
from mmrl.config.registry import check
from mmrl.diagnostics.context import Examined, Finding, spelled


@check(on="start")
def gradient_flow(examined: Examined) -> Iterator[Finding]:
    """Check that a gradient reaches every trained parameter, and that no adapter is frozen."""
    if examined.untouched:
        yield Finding(
            f"no gradient reaches {spelled(examined.untouched)}, though they are to be trained",
            "see that the forward pass goes through them: adapters switched on, nothing detached or under "
            "no_grad, no part of the model that this data never uses",
        )
    if examined.idle:
        yield Finding(
            f"{spelled(examined.idle)} look like an adapter and are frozen, while other weights learn",
            "load the adapter as trainable, or merge it into the weights",
        )


@check(on="start")
def fits_memory(examined: Examined, *, share: PositiveFloat = 0.9) -> Iterator[Finding]:
    """Check that the estimated memory of a run is at most a share of the memory of the machine."""
    needed = sum(examined.memory.values())
    if examined.room and needed > share * examined.room:
        largest = sorted(examined.memory.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in largest)
        yield Finding(
            f"the run wants about {needed / 1e9:.3g} GB of {examined.room / 1e9:.3g} GB; most of it: {parts}",
            "train an adapter (policy.lora_rank), lower learn.micro_batch_steps, turn gradient checkpointing "
            "on, let the engine generate fewer rows at once, or shard over more processes",
        )
