"""Schedules that follow what was reported."""

from __future__ import annotations

from mmrl.config.binding import Pieces
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from mmrl.schedules import RunningMean, Towards, last_metric


def clock(step, chosen, rejected=0.0):
    return Clock(step, {"rewards/chosen": chosen, "rewards/rejected": rejected})


def test_reported_is_the_mean_of_the_step_before():
    assert last_metric(clock(1, 1.0, 0.5)) == 0.75
    assert last_metric(clock(1, 1.0, 0.5), metrics=("rewards/chosen",)) == 1.0
    assert last_metric(Clock(), start=0.25) == 0.25
    assert last_metric(Clock(1, {"rewards/chosen": 1.0})) == 0.0  # one of two is missing


def test_running_mean_is_over_all_steps():
    # 1, then (1 + 0) / 2, then (1 + 0 + 2) / 3
    follow = RunningMean()
    assert [follow(clock(step, 2 * value)) for step, value in enumerate((1.0, 0.0, 2.0))] == [1.0, 0.5, 1.0]
    assert RunningMean(start=0.5)(Clock()) == 0.5
    assert follow(Clock(3)) == 1.0  # nothing was reported


def test_running_mean_goes_on_from_what_was_saved():
    one, other = RunningMean(), RunningMean()
    one(clock(1, 3.0))
    other.load_state_dict(one.state_dict())
    assert one(clock(2, 1.0)) == other(clock(2, 1.0)) == 1.0


def test_a_multiplier_rises_while_its_constraint_is_broken():
    # R2VPO: .04 + .1 (.055528 - .01); far below the target it stops at 0
    dual = Towards(metrics=("variance",), target=0.01, rate=0.1, start=0.04)
    assert dual(Clock()) == 0.04
    assert abs(dual(Clock(1, {"variance": 0.055528})) - 0.044553) < 1e-6
    assert dual(Clock(2, {"variance": -9.0})) == 0.0
    assert dual(Clock(3, {"variance": 1.01})) == 0.1


def test_an_adaptive_entropy_coefficient_moves_by_a_constant_within_limits():
    # up by .005 below the target of .2, down above it, from 0 to .01
    follow = Towards(metrics=("entropy",), target=0.2, rate=-0.005, high=0.01, form="sign")
    values = [
        follow(Clock(step, {"entropy": e})) for step, e in enumerate((0.1, 0.0, 0.1, 0.2, 0.9, 9.0, 9.0))
    ]
    assert values == [0.005, 0.01, 0.01, 0.01, 0.005, 0.0, 0.0]
    other = Towards(metrics=("entropy",), target=0.2)
    follow(Clock(8, {"entropy": 0.1}))
    other.load_state_dict(follow.state_dict())
    assert other(Clock()) == 0.005


def test_a_shift_follows_the_mean_reward_and_is_saved_with_the_run():
    pieces = Pieces(Stream())
    option = {"name": "bco_pair", "delta": {"name": "running_mean"}}
    objective = pieces.make("objective", piece("comparison", implicit_reward="log_ratio", compare=[option]))
    assert objective.compare[0].options["delta"] == 0.0
    for step, wanted in ((1, 1.0), (2, 2.0)):
        pieces.tick(clock(step, 2.0 * (2 * step - 1)))
        assert objective.compare[0].options["delta"] == wanted
    saved = [made.state_dict() for made in pieces.made.values() if hasattr(made, "state_dict")]
    assert saved == [{"mean": 2.0, "count": 2}]


def piece(name, **options):
    from mmrl.config.schema import Piece

    return Piece(name, options)
