"""AdaR1: pairs across styles and within one, worked out by hand."""

from __future__ import annotations

import torch

from mmrl.papers.adar1 import bilevel_pairs
from tests.support.tables import reward_table


def styled(right, short, length):
    rewards = {"right": right, "short": short}
    return reward_table(rewards, weights={"short": 0.0}, length=length, group=["a"] * len(right))


def signs(table):
    found = bilevel_pairs(table, of="right", short="short")
    at_end = found.values[:, 0].gather(1, found.last[:, None])[:, 0]
    assert torch.equal(found.learn.any(-1), at_end != 0)
    return at_end.tolist(), found.group


def test_bilevel_pairs_prefer_the_short_style_where_both_are_as_often_right():
    # accuracies .75 and .75; of the short right answers 210, 180 and 400 the second and the third
    table = styled([1, 1, 1, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4, [900, 800, 700, 600, 210, 180, 400, 50])
    found, group = signs(table)
    assert found == [-1, 0, 0, 0, 1, 1, -1, 0]  # across: the first long answer, and 210
    assert group[4] == group[0] != group[5] == group[6] == table.group[5]


def test_bilevel_pairs_prefer_long_thinking_where_it_is_right_more_often():
    found, _ = signs(styled([1, 0, 1, 0, 0], [0, 0, 0, 1, 1], [9, 8, 7, 2, 1]))
    assert found == [-1, 1, 1, -1, 0]  # within: 7 and 9; across: what is left of the long ones
    table = styled([1, 0, 1, 0, 0], [0, 0, 0, 1, 1], [9, 8, 7, 2, 1])
    kept = bilevel_pairs(table, of="right", short="short", margin=0.7)  # 2 / 3 is not enough
    assert kept.values[:, 0, 0].tolist() == [-1, 0, 0, 1, 0]


def test_bilevel_pairs_without_right_answers_or_with_one_style():
    assert signs(styled([0, 0], [0, 1], [3, 2]))[0] == [-1, 1]
    assert signs(styled([1, 1, 0], [0, 0, 0], [3, 2, 1]))[0] == [-1, 1, 0]
    assert signs(styled([1, 1], [0, 0], [3, 3]))[0] == [0, 0]
    assert signs(styled([1, None], [1, 0], [3, 2]))[0] == [0, 0]
