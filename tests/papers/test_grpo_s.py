"""Scaling by a label against its category: DR-IRL's factors, the mean over the run, and what it keeps."""

from __future__ import annotations

import json

import pytest

from mmrl.papers.grpo_s import CategoryScale
from tests.support.tables import assert_rows, reward_table


def hard(*labels, values=None, **options):
    """Build a table with one advantage of .866025 a row and a label `d`."""
    values = values or [0.866025] * len(labels)
    return reward_table({"total": values, "d": labels}, weights={"total": 1.0, "d": 0.0}, **options)


def test_an_answer_weighs_by_its_hardness_over_the_usual_one():
    # sigmoid(.8) / sigmoid(.5) = .689974 / .622459 = 1.108465; .866025 of it is .959959.
    table = hard(0.8, 0.2)
    scale = CategoryScale(of="d")
    assert scale(table).values.equal(table.values)  # nothing was seen yet
    scale.observe((), table)
    found = scale(table)
    assert_rows(found.values[:, 0, 0], [0.959959, 0.866025 * 0.549834 / 0.622459])
    # With alpha_M = 1.1: 1.055954.
    assert_rows(1.1 * found.values[:1, 0, 0], [1.055954])


def test_the_mean_is_over_the_run_and_is_restored():
    scale = CategoryScale(of="d")
    scale.observe((), hard(0.2, 0.3, 0.7))
    scale.observe((), hard(0.8, None))  # a collection is observed before its chain
    other = CategoryScale(of="d")
    other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    for piece in (scale, other):  # the mean of .2, .3, .7 and .8 is .5
        assert_rows(piece(hard(0.8, None)).values[:, 0, 0], [0.959959, 0.866025])


def test_the_gap_of_a_batch_is_compared_with_that_of_the_run():
    # Gaps of groups: .2 in the first batch; .7 and .9, so .8, in the second, and .5 over both.
    scale = CategoryScale(of="d", measure="gap")
    scale.observe((), hard(0.4, 0.6, 0.5, 0.7, group=[0, 0, 1, 1]))
    batch = hard(0.1, 0.8, 0.0, 0.9, group=[0, 0, 1, 1], values=[1.0, -1.0, 2.0, 0.0])
    scale.observe((), batch)
    assert_rows(scale(batch).values[:, 0, 0], [1.108465, -1.108465, 2.216930, 0.0])


def test_categories_are_compared_with_themselves():
    table = hard(0.8, 0.2, 0.9, tags={"category": ["harm", "harm", "fraud"]})
    found = CategoryScale(of="d", by=("category",))
    found.observe((), table)
    assert_rows(found(table).values[:, 0, 0], [0.959959, 0.764983, 0.866025])
    assert len(found.counts) == 2


def test_a_label_that_is_missing_is_named():
    with pytest.raises(ValueError, match="no reward is called 'd'"):
        CategoryScale(of="d")(reward_table([1, 0]))
