"""Diagnosis of a configuration before training: every startup check, on a few rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.build import build
from mmrl.config.registry import Entry
from mmrl.config.schema import Config, Evaluation, Piece
from mmrl.core.protocols import RendersPrompts
from mmrl.core.step_table import Batch
from mmrl.core.types import Prompt, Rollouts
from mmrl.diagnostics.context import Examined, Finding, answer_scores
from mmrl.diagnostics.memory_estimates import estimate_with, in_use, room
from mmrl.reporting.answers import target_text
from mmrl.runtime.modules import evaluating
from mmrl.training.collect import collect, in_order
from mmrl.training.loop import add_reference_outputs
from mmrl.training.trainer import Run

SPARE = 0.1  # fraction of trained parameters that may have a gradient of 0
LONGEST = 2000  # characters of a prompt or answer that are shown
NUDGE = 1e-3  # size of noise added to weights; without it, half of a new adapter's gradients are 0


@dataclass(frozen=True)
class Diagnosis:
    """The findings of all checks, an example rollout, and the memory estimate of a run.

    `example` has the rendered prompt, a sampled answer, the target and the rewards.
    """

    found: Sequence[tuple[Entry, Sequence[Finding]]]
    example: Mapping[str, str]
    memory: Mapping[str, float]
    room: float
    device: str

    @property
    def healthy(self) -> bool:
        """Whether all checks passed without a grave finding."""
        return not any(symptom.grave for _, symptoms in self.found for symptom in symptoms)


def examine(config: Config, *, num_prompts: int = 4) -> Diagnosis:
    """Build a run, collect a few rollouts, and apply every applicable startup check."""
    small = replace(
        config,
        rollout=replace(config.rollout, num_prompts=num_prompts, max_rounds=1),
        learn=replace(config.learn, minibatches=1),
        group_filter=Config.group_filter,  # keep all groups, so that checks see them
        evaluation=Evaluation(),  # an evaluation without data loads nothing
        eval_steps=0,
        eval_on_start=False,
    )
    examined = _look(small, config)
    findings = [(entry, list(entry.target(examined))) for entry in in_use("check", config, "start")]
    return Diagnosis(findings, describe_example(examined), examined.memory, *room())


def describe_example(examined: Examined) -> dict[str, str]:
    """Format the first rollout: rendered prompt, answer, target, rewards."""
    row, outcome = examined.rollouts[0], examined.rollouts[0].outcomes[-1]
    match examined.policy:
        case RendersPrompts() as policy:
            prompt = policy.render(row.prompt)
        case _:
            prompt = row.prompt.text
    pixels = next((pixels for pixels in (outcome.image, outcome.video) if pixels is not None), None)
    answer = outcome.text if pixels is None else f"{'x'.join(map(str, pixels.shape))} numbers"
    mine = examined.table.select(examined.table.mine)
    rewards = {name: float(mine.at_end(name)[0]) for name in mine.scored}
    texts = {
        "prompt": prompt,
        "answer": answer or "(no text)",
        "target": target_text(row.prompt.target) or "(none)",
        "rewards": ", ".join(f"{name} {value:.4g}" for name, value in rewards.items()),
    }
    return {name: printable(text) for name, text in texts.items()}


def printable(text: str) -> str:
    """Truncate a text to `LONGEST` characters, and replace control characters."""
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text[:LONGEST])
    return shown + (f" ... ({len(text) - LONGEST} letters more)" if len(text) > LONGEST else "")


def _look(small: Config, config: Config) -> Examined:
    """Collect rollouts of a small run, and find the trained parameters without a gradient."""
    run = build(small, quiet=True)
    run.tick(0)
    collection = collect(run)
    batch = run.policy.collate(collection.rollouts)
    # Give all rows advantage 1, including rows that the advantage functions dropped.
    batch = batch.replace(
        group=collection.table.group,
        advantage=batch.mask.clone(),
        weight=batch.mask / batch.mask.sum(),
        rows=torch.arange(len(batch)),
    )
    untouched, saved = _reached(run, batch)

    def again(**options: Any) -> Examined | None:
        if not options.keys() <= run.pieces.check("policy", small.policy).options.keys():
            return None
        policy = Piece(small.policy.name, {**small.policy.options, **options})
        return _look(replace(small, policy=policy), config)

    def ask(prompts: Sequence[Prompt]) -> Rollouts:
        with run.rollout_weights(), run.processes.unshard(run.policy.module):
            rows = run.method.engine.rollout(prompts)
        return in_order(rows, [prompt.uid for prompt in prompts])

    memory = estimate_with(config, run.policy, [row.prompt for row in collection.rollouts])
    if "learning/activations" not in memory:  # no estimate: use the measured value
        memory = {**memory, f"learning/activations of {run.learner.guard.micro_batch_steps} steps": saved}
    return Examined(
        config=config,
        policy=run.policy,
        engine=run.method.engine,
        rewards=run.method.rewards,
        needs=run.learner.needs,
        rollouts=collection.rollouts,
        table=collection.table,
        credit=run.advantage(add_reference_outputs(run, collection, run.learner.chain)),
        taught=run.learner.taught,
        batch=batch,
        micro_batch_steps=run.learner.guard.micro_batch_steps,
        untouched=untouched,
        memory=memory,
        again=again,
        ask=ask,
    )


def _reached(run: Run, batch: Batch) -> tuple[list[str], float]:
    """List trained parameters without influence on log-probabilities or scores; measure activation memory.

    Returns the names of these parameters, and the bytes that a micro-batch of `micro_batch_steps` saves for
    backward.
    """
    wanted, module = run.learner.guard.micro_batch_steps, run.policy.module
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    rows, columns = max(batch.cuts(wanted, run.learner.needs.unit), key=lambda cut: len(cut[0]))
    micro = batch.select(rows, columns).on(run.processes.device)
    with _nudged(parameters), evaluating(module):
        with saved_storages(module) as kept:
            logp = answer_scores(run.policy, micro, run.learner.needs)
        # Weight steps unequally: a plain sum has gradient 0 for parameters with equal effect on all steps.
        signs = torch.linspace(0.5, 1.5, logp.numel()).view_as(logp).to(logp)
        gradients = [None] * len(named)
        if logp.requires_grad:
            loss = (logp * signs * micro.mask).sum()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        outside = [name for name, g in zip(named, gradients, strict=True) if g is None]
        zero = [name for name, g in zip(named, gradients, strict=True) if g is not None and not g.any()]
    steps = max(1, micro.steps.cost(torch.arange(len(micro))))
    saved = float(sum(kept.values())) * max(1.0, wanted / steps)  # scaled up to a full micro-batch
    # Report zero gradients only if there are many: networks may discard a part of their last block.
    return outside + (zero if len(zero) > SPARE * len(named) else []), saved


@contextmanager
def _nudged(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Add a little noise to parameters inside this context, and restore them exactly."""
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator)  # on the CPU: equal for all devices
                parameter.add_(NUDGE * noise.to(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


@contextmanager
def saved_storages(module: nn.Module) -> Iterator[Mapping[int, int]]:
    """Yield a mapping {address: bytes} of all storages that are saved for backward, except weights."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()  # counted once, however many of its views are saved
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
