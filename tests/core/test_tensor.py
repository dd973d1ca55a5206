"""Arithmetic over groups of rows."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.core.tensor import (
    cat_padded,
    group_count,
    group_extreme,
    group_index,
    group_mean,
    group_range,
    group_rank,
    group_std,
    group_sum,
    masked_mean,
    pad_to,
)
from tests.support.tables import assert_rows

VALUES = torch.tensor([1.0, 10.0, 3.0, 8.0, 100.0], dtype=torch.float64)
INDEX = torch.tensor([0, 1, 0, 1, 2])
ALL = torch.ones(5, dtype=torch.bool)


def test_group_index_numbers_what_agrees_in_every_column():
    a, b = torch.tensor([7, 7, 5, 7]), torch.tensor([1, 2, 1, 1])
    index = group_index([a, b])
    assert index[0] == index[3]
    assert len(index.unique()) == 3
    assert sorted(index.unique().tolist()) == [0, 1, 2]


def test_group_index_of_nothing_is_empty():
    assert group_index([torch.zeros(0, dtype=torch.int64)]).shape == (0,)


def test_group_sum_adds_up_by_group():
    assert group_sum(VALUES, INDEX).tolist() == [4, 18, 100]
    assert group_sum(VALUES, INDEX, 5).tolist() == [4, 18, 100, 0, 0]
    assert group_sum(VALUES[:0], INDEX[:0]).shape == (0,)


def test_every_entry_gets_the_statistics_of_its_group():
    assert_rows(group_mean(VALUES, INDEX, ALL), [2, 9, 2, 9, 100])
    assert_rows(group_count(INDEX, ALL), [2, 2, 2, 2, 1])
    assert_rows(group_std(VALUES, INDEX, ALL), [math.sqrt(2)] * 4 + [0])
    assert_rows(group_std(VALUES, INDEX, ALL, unbiased=False), [1] * 4 + [0])
    assert_rows(group_extreme(VALUES, INDEX, ALL), [3, 10, 3, 10, 100])
    assert_rows(group_extreme(VALUES, INDEX, ALL, largest=False), [1, 8, 1, 8, 100])


def test_entries_that_are_not_valid_count_nowhere_even_if_they_are_no_numbers():
    values = VALUES.clone()
    values[1] = math.nan
    valid = ALL.clone()
    valid[1] = valid[4] = False
    assert_rows(group_mean(values, INDEX, valid), [2, 8, 2, 8, 0])
    assert_rows(group_std(values, INDEX, valid), [math.sqrt(2), 0, math.sqrt(2), 0, 0])
    assert_rows(group_count(INDEX, valid), [2, 1, 2, 1, 0])
    assert group_extreme(values, INDEX, valid).tolist() == [3, 8, 3, 8, -math.inf]
    assert group_extreme(values, INDEX, valid, largest=False)[4] == math.inf


@pytest.mark.parametrize("unbiased", [True, False])
def test_statistics_of_columns_agree_with_those_of_each_group_alone(generator, unbiased):
    values = torch.rand(30, 2, generator=generator, dtype=torch.float64)
    valid = torch.rand(30, 2, generator=generator) > 0.3
    index = torch.randint(0, 4, (30,), generator=generator)
    mean = group_mean(values, index, valid)
    std = group_std(values, index, valid, unbiased=unbiased)
    for row in range(30):
        for column in range(2):
            mine = values[(index == index[row]) & valid[:, column], column]
            assert float(mean[row, column]) == pytest.approx(float(mine.mean()))
            assert float(std[row, column]) == pytest.approx(float(mine.std(correction=int(unbiased))))


def test_masked_mean_averages_what_counts_and_is_0_where_nothing_does():
    values = torch.tensor([[1.0, 3.0, 9.0], [5.0, 7.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert masked_mean(values, mask) == 2
    assert masked_mean(values, mask, dim=1).tolist() == [2, 0]
    assert masked_mean(values, torch.zeros_like(mask)) == 0


def test_pad_to_lengthens_behind_and_never_shortens():
    values = torch.tensor([[1, 2]])
    assert pad_to(values, 4, 1, 7).tolist() == [[1, 2, 7, 7]]
    assert pad_to(values, 2, 0, 7).tolist() == [[1, 2], [7, 7]]
    assert pad_to(values, 1, 1).equal(values)
    assert pad_to(torch.tensor([[True]]), 2, 1, False).tolist() == [[True, False]]


def test_cat_padded_joins_along_rows_and_lengthens_every_other_dimension():
    one, two = torch.ones(1, 2, 1), torch.ones(2, 1, 3)
    joined = cat_padded([one, two], fill=-1.0)
    assert joined.shape == (3, 2, 3)
    assert joined[0].tolist() == [[1, -1, -1], [1, -1, -1]]
    assert joined[2].tolist() == [[1, 1, 1], [-1, -1, -1]]


def test_extremes_of_entries_with_axes_of_their_own():
    values = torch.tensor([[[1.0, 9.0], [2.0, 8.0]], [[3.0, 7.0], [1.0, 0.0]], [[5.0, 5.0], [5.0, 5.0]]])
    index, valid = torch.tensor([0, 0, 1]), torch.ones(3, 2, 2, dtype=torch.bool)
    found = group_extreme(values, index, valid)
    assert found.tolist() == [[[3, 9], [2, 8]]] * 2 + [[[5, 5], [5, 5]]]
    assert group_extreme(values, index, valid, largest=False)[1].tolist() == [[1, 7], [1, 0]]
    assert group_extreme(values[:0], index[:0], valid[:0]).shape == (0, 2, 2)


def test_the_mean_of_one_entry_is_that_entry():
    values, mask = torch.tensor([[3.0, 5.0]]), torch.tensor([[0.0, 1.0]])
    assert masked_mean(values, mask) == 5 and masked_mean(values, mask, -1).tolist() == [5]


def test_what_is_added_is_0_unless_it_is_said():
    assert pad_to(torch.ones(1, 1), 2, 1).tolist() == [[1, 0]]
    assert cat_padded([torch.ones(1, 1), torch.ones(1, 2)]).tolist() == [[1, 0], [1, 1]]


def test_the_range_of_a_group_counts_valid_values_only():
    values, index = torch.tensor([1.0, 4.0, 9.0, 2.0]), torch.tensor([0, 0, 0, 1])
    valid = torch.tensor([True, True, False, True])
    # 4 - 1 in the first group, without the 9; a group of one has the range 0
    assert group_range(values, index, valid).tolist() == [3.0, 3.0, 3.0, 0.0]


def test_group_rank_counts_from_the_smallest_of_each_group():
    values = torch.tensor([[3.0, 1.0], [1.0, 1.0], [2.0, 5.0], [0.0, 1.0], [9.0, 0.0]])
    valid = torch.tensor([[1, 1], [1, 1], [0, 1], [1, 1], [1, 1]]).bool()
    index = torch.tensor([1, 0, 1, 1, 0])
    # group 1 is rows 0 2 3, of which row 2 does not count in the first column; ties go by row
    assert group_rank(values, index, valid).tolist() == [[1, 0], [0, 1], [2, 2], [0, 1], [1, 0]]
    assert group_rank(values[:0], index[:0], valid[:0]).shape == (0, 2)
