"""The doctor: a small collection of a run is made and looked at by every checkup."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import Entry
from mmrl.config.schema import Config, Evaluation, Piece
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Batch
from mmrl.diagnostics.context import Examined, Symptom
from mmrl.diagnostics.memory_estimate import estimated, in_use, room
from mmrl.runtime.modules import evaluating
from mmrl.training.collect import Collection, collect

if TYPE_CHECKING:
    from mmrl.training.trainer import Run

ADAPTER = ("lora_", "adapter")  # how the parameters of adapters are called
SPARE = 0.1  # of the trained parameters may have a gradient of 0
NUDGE = 1e-3  # an adapter begins at 0, where half of its gradients are 0 as well


@dataclass(frozen=True)
class Report:
    """What the doctor found, by checkup, and what the run will take."""

    found: Sequence[tuple[Entry, Sequence[Symptom]]]
    plan: Mapping[str, float]
    room: float
    device: str

    @property
    def healthy(self) -> bool:
        """Tell whether no checkup complains."""
        return not any(symptom.grave for _, symptoms in self.found for symptom in symptoms)


# ---- in the first step of a run


def glance(run: Run, collection: Collection, credit: RewardTable) -> list[Symptom]:
    """Look at the first step of a run, as far as that costs nothing."""
    examined = Examined(
        config=run.config,
        policy=run.policy,
        engine=run.engine,
        rewards=run.rewards,
        needs=run.needs,
        rollouts=collection.rollouts[: int(collection.table.mine.sum())],
        table=collection.seen,
        untouched=run.untouched or (),
        idle=idle(run.policy.module),
    )
    return [symptom for piece in run.checkups for symptom in piece(examined)]


def idle(module: nn.Module) -> list[str]:
    """Name parameters that look like an adapter's and are not trained."""
    return [
        name
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and any(mark in name for mark in ADAPTER)
    ]


# ---- beforehand


def examine(config: Config, *, num_prompts: int = 4) -> Report:
    """Make a run, one small collection of it, and let every checkup that fits look at it."""
    small = dataclasses.replace(
        config,
        rollout=replace(config.rollout, num_prompts=num_prompts, max_rounds=1),
        learn=replace(config.learn, minibatches=1),
        group_filter=Config.group_filter,
        evaluation=Evaluation(),
        eval_steps=0,
    )
    examined = _look(small, config)
    found = [(entry, list(entry.target(examined))) for entry in in_use("checkup", config)]
    return Report(found, examined.plan, *room())


def _look(small: Config, config: Config) -> Examined:
    """Collect with a run, and see where gradients arrive."""
    from mmrl.build import build

    run = build(small, quiet=True)
    run.tick(0)
    collection = collect(run)
    batch = _batch_of(run, collection)
    untouched, saved = _reached(run, batch)

    def again(**options: Any) -> Examined | None:
        if not options.keys() <= run.pieces.check("policy", small.policy).options.keys():
            return None
        policy = Piece(small.policy.name, {**small.policy.options, **options})
        return _look(dataclasses.replace(small, policy=policy), config)

    activations = {f"activations of {run.micro_batch_steps} steps (measured)": saved}
    return Examined(
        config=config,
        policy=run.policy,
        engine=run.engine,
        rewards=run.rewards,
        needs=run.needs,
        rollouts=collection.rollouts,
        table=collection.table,
        batch=batch,
        micro_batch_steps=run.micro_batch_steps,
        untouched=untouched,
        idle=idle(run.policy.module),
        plan={**estimated(config, run.policy, [row.prompt for row in collection.rollouts]), **activations},
        room=room()[0],
        again=again,
    )


def _batch_of(run: Run, collection: Collection) -> Batch:
    """Lay out all rows, whatever the chain would drop, each with an advantage of 1."""
    batch = run.policy.collate(collection.rollouts)
    return batch.replace(
        group=collection.table.group,
        advantage=batch.mask.clone(),
        weight=batch.mask / batch.mask.sum(),
        rows=torch.arange(len(batch)),
    )


def _reached(run: Run, batch: Batch) -> tuple[list[str], float]:
    """Name the trained parameters that log-probabilities do not depend on, and measure what a micro-batch
    keeps for its backward pass, in bytes as it would be at `micro_batch_steps`."""
    module = run.policy.module
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    rows, columns = max(batch.cuts(run.micro_batch_steps, run.needs.unit), key=lambda cut: len(cut[0]))
    micro = batch.select(rows, columns).on(run.processes.device)
    with _nudged([p for _, p in named]), evaluating(module):
        with _counting(module) as kept:
            logp = run.policy(micro, frozenset()).logp
        # Not the plain sum: what is the same for all choices of a step would have no gradient.
        signs = torch.linspace(0.5, 1.5, logp.numel()).view_as(logp).to(logp)
        gradients = (
            torch.autograd.grad((logp * signs * micro.mask).sum(), [p for _, p in named], allow_unused=True)
            if logp.requires_grad
            else [None] * len(named)
        )
        outside = [name for (name, _), g in zip(named, gradients, strict=True) if g is None]
        zero = [name for (name, _), g in zip(named, gradients, strict=True) if g is not None and not g.any()]
    steps = max(1, micro.steps.cost(torch.arange(len(micro))))
    saved = kept() * max(1.0, run.micro_batch_steps / steps)
    # Some networks throw a part of their last block away, whose gradients are 0 in good order.
    return outside + (zero if len(zero) > SPARE * len(named) else []), saved


@contextmanager
def _nudged(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Move parameters a little, and put them back exactly."""
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(NUDGE * noise.to(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


@contextmanager
def _counting(module: nn.Module) -> Iterator[Callable[[], float]]:
    """Add up what is saved for the backward pass, besides weights, each storage once."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: float(sum(kept.values()))
