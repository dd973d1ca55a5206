"""Both directions of a steering vector."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.step_table import StepOutput
from tests.support.tables import step_table

DPO = {"name": "comparison", "implicit_reward": "log_ratio", "compare": [{"name": "sigmoid", "beta": 0.1}]}


@pytest.mark.parametrize(
    ("reversed_logp", "second"),
    [([[2.0], [-1.0]], 0.854355), ([[-2.0], [1.0]], 0.554355), ([[0.0], [0.0]], math.log(2))],
)
def test_the_pair_is_swapped_where_the_vector_is_subtracted(reversed_logp, second):
    # Log-ratios 2 of the chosen and -1 of the rejected row: -log sigmoid(.1 * 3) = .554355, and of the
    # swapped pair -log sigmoid(-.3) = .854355 where the other direction has the same, .554355 where it has
    # the opposite ones.
    new, batch = step_table([[2.0], [-1.0]], advantage=[1, -1], group=[0, 0], ref=[[0.0], [0.0]])
    new = StepOutput(new.logp, {"reversed_logp": torch.tensor(reversed_logp)})
    objective = Pieces(Stream()).make("objective", Piece("bidirectional", {"objective": DPO}))
    assert objective.needs.outputs == {"reversed_logp"} and objective.needs.others.keys() == {"ref"}
    loss, metrics = objective(new.detach(), batch.replace(weight=objective.weigh(batch)))
    assert float(loss) == pytest.approx((0.554355 + second) / 2, abs=1e-6)
    assert float(metrics["rewards/accuracies"]) == 1
    assert float(metrics["reversed/rewards/accuracies"]) == (second < math.log(2))
