"""Steps inside a row that are not learned from, such as a tool's answer: they change nothing around them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmrl.advantages.select import per_step
from mmrl.core.reward_table import ABSENT, RewardTable
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import pad_to
from mmrl.core.types import Unit
from tests.test_contracts import CHAIN, OBJECTIVES, PARTS, batch_of, each, policy_of, table_of

AT = 1  # the column that is put in: a hole in every row of two steps or more
# A part of `lost_likelihood` ends at a hole: that is what the option `gate: action` is for.
PART_BY_PART = ("lost_likelihood",)


def widened(values: Tensor, fill: float, at: int = AT) -> Tensor:
    """Put a column of what must not matter into (N, T, ...)."""
    return torch.cat([values[:, :at], torch.full_like(values[:, :1], fill), values[:, at:]], 1)


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
        new = policy(batch, objective.needs.outputs)
    loss, slopes, metrics = learned(objective, new, batch)
    assert max(float(slope.abs().max()) for slope in slopes) > 1e-4
    found = learned(objective, *with_hole(new, batch))
    torch.testing.assert_close(found[0], loss, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(found[2], metrics, rtol=1e-6, atol=1e-7)
    for slope, wanted in zip(found[1], slopes, strict=True):
        torch.testing.assert_close(slope, widened(wanted, 0.0), rtol=1e-9, atol=1e-12)


# ---- chains: where nothing was noted there is a hole


def with_unnoted_step(table: RewardTable, at: int) -> tuple[RewardTable, Tensor]:
    """Put a step of which the engine noted nothing into every row that has notes; return those rows (N,)."""
    into = (table.length > at) & ~table.notes["logp"].isnan().all(-1)  # a demonstration has no holes
    ends = torch.where((table.ends > at) & into[:, None], table.ends + 1, table.ends)
    notes = {}
    for name, note in table.notes.items():
        beside = pad_to(note, note.shape[1] + 1, 1, torch.nan)
        notes[name] = torch.where(into[:, None], widened(note, torch.nan, at), beside)
    return replace(table, ends=ends, notes=notes, length=table.length + into), into


def assert_same_without_the_hole(found: RewardTable, wanted: RewardTable, into: Tensor, at: int) -> None:
    places = torch.arange(wanted.ends.shape[1]).expand_as(wanted.ends)
    if found.ends.shape[1] != wanted.ends.shape[1]:  # by step
        assert not found.valid[into][..., at].any(), "what was not chosen has no credit"
        places = places + ((places >= at) & into[:, None])
    there, columns = wanted.ends != ABSENT, places[:, None].expand_as(wanted.values)
    known = wanted.valid & there[:, None]
    assert torch.equal(found.valid.gather(2, columns) & there[:, None], known)
    torch.testing.assert_close(
        torch.where(known, found.values.gather(2, columns), 0.0), torch.where(known, wanted.values, 0.0)
    )
    assert torch.equal(found.learn.gather(1, places) & there, wanted.learn & there)


# What reads steps says so, or compares by keys, which after `per_step` are those of steps; not so with turns.
READS_STEPS = [c for c in CHAIN if c.entry.needs.notes or c.entry.needs.others or c.entry.of_others]
COMPARES = [c for c in CHAIN if "by" in c.entry.options and not c.entry.needs.turns]


@pytest.mark.parametrize("at", [0, AT])
@each(READS_STEPS)
def test_chains_that_read_steps_are_those_of_the_rows_without_the_hole(case, at):
    table, (holed, into) = table_of(), with_unnoted_step(table_of(), at)
    assert_same_without_the_hole(case.make()(holed), case.make()(table), into, at)


@pytest.mark.parametrize("at", [0, AT])
@each(COMPARES)
def test_comparisons_of_steps_are_those_of_the_rows_without_the_hole(case, at):
    if case.choice.get("center") == "length":
        pytest.skip("it reads how far into the text a step is, which the hole is a part of")
    table = table_of()  # of sampled rows alone, so that steps of one place stay together
    table = table.note("logp", table.notes["logp"].masked_fill(table.notes["logp"].isnan().all(-1, True), -1))
    holed, into = with_unnoted_step(table, at)
    assert_same_without_the_hole(case.make()(per_step(holed)), case.make()(per_step(table)), into, at)
