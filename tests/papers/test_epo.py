"""EPO: the corridor of entropy and the decay of its weight."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.step_table import StepOutput
from mmrl.core.types import Clock
from mmrl.objectives.penalties import entropy_bonus
from mmrl.papers.epo import entropy_corridor, epo_decay
from tests.support.tables import assert_rows, step_table


def test_epo_pulls_entropy_back_from_both_sides():
    new, batch = step_table([[-1.0] * 3])
    entropy = torch.tensor([[0.1, 1.0, 1.8]], dtype=torch.float64, requires_grad=True)
    loss = entropy_corridor(StepOutput(new.logp, {"entropy": entropy}), batch, coef=2.0, mean=0.8)
    assert_rows(torch.autograd.grad(loss.sum(), entropy)[0], [[-2, 0, 2]])


def along(schedule, moments, **options):
    return [schedule(Clock(step), **options) for step in moments]


def test_the_weight_of_epo_decays_slowly_and_then_fast():
    # 1 - .2 (1 - e^-1) and 1 - .2 (1 - e^-2); then .8 e^-1.5 and .8 e^-3
    assert along(epo_decay, [0, 75, 150, 225, 300, 999], value=1.0, steps=300) == pytest.approx(
        [1, 0.873576, 0.827067, 0.178504, 0.039830, 0.039830], abs=1e-6
    )
    assert epo_decay(Clock(75, max_steps=300), value=0.5) == pytest.approx(0.436788, abs=1e-6)
    assert epo_decay(Clock(0), value=0.5) == 0.5


def test_epo_holds_entropy_in_a_corridor_around_its_mean():
    # .4 to 1.2: the hinge is .3 and .6, mean .225; the indicator .1 and .1, mean .05
    new, batch = step_table([[-1.0] * 4], extra={"entropy": [[0.1, 0.5, 1.0, 1.8]]})
    assert_rows(entropy_corridor(new, batch, coef=1.0, mean=0.8), [[0.3, 0, 0, 0.6]])
    flat = entropy_corridor(new, batch, coef=1.0, mean=0.8, form="indicator")
    assert_rows(flat, [[0.1, 0, 0, 0.1]])
    assert not entropy_corridor(new, batch, coef=1.0).any()  # no past
    # with the bonus, at the weight .873576 of step 37.5 of 150: -.001 (.85 - .873576 * .05)
    whole = entropy_bonus(new, batch, coef=0.001) + 0.001 * 0.873576 * flat
    assert_rows(whole.mean()[None], [-0.000806])
