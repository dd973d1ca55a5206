"""DNO: worked numbers of soft labels, pairs inside groups, and its limits."""

from __future__ import annotations

import math

from mmrl.config.registry import find
from mmrl.objectives.compare import sigmoid
from mmrl.papers.dno import dno
from tests.objectives.test_compare import gained, shown, slope
from tests.support.tables import assert_rows


def test_pairs_are_inside_of_groups_and_a_group_of_one_has_none():
    alone = [dno(*gained([[0.4], [0.1]], [1, 0])), dno(*gained([[-0.2], [0.9]], [0.5, 2]))]
    rows = [[0.4], [-0.2], [0.1], [0.9], [5.0]]
    both = dno(*gained(rows, [1, 0.5, 0, 2, 3], group=[4, 2, 4, 2, 9]))
    shown(both, (alone[0] + alone[1]) / 3)


def test_dno_takes_the_sigmoid_of_the_reward_gap_as_label():
    # s = sigm(.5) = .622459, z = .1 * 2: -s log sigm(.2) - (1 - s) log sigm(-.2)
    pair = gained([[1.5], [-0.5]], [0.8, 0.3])
    shown(dno(*pair), 0.673647)
    implicit_reward, batch = pair
    pull = 0.1 * (1 / (1 + math.exp(-0.2)) - 0.622459)
    assert_rows(slope(dno(implicit_reward, batch), implicit_reward), [[pull], [-pull]])


def test_dno_with_steep_labels_is_dpo_and_with_equal_rewards_asks_for_no_margin():
    shown(dno(*gained([[1.5], [-0.5]], [0.8, 0.3]), scale=1e3), sigmoid(*gained([[1.5], [-0.5]], [1, -1])))
    implicit_reward, batch = gained([[0.7], [0.7]], [1, 1])
    assert not slope(dno(implicit_reward, batch), implicit_reward).any()


def test_defaults_are_those_of_the_method_file():
    assert find("compare", "dno").options["beta"].default == 0.1
