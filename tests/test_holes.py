"""Steps inside a row that are not learned from, such as a tool's answer: they change nothing around them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmrl.core.reward_table import ABSENT, RewardTable
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Unit
from tests.test_contracts import CHAIN, OBJECTIVES, PARTS, batch_of, each, policy_of, table_of

AT = 1  # the column that is put in: a hole in every row of two steps or more
# A part of `lost_likelihood` ends at a hole: that is what the option `gate: action` is for.
PART_BY_PART = ("lost_likelihood",)


def widened(values: Tensor, fill: float) -> Tensor:
    """Put a column of what must not matter into (N, T, ...)."""
    return torch.cat([values[:, :AT], torch.full_like(values[:, :1], fill), values[:, AT:]], 1)


def with_hole(new: StepOutput, batch: Batch) -> tuple[StepOutput, Batch]:
    """Put in steps that were not chosen by the policy, with numbers of their own."""
    others = {name: other.map(lambda v: widened(v, -0.7)) for name, other in batch.others.items()}
    return new.map(lambda value: widened(value, -2.3)), batch.replace(
        mask=widened(batch.mask, 0.0),
        advantage=widened(batch.advantage, 0.0),
        notes={name: widened(note, torch.nan) for name, note in batch.notes.items()},
        others=others,
    )


def learned(objective, new: StepOutput, batch: Batch) -> tuple[Tensor, ...]:
    """Give the loss of an update, its gradients by every output of the policy, and its metrics."""
    batch = batch.replace(totals=batch.count())
    batch = batch.replace(weight=objective.weigh(batch))
    leaves = {name: value.detach() for name, value in {"logp": new.logp, **new.extra}.items()}
    leaves = {name: v.requires_grad_() if v.is_floating_point() else v for name, v in leaves.items()}
    given = StepOutput(leaves["logp"], {name: v for name, v in leaves.items() if name != "logp"})
    loss, metrics = objective(given, batch)
    moved = [value for value in leaves.values() if value.requires_grad]
    slopes = torch.autograd.grad(loss, moved, allow_unused=True)
    slopes = [torch.zeros_like(v) if s is None else s for v, s in zip(moved, slopes, strict=True)]
    return loss.detach(), slopes, [metrics[name].detach() for name in sorted(metrics)]


@each(PARTS + OBJECTIVES)
def test_losses_are_those_of_the_rows_without_the_hole(case):
    if case.entry.full_name in PART_BY_PART and case.choice.get("gate") != "response":
        pytest.skip("it takes the parts between holes one by one")
    policy, objective = policy_of(Unit.ROW), case.objective()
    batch = batch_of(policy, objective)
    with torch.no_grad():
        new = policy(batch, objective.needs.extra)
    loss, slopes, metrics = learned(objective, new, batch)
    assert max(float(slope.abs().max()) for slope in slopes) > 1e-4
    found = learned(objective, *with_hole(new, batch))
    torch.testing.assert_close(found[0], loss, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(found[2], metrics, rtol=1e-6, atol=1e-7)
    for slope, wanted in zip(found[1], slopes, strict=True):
        torch.testing.assert_close(slope, widened(wanted, 0.0), rtol=1e-9, atol=1e-12)


# ---- chains: where nothing was noted there is a hole


def with_unnoted_step(table: RewardTable) -> RewardTable:
    """Put in a step of which the engine noted nothing."""
    ends = torch.where(table.ends > AT, table.ends + 1, table.ends)
    notes = {name: widened(note, torch.nan) for name, note in table.notes.items()}
    return replace(table, ends=ends, notes=notes, length=table.length + (table.length > AT))


READS_STEPS = [case for case in CHAIN if case.entry.needs.notes or case.entry.of_others]


@each(READS_STEPS)
def test_chains_that_read_steps_are_those_of_the_rows_without_the_hole(case):
    table = table_of()
    wanted, found = case.make()(table), case.make()(with_unnoted_step(table))
    places = torch.arange(found.ends.shape[1])
    if wanted.ends.shape[1] != found.ends.shape[1]:  # by step: without the hole
        places = places[places != AT]
    there = wanted.ends != ABSENT
    torch.testing.assert_close(
        torch.where(there[:, None], found.values[:, :, places], 0.0),
        torch.where(there[:, None], wanted.values, 0.0),
    )
    assert torch.equal(found.learn[:, places] & there, wanted.learn & there)
