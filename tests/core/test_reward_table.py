"""The reward table: names, comparisons, rounds, and the rule that lays outcomes over steps."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.core.reward_table import ABSENT, RewardTable, name_id, place_of_steps
from tests.support.tables import assert_rows, reward_table

NONE = torch.tensor([False, False])


def test_names_are_numbered_alike_everywhere_and_fit_63_bits():
    # half of blake2b("p0") of eight bytes: unlike hash("p0"), the same in every process and run
    assert name_id("p0") == 5097878332197156858
    assert name_id("") == 0
    numbers = {name_id(f"p{i}") for i in range(1000)}
    assert len(numbers) == 1000
    assert all(0 < number < 2**63 for number in numbers)
    assert torch.tensor(sorted(numbers)).dtype == torch.int64


def test_the_empty_table_has_no_rows_and_is_the_beginning_of_every_join():
    table = reward_table([1, 0])
    empty = RewardTable.empty()
    assert len(empty) == 0
    assert (empty.values.shape, empty.valid.shape, empty.ends.shape) == ((0, 0, 0), (0, 0, 0), (0, 0))
    assert empty.learn.shape == (0, 0) and not empty.names
    assert RewardTable.empty().join(table) is table
    assert RewardTable.empty().num_groups(torch.zeros(0, dtype=torch.bool)) == 0


def test_the_answer_of_a_row_is_its_last_outcome():
    table = reward_table([[1, 2, 3], [4], [5, None]])
    assert table.last.tolist() == [2, 0, 1]
    assert table.at_end("reward").tolist()[:2] == [3, 4]
    assert math.isnan(table.at_end("reward")[2])


def test_the_reward_of_a_row_is_the_weighted_sum_of_what_applies():
    table = reward_table({"a": [1, None, None], "b": [3, 3, None]}, weights={"a": 2.0, "b": 0.5})
    assert table.reward().tolist()[:2] == [3.5, 1.5]
    assert math.isnan(table.reward()[2])


def test_the_weighted_sum_leaves_out_what_does_not_apply():
    table = reward_table({"a": [1, None, None], "b": [3, 4, None]}, weights={"a": 2.0, "b": 0.5})
    # 2 * 1 + 0.5 * 3, then 0.5 * 4 alone, then nothing
    assert table.weighted_sum()[:, 0].tolist() == [3.5, 2.0, 0.0]


def test_absent_are_the_rewards_that_apply_nowhere_without_a_failure():
    table = reward_table({"a": [1, None], "b": [None, None], "c": [None, None]})
    assert set(table.absent) == {"b", "c"}
    assert table.absent["b"] == "'b' gave None for all 2 outcomes of 1 prompts"
    failed = table.replace(ids={**table.ids, "fault/c": torch.zeros_like(table.ends)})
    assert set(failed.absent) == {"b"}
    assert not table.select(torch.tensor([False, False])).absent


def test_rewards_of_a_row_are_as_measured_whatever_the_chain_did():
    table = reward_table({"a": [1, 2]})
    assert table.put(table.values * 100).reward().tolist() == [1, 2]


def test_select_keeps_rows_with_all_that_belongs_to_them():
    table = reward_table(
        [[1, 2], [3], [4, 5]],
        group="aba",
        tags={"kind": ["x", "y", "z"]},
        notes={"logp": [[1, 1], [2], [3, 3]]},
    )
    for rows in (torch.tensor([2, 0]), torch.tensor([True, False, True])):
        kept = table.select(rows)
        assert sorted(kept.at_end("reward").tolist()) == [2, 5]
        assert set(kept.uids) == {"a"}
        assert kept.ids["row"][:, 0].sort().values.tolist() == [0, 2], "rows keep their number"
        assert len(kept.notes["logp"]) == len(kept.length) == len(kept.process) == len(kept.learn) == 2
    assert table.select(torch.tensor([2, 0])).notes["logp"][:, 0].tolist() == [3, 1]


def test_a_note_is_added_beside_the_others():
    table = reward_table([1], notes={"logp": [[0.5]]}).note("mine", torch.ones(1, 1))
    assert set(table.notes) == {"logp", "mine"}


# ---- comparisons


def test_index_agrees_where_every_id_does():
    table = reward_table([[1, 2], [3, 4], [5, 6]], group="aab")
    by_place, by_group, by_none = (table.index(by) for by in (("group", "place"), ("group",), ()))
    assert by_place[0, 0] == by_place[1, 0] != by_place[0, 1]
    assert by_group[0, 0] == by_group[1, 1] != by_group[2, 0]
    assert len(by_none.unique()) == 1


def test_groups_give_every_entry_the_statistics_of_its_comparison():
    table = reward_table({"a": [[1, 10], [3]], "b": [[5, 0], [5]]})
    groups = table.groups(("place",))
    assert_rows(groups.mean()[:, 0], [[2, 10], [2]])
    assert_rows(groups.std()[:, 0], [[math.sqrt(2), 0], [math.sqrt(2)]])
    assert groups.count()[0].tolist() == [[2, 1], [2, 1]]
    assert groups.flat()[0].tolist() == [[False, True], [True, True]]


# ---- rounds


def test_rounds_are_joined_behind_each_other_with_rows_numbered_anew():
    first, second = reward_table([1, 0], group="ab"), reward_table([2, 3], group="bc")
    joined = first.join(second)
    assert joined.at_end("reward").tolist() == [1, 0, 2, 3]
    assert joined.ids["row"][:, 0].tolist() == [0, 1, 2, 3]
    assert joined.group[1] == joined.group[2], "rows of one prompt meet, whatever their round"
    assert joined.uids == ("a", "b", "b", "c")


def test_rounds_with_other_numbers_of_outcomes_steps_and_tags_are_padded():
    first = reward_table([[1, 2]], notes={"logp": [[0.5, 0.5]]})
    second = reward_table([[3, 4, 5]], tags={"turn": [["x", "y", "z"]]}, notes={"entropy": [[1, 1, 1]]})
    for joined, short in ((first.join(second), 0), (second.join(first), 1)):
        assert joined.ends[short].tolist() == [1, 2, ABSENT]
        assert joined.valid[short, 0].tolist() == [True, True, False]
        assert joined.learn[short].tolist() == [True, True, False]
        assert math.isnan(joined.scored["reward"][short, 2])
        assert joined.ids["turn"][short].tolist() == [0, 0, 0]
        assert joined.ids["turn"][1 - short].tolist() == [name_id(word) for word in "xyz"]
        assert joined.ids["place"].tolist() == [[0, 1, 2]] * 2
        assert joined.ids["group"][short].unique().numel() == 1
        assert joined.notes["entropy"][short].isnan().all()
        assert joined.notes["logp"][1 - short].isnan().all()
        assert joined.notes["logp"].shape == (2, 3)


def test_joining_leaves_the_parts_alone():
    first, second = reward_table([[1, 2]]), reward_table([[3]])
    first.join(second)
    assert (first.ends.shape, second.ends.shape) == ((1, 2), (1, 1))


def test_rounds_with_other_rewards_do_not_join():
    with pytest.raises(ValueError, match=r"two rounds .* have the rewards \('a',\) and \('b',\)"):
        reward_table({"a": [1]}).join(reward_table({"b": [1]}))


def test_num_groups_counts_those_with_a_row_that_is_kept():
    table = reward_table([1, 1, 1, 1], group="aabc")
    assert table.num_groups(torch.tensor([True, False, True, False])) == 2


def test_mine_are_the_rows_of_this_process():
    table = reward_table([1, 2, 3], process=[0, 1, 1])
    assert table.replace(rank=1).mine.tolist() == [False, True, True]


# ---- places and steps


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ([4], [0, 0, 0, 0, 0]),  # one answer: every step, also behind its end
        ([2, 4], [0, 0, 1, 1, 1]),
        ([0, 2, 4], [1, 1, 2, 2, 2]),  # an outcome of no steps earns no step
        ([3, 3, 5], [0, 0, 0, 2, 2]),  # several with one end: the first
        ([2, ABSENT, ABSENT], [0, 0, 0, 0, 0]),
        ([ABSENT], [0, 0, 0, 0, 0]),
    ],
)
def test_a_step_belongs_to_the_first_outcome_that_ends_after_it(ends, wanted):
    assert place_of_steps(torch.tensor([ends]), 5).tolist() == [wanted]


def test_places_that_a_row_does_not_have_are_never_reached():
    ends = torch.tensor([[2, 4, ABSENT, ABSENT, ABSENT], [1, 2, 3, 4, 5]])
    assert place_of_steps(ends, 6).tolist() == [[0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 4, 4]]


def test_places_of_no_rows_or_no_steps():
    assert place_of_steps(torch.zeros(0, 3, dtype=torch.int64), 4).shape == (0, 4)
    assert place_of_steps(torch.tensor([[1, 2]]), 0).shape == (1, 0)


def test_after_first_moves_every_column_by_one_place():
    table = reward_table([[1, 2, 3], [4, 5]], tags={"turn": [["x", "y", "z"], ["u", "v"]]})
    moved = table.after_first(torch.tensor([[[20.0, 30.0]], [[50.0, 0.0]]], dtype=torch.float64))
    assert moved.ends.tolist() == [[2, 3], [2, ABSENT]]
    assert moved.valid[:, 0].tolist() == [[True, True], [True, False]]
    assert moved.scored["reward"].tolist()[0] == [2, 3]
    assert moved.ids["turn"].tolist() == [[name_id("y"), name_id("z")], [name_id("v"), 0]]
    assert moved.ids["place"].tolist() == [[0, 1], [0, 1]]


def test_places_are_numbered_anew_and_what_is_absent_stays_invalid():
    # three rows of up to three places, of which two are left
    table = reward_table([[1, 2, 3], [4, 5, 6], [7, 8], [9]], ends=[[1, 2, 3], [1, 2, 3], [1, 2], [1]])
    left = table.after_first(table.values[..., 1:])
    assert left.ids["place"].tolist() == [[0, 1]] * 4
    assert left.valid[:, 0].tolist() == [[True, True], [True, True], [True, False], [False, False]]
    taken = table.take(torch.zeros(4, 2, dtype=torch.int64), table.values[..., :2], left.ends)
    assert taken.valid[:, 0].tolist() == left.valid[:, 0].tolist()
