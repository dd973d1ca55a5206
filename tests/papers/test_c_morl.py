"""The barrier: weights by slack, the running mean, and what is said of a reward that is not there."""

from __future__ import annotations

import pytest

from mmrl.advantages.normalize import group_center
from mmrl.papers.c_morl import Barrier
from tests.support.tables import assert_rows, reward_table


def observed(mean, **options):
    barrier = Barrier(thresholds={"safe": 3.6}, **options)
    barrier.observe((), reward_table({"right": [0.0], "safe": [mean]}))
    return barrier


@pytest.mark.parametrize("mean, slack, weight", [(3.8, 0.2, 0.25), (3.61, 0.01, 5), (3.5, 0.001, 50)])
def test_a_reward_weighs_the_more_the_closer_it_is_to_its_threshold(mean, slack, weight):
    told = observed(mean).pop_metrics()
    assert told == {"barrier/safe/slack": pytest.approx(slack), "barrier/safe/weight": pytest.approx(weight)}


def test_the_objective_and_the_constraints_are_added_up():
    table = group_center(reward_table({"right": [1, 0], "safe": [3, 5]}, weights={"right": 2.0, "safe": 7.0}))
    found = observed(3.8)(table)
    # 2 (+-.5) + .25 (-+1)
    assert_rows(found.values[:, 0, 0], [0.75, -0.75])
    assert found.names == ("total",)


def test_the_mean_runs_over_rounds_and_is_restored():
    barrier = observed(4.0, decay=0.9)
    barrier.observe((), reward_table({"right": [0, 0, 0], "safe": [3.0, None, 3.0]}))
    assert barrier.means == {"safe": pytest.approx(3.9)}
    barrier.observe((), reward_table({"right": [0], "safe": [None]}))
    other = Barrier(thresholds={"safe": 3.6})
    other.load_state_dict(barrier.state_dict())
    assert other.means == barrier.means == {"safe": pytest.approx(3.9)}


def test_a_threshold_of_no_reward_is_named():
    with pytest.raises(ValueError, match="no reward called 'safe'"):
        Barrier(thresholds={"safe": 1.0})(reward_table([1, 0]))
