"""The step table: credit laid over steps, and cuts for memory and optimizer steps."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.select import per_step
from mmrl.core.step_table import Batch, StepOutput, spread
from mmrl.core.types import Unit
from tests.support.tables import assert_rows, padded, reward_table, step_table


def rows_of(*lengths, **options):
    """Build a batch of rows of these lengths."""
    return step_table([[-1.0] * n for n in lengths], **options)[1]


# ---- spread


def test_an_answer_lays_its_credit_over_all_steps_of_its_row():
    batch = spread(reward_table([0.5, -2], length=[3, 2]), rows_of(3, 2))
    assert_rows(batch.advantage, [[0.5] * 3, [-2, -2, 0]])
    assert batch.mask.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_outcomes_of_a_row_lay_theirs_over_the_steps_before_their_end():
    batch = spread(reward_table([[1, 2], [3]], ends=[[1, 3], [2]]), rows_of(3, 2))
    assert_rows(batch.advantage, [[1, 2, 2], [3, 3, 0]])


def test_credit_per_step_stays_where_it_is():
    table = per_step(reward_table([0, 0], length=[3, 1]))
    table = table.put(torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, 9.0, 9.0]]], dtype=torch.float64))
    assert_rows(spread(table, rows_of(3, 1)).advantage, [[1, 2, 3], [4, 0, 0]])


def test_what_is_not_learned_leaves_the_mask():
    table = reward_table([[1, 2], [3, 4]], ends=[[1, 2], [1, 2]])
    table = table.replace(learn=torch.tensor([[True, False], [False, False]]))
    batch = spread(table, rows_of(2, 2))
    assert batch.mask.tolist() == [[1, 0], [0, 0]]
    assert_rows(batch.advantage, [[1, 0], [0, 0]])
    assert (batch.count().steps, batch.count().rows) == (1, 1)


def test_steps_whose_reward_does_not_apply_leave_the_mask():
    batch = spread(reward_table([1, None], length=[2, 2]), rows_of(2, 2))
    assert batch.mask.tolist() == [[1, 1], [0, 0]]


def test_steps_that_were_not_the_policys_choice_stay_out():
    batch = spread(reward_table([5], length=[3]), rows_of(3, mask=[[1, 0, 1]]))
    assert batch.mask.tolist() == [[1, 0, 1]]
    assert_rows(batch.advantage, [[5, 0, 5]])


def test_rows_of_one_prompt_share_a_group():
    batch = spread(reward_table([1, 2, 3], group="aba"), rows_of(1, 1, 1))
    assert batch.group[0] == batch.group[2] != batch.group[1]


def test_notes_of_the_chain_are_added_cut_and_padded_and_those_of_the_engine_stay():
    short = spread(reward_table([1, 2], length=[3, 1], notes={"mine": [[7], [6]]}), rows_of(3, 1))
    assert short.notes["mine"][:, 0].tolist() == [7, 6] and short.notes["mine"][:, 1:].isnan().all()
    table = reward_table([1, 2], length=[2, 1], notes={"mine": [[7, 8, 9], [6]], "logp": [[0, 0], [0]]})
    batch = spread(table, rows_of(2, 1, notes={"logp": [[5, 5], [5]]}))
    assert batch.notes["mine"][0].tolist() == [7, 8]
    assert batch.notes["mine"][1, 0] == 6
    assert batch.notes["logp"][0, 0] == 5


def test_several_rewards_at_the_end_of_the_chain_are_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"ended with 2 rewards \('a', 'b'\); add `total`"):
        spread(reward_table({"a": [1], "b": [2]}), rows_of(1))


def test_credit_without_rows_blanks_the_batch():
    batch = spread(reward_table([1]).select(torch.tensor([False])), rows_of(2, 2))
    assert len(batch) == 1 and batch.steps.rows.tolist() == [0]
    assert not batch.mask.any()


# ---- what is counted


def test_totals_count_steps_rows_and_groups_that_are_learned_from():
    totals = rows_of(3, 1, 2, group=[7, 7, 8], mask=[[1, 0, 1], [1], [0, 0]]).count()
    assert (totals.steps, totals.rows, totals.groups) == (3, 2, 1)


def test_rows_that_were_drawn_are_those_here_unless_the_batch_says_otherwise():
    batch = rows_of(3, 1, 2, mask=[[1, 0, 1], [1], [0, 0]])
    assert batch.count().drawn == 3
    assert batch.replace(drawn=7.0).count().drawn == 7
    assert batch.blank().count().drawn == 0
    # seven rows shared out to two parts, of which one has no group
    parts = list(batch.replace(drawn=7.0).parts(2))
    assert [part.count().drawn for part in parts] == [3.5, 3.5]
    assert sorted(part.count().drawn for part in batch.parts(2)) == [0, 3]


def test_old_that_nobody_asked_is_the_current_pass_without_gradient():
    new, batch = step_table([[-1.0]])
    assert batch.by("old", new).logp.equal(new.logp)
    assert not batch.by("old", new).logp.requires_grad
    asked = batch.replace(others={"old": StepOutput(padded([[-3.0]]))})
    assert asked.by("old", new).logp.item() == -3
    with pytest.raises(KeyError):
        batch.by("ref", new)


# ---- cuts


def numbered(batch: Batch) -> list[tuple[int, int]]:
    """Name the steps of a cut by row and column of the batch it came from."""
    return [(int(row), int(column)) for row in batch.steps.rows for column in batch.steps.columns]


def test_selecting_cuts_everything_alike():
    new, batch = step_table(
        [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]],
        advantage=[1, 2],
        group=[5, 6],
        notes={"logp": [[1, 2, 3], [4, 5, 6]]},
        old=[[-1, -2, -3], [-4, -5, -6]],
    )
    batch = batch.replace(weight=new.logp.detach())
    cut = batch.select(torch.tensor([1]), slice(1, 3))
    assert cut.group.tolist() == [6]
    assert cut.advantage.tolist() == [[2, 2]]
    assert cut.notes["logp"].tolist() == [[5, 6]]
    assert cut.others["old"].logp.tolist() == cut.weight.tolist() == [[-5, -6]]
    assert numbered(cut) == [(1, 1), (1, 2)]
    assert cut.totals == batch.totals, "a share still divides by the whole"


@pytest.mark.parametrize("unit", list(Unit))
@pytest.mark.parametrize("max_steps", [1, 4, 7, 12, 1000])
def test_every_step_is_in_exactly_one_micro_batch(unit, max_steps):
    batch = rows_of(4, 4, 4, 4, 4, group=[1, 2, 1, 2, 3])
    cuts = [step for micro in batch.split(max_steps, unit) for step in numbered(micro)]
    assert sorted(cuts) == numbered(batch)


@pytest.mark.parametrize("max_steps", [4, 7, 8, 100])
def test_a_micro_batch_is_only_larger_than_the_limit_when_one_unit_alone_is(max_steps):
    batch = rows_of(4, 4, 4, 4, 4, group=[1, 1, 1, 2, 2], unit=Unit.ROW)
    for micro in batch.split(max_steps, Unit.ROW):
        assert micro.steps.cost(torch.arange(len(micro))) <= max_steps
    for micro in batch.split(max_steps, Unit.GROUP):
        cost = micro.steps.cost(torch.arange(len(micro)))
        assert cost <= max_steps or len(micro.group.unique()) == 1


def test_rows_fill_a_micro_batch_as_far_as_they_fit():
    batch = rows_of(4, 4, 4, unit=Unit.ROW)
    assert [len(micro) for micro in batch.split(8, Unit.STEP)] == [2, 1]
    assert [len(micro) for micro in batch.split(3, Unit.STEP)] == [1, 1, 1]
    assert [len(micro) for micro in rows_of(4, 4, 4, 4, unit=Unit.ROW).split(8, Unit.STEP)] == [2, 2]
    groups = rows_of(4, 4, 4, 4, group=[1, 1, 2, 3], unit=Unit.ROW).split(8, Unit.ROW)
    assert [micro.group.tolist() for micro in groups] == [[1, 1], [2, 3]], "what is full is not looked at"


def test_rows_of_several_buckets_are_apart_unless_the_unit_keeps_them_together():
    batch = rows_of(4, 4, 4, 4, 4, group=[1, 1, 2, 2, 3])
    batch.steps.buckets = torch.tensor([1, 0, 1, 1, 0])
    of = lambda max_steps, unit: [rows.tolist() for rows, _ in batch.cuts(max_steps, unit)]
    assert of(100, Unit.ROW) == of(100, Unit.STEP) == [[1, 4], [0, 2, 3]]
    assert of(8, Unit.ROW) == [[1, 4], [0], [2, 3]], "group 2 fits alone, and stays together"
    assert of(100, Unit.GROUP) == [[4], [0, 1], [2, 3]], "groups of buckets 0, of 0 and 1, and of 1"
    assert of(4, Unit.ROW) == [[1], [4], [0], [2], [3]]


def test_a_row_that_is_too_large_is_cut_between_its_steps():
    def widths(batch, max_steps):
        return [micro.mask.shape[1] for micro in batch.split(max_steps, Unit.STEP)]

    assert widths(rows_of(2), 1) == [1, 1] and widths(rows_of(3), 1) == [1, 1, 1]
    assert widths(rows_of(3), 2) == [2, 1] and widths(rows_of(3), 3) == [3]
    # 12 steps with the prompt: not even one fits
    assert widths(rows_of(2, prompt=10), 1) == [1, 1]


def test_whole_groups_stay_together_even_if_they_stand_apart():
    batch = rows_of(4, 4, 4, 4, group=[1, 2, 1, 2], unit=Unit.ROW)
    assert [micro.group.tolist() for micro in batch.split(1, Unit.GROUP)] == [[1, 1], [2, 2]]


def test_cuts_prefer_to_fall_between_groups():
    # 12 steps hold three rows, but the third belongs to a group that fits as a whole behind the cut
    batch = rows_of(4, 4, 4, 4, group=[1, 1, 2, 2], unit=Unit.ROW)
    assert [micro.group.tolist() for micro in batch.split(12, Unit.ROW)] == [[1, 1], [2, 2]]
    # so does one that fills a micro-batch to the last step
    batch = rows_of(4, 4, 4, group=[1, 2, 2], unit=Unit.ROW)
    assert [micro.group.tolist() for micro in batch.split(8, Unit.ROW)] == [[1], [2, 2]]
    # a group that fits nowhere as a whole is cut where it must be
    batch = rows_of(4, 4, 4, 4, group=[1, 2, 2, 2], unit=Unit.ROW)
    assert [micro.group.tolist() for micro in batch.split(8, Unit.ROW)] == [[1, 2], [2, 2]]


def test_a_shared_prompt_is_counted_once():
    # a prompt of 10 and rows of 4: 18 steps for two rows of one group, 28 for two groups
    together = rows_of(4, 4, group=[1, 1], prompt=10, unit=Unit.ROW)
    apart = rows_of(4, 4, group=[1, 2], prompt=10, unit=Unit.ROW)
    assert len(together.split(18, Unit.ROW)) == 1
    assert len(apart.split(27, Unit.ROW)) == 2
    assert len(apart.split(28, Unit.ROW)) == 1


def test_a_row_that_is_too_large_is_cut_between_steps_where_that_is_exact():
    assert [numbered(micro) for micro in rows_of(5).split(2, Unit.STEP)] == [
        [(0, 0), (0, 1)],
        [(0, 2), (0, 3)],
        [(0, 4)],
    ]
    assert len(rows_of(5, unit=Unit.ROW).split(2, Unit.STEP)) == 1, "the policy needs whole rows"
    assert len(rows_of(5).split(2, Unit.ROW)) == 1, "the objective needs whole rows"


def test_shares_of_weights_add_up_to_the_whole():
    batch = rows_of(3, 1, 2, 3, group=[1, 1, 2, 2])
    batch = batch.replace(weight=batch.mask / batch.totals.steps)
    for max_steps in (1, 3, 6, 9):
        shares = [float(micro.weight.sum()) for micro in batch.split(max_steps, Unit.STEP)]
        assert sum(shares) == pytest.approx(1)


# ---- parts


def test_parts_are_whole_groups_in_order_of_first_appearance():
    batch = rows_of(1, 1, 1, 1, 1, group=[9, 4, 9, 7, 4])
    parts = list(batch.parts(3))
    assert [part.group.tolist() for part in parts] == [[9, 9], [4, 4], [7]]
    assert [part.group.tolist() for part in batch.parts(2)] == [[9, 9], [4, 7, 4]]
    assert [len(part) for part in batch.parts(1)] == [5]


def test_a_part_without_groups_is_one_blanked_row():
    parts = list(rows_of(2, 2, group=[1, 1], advantage=[1, 1]).parts(3))
    assert sorted(len(part) for part in parts) == [1, 1, 2]
    for part in parts:
        if len(part) == 1:
            assert not part.mask.any()
            assert not part.advantage.any()
            assert part.count().steps == 0


def test_extras_of_others_are_cut_with_their_steps():
    _, batch = step_table([[-1.0, -1.0], [-1.0, -1.0]])
    mean = torch.arange(8.0).view(2, 2, 2)
    batch = batch.replace(others={"ref": StepOutput(batch.mask, {"mean": mean})})
    cut = batch.select(torch.tensor([1]), slice(0, 1))
    assert cut.others["ref"].extra["mean"].tolist() == [[[4, 5]]]
    assert batch.others["ref"][torch.tensor([1])].extra["mean"].shape == (1, 2, 2)
    assert not StepOutput(torch.ones(1, 1, requires_grad=True)).detach().logp.requires_grad


def test_moving_to_a_device_moves_every_number():
    _, batch = step_table([[-1.0]], notes={"logp": [[1.0]]}, old=[[-1.0]])
    moved = batch.on(torch.device("meta"))
    numbers = [
        moved.group,
        moved.mask,
        moved.advantage,
        moved.weight,
        moved.notes["logp"],
        moved.others["old"].logp,
    ]
    assert all(number.device.type == "meta" for number in numbers)
