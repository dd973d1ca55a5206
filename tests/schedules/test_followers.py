"""Schedules that follow what was reported."""

from __future__ import annotations

from mmrl.config.binding import Pieces
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from mmrl.schedules import RunningMean, last_metric


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
