"""Gradients that are not finite where every loss is: the rows to blame are found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmrl.core.types import Unit
from mmrl.training.learner import Guard
from mmrl.training.loop import train
from mmrl.training.nonfinite import NotFinite
from tests.support.tables import step_table
from tests.support.toys import toy_run
from tests.training.test_nonfinite import left_in

pytestmark = pytest.mark.usefixtures("no_page")

HERE = __name__


def one_kinked_row(log_ratio, new, batch):
    """Give the rows of the first prompt a slope that is infinite where the loss is 0."""
    first = (batch.steps.prompt == 0)[:, None]
    # A branch of `where` that is not taken still passes 0 * infinity back, so the kink is not there at all.
    gap = torch.where(first, new.logp - new.logp.detach(), 1.0)
    return torch.where(first, gap.abs().sqrt(), -log_ratio.exp() * batch.advantage)


def test_only_the_rows_of_a_gradient_that_is_not_finite_are_written_down(tmp_path):
    run = toy_run(tmp_path, objective={"surrogate": f"{HERE}:one_kinked_row"}, rollout={"num_prompts": 8})
    with pytest.raises(NotFinite, match="the gradient of step 0 has the norm nan"):
        train(run)
    assert {row["prompt"] for row in left_in(tmp_path)["rows"]} == {"p0"}


@pytest.mark.parametrize(("bad", "sound"), [((), True), ((0,), False), ((1,), False), ((0, 1), False)])
def test_one_entry_of_one_gradient_is_enough(bad, sound):
    # sqrt(x) at 0 is 0 with the slope infinite; the third parameter is not part of the loss
    trained = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for i in bad:
        trained[i].data[1] = 0.0
    learner = SimpleNamespace(
        processes=SimpleNamespace(device="cpu"),
        needs=SimpleNamespace(unit=Unit.STEP, outputs=frozenset()),
        policy=lambda micro, extra: None,
        objective=lambda new, micro: (trained[0].sqrt().sum() + trained[1].sqrt().sum(), {}),
        trained=trained,
    )
    guard = Guard(learner, micro_batch_steps=100)
    batch = step_table([[-1.0, -2.0]], old=[[-1.0, -2.0]], advantage=[1.0])[1]
    assert guard.is_finite(batch) is sound
