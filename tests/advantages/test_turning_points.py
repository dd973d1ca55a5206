"""Step credit of TP-GRPO: increments, turning points, balancing."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.select import increments, per_step
from mmrl.advantages.turning_points import turning_points
from mmrl.core.reward_table import ABSENT
from tests.support.tables import assert_rows, prefix_rewards, reward_table

A = [0.5, 0.4, 0.45, 0.6, 0.58, 0.7]
B = [0.6, 0.7, 0.55, 0.5, 0.52, 0.4]
C = [0.5, 0.6, 0.7, 0.65, 0.8, 0.8]
E = [0.2, 0.1, 0.3, 0.25, 0.35, 0.3]
F = [0.2, 0.6, 0.5, 0.55, 0.3]


def credits(*rows, **options):
    return turning_points(prefix_rewards(*rows), **options).values[:, 0]


@pytest.mark.parametrize(
    "rewards, wanted",
    [
        # the second step turns: .7 - .4; the last one too, but nothing follows it
        (A, [-0.1, 0.3, 0.15, -0.02, 0.12]),
        (B, [0.1, -0.3, -0.05, 0.02, -0.12]),
        # the first step needs no turn: .8 - .5; the fourth turns, but nothing is gained behind it
        (C, [0.3, 0.1, -0.05, 0.15, 0.0]),
        ([0.5] * 6, [0.0] * 5),
        # what follows the turns of E and F goes the other way, so both keep their increments
        (E, [-0.1, 0.2, -0.05, 0.1, -0.05]),
        (F, [0.4, -0.1, 0.05, -0.25]),
    ],
)
def test_the_worked_examples(rewards, wanted):
    assert_rows(credits(rewards), [wanted])


@pytest.mark.parametrize(
    "rewards, wanted",
    [
        (A, [-0.1, 0.3, 0.15, -0.02, 0.12]),
        (B, [0.1, -0.3, -0.05, 0.02, -0.12]),
        (E, [-0.1, 0.2, -0.05, 0.05, -0.05]),  # .3 - .1 and .3 - .25
        (F, [0.1, -0.1, -0.2, -0.25]),  # .3 - .2 and .3 - .5: a credit may be flipped
    ],
)
def test_the_worked_examples_without_the_constraint(rewards, wanted):
    assert_rows(credits(rewards, consistent=False), [wanted])


def test_credit_stands_behind_its_step():
    table = turning_points(prefix_rewards(A, [0.1, 0.2]))
    assert table.ends.tolist() == [[1, 2, 3, 4, 5], [1, *[ABSENT] * 4]]
    assert table.valid[:, 0].tolist() == [[True] * 5, [True] + [False] * 4]
    assert_rows(per_step(table).values[:, 0], [[-0.1, 0.3, 0.15, -0.02, 0.12], [0.1]])


def test_one_step_earns_what_it_gained():
    assert_rows(credits([0.2, 0.5], [0.5, 0.1]), [[0.3], [-0.4]])


# ---- balancing

UP, LESS, DOWN = [0.0, -0.1, 0.1, 0.2], [0.0, -0.1, 0.05, 0.1], [0.0, 0.1, -0.1, -0.3]


def turned(*rows, **options):
    """Tell which steps earn more than their increment."""
    found, plain = turning_points(prefix_rewards(*rows), **options), increments(prefix_rewards(*rows))
    return (((found.values - plain.values).abs() > 1e-12) & found.valid)[:, 0]


def test_as_many_rising_as_falling_turning_points_stay_those_of_the_largest_change():
    # D = .2, .1 and -.3, one turning point each: the middle row goes back to its increments
    assert turned(UP, LESS, DOWN).tolist() == [[False, True, False], [False] * 3, [False, True, False]]
    assert_rows(credits(UP, LESS, DOWN), [[-0.1, 0.3, 0.1], [-0.1, 0.15, 0.05], [0.1, -0.4, -0.2]])
    assert turned(UP, LESS, DOWN, balance=False).any(-1).all()


def test_the_order_of_rows_does_not_matter_where_changes_differ():
    assert turned(LESS, DOWN, UP).any(-1).tolist() == [False, True, True]


def test_of_one_kind_alone_nothing_is_dropped():
    assert turned(UP, LESS).any(-1).all()
    assert turned(DOWN).any(-1).all()


def test_ties_go_to_the_first():
    assert turned(UP, UP, DOWN).any(-1).tolist() == [True, False, True]
    # two turning points in one row: the first step of it
    twice = [0.0, 0.1, 0.0, 0.1, 0.2]
    assert turned(twice, DOWN).tolist() == [[True, False, False, False], [False, True, False, False]]


def test_balancing_is_over_the_whole_collection_and_not_by_group():
    table = prefix_rewards(UP, LESS, DOWN)
    apart = table.replace(ids={**table.ids, "group": torch.arange(3)[:, None].expand(3, 4)})
    assert turning_points(apart).values.equal(turning_points(table).values)


def test_balance_key_ranks_by_the_credit_instead_of_the_overall_change():
    # overall .2 and .1, credits at the turn .3 and .5
    steep = [0.0, -0.4, 0.05, 0.1]
    assert turned(UP, steep, DOWN).any(-1).tolist() == [True, False, True]
    assert turned(UP, steep, DOWN, balance_key="aggregated").any(-1).tolist() == [False, True, True]


def test_every_reward_is_balanced_alone():
    rows = [UP, LESS, DOWN]
    table = reward_table({"a": rows, "b": [UP, DOWN, DOWN]}, ends=[range(4)] * 3)
    both = turning_points(table).values
    assert both[:, 0].equal(turning_points(prefix_rewards(*rows)).values[:, 0])
    assert both[:, 1].equal(turning_points(prefix_rewards(UP, DOWN, DOWN)).values[:, 0])


# ---- options


def test_only_rising_rows_have_turning_points_on_request():
    assert turned(UP, DOWN, only_rising=True).any(-1).tolist() == [True, False]


def test_changes_within_atol_have_no_sign():
    # the dip of .02 is noise: without its sign the step behind it does not turn
    row = [0.0, -0.02, 0.1, 0.2]
    assert turned(row).tolist() == [[False, True, False]]
    assert not turned(row, atol=0.03).any()
    # a change of exactly atol has none either
    assert turned([0.0, -0.25, 0.5, 0.75]).any() and not turned([0.0, -0.25, 0.5, 0.75], atol=0.25).any()
    # what follows the turn gains .02 only
    assert not turned([0.0, -0.1, 0.18, 0.2], atol=0.03).any()
    # and so does the whole row
    assert not turned([0.0, -0.1, -0.02, 0.02], atol=0.03, consistent=False).any()


def test_a_step_without_change_neither_turns_nor_lets_the_next_turn():
    assert not turned([0.0, 0.0, 0.1, 0.2]).any()
    assert not turned([0.0, -0.1, -0.1, 0.1, 0.2])[0, 1:3].any()


@pytest.mark.parametrize("consistent", [True, False])
def test_a_row_that_ends_where_it_began_has_no_turning_point(consistent):
    assert not turned([0.5, 0.2, 0.4, 0.5], consistent=consistent).any()


def test_a_turning_point_that_gains_nothing_to_the_end_earns_its_increment():
    # overall .1; the third step turns, from .6 to the final .6
    assert_rows(credits([0.5, 0.7, 0.6, 0.8, 0.6], consistent=False), [[0.1, -0.1, 0.2, -0.2]])


def test_a_turning_point_that_gains_nothing_to_the_end_counts_when_balancing():
    # Overall .1: the first step turns, and the third, from .6 to the final .6. Two rising points let both
    # falling rows keep theirs; were the third step left out, the row of change -.3 would lose its own.
    rows = [[0.5, 0.7, 0.6, 0.8, 0.6], [0.0, 0.1, -0.1, -0.3], [0.0, 0.2, -0.1, -0.4]]
    wanted = [[0.1, -0.1, 0.2, -0.2], [0.1, -0.4, -0.2], [0.2, -0.6, -0.3]]
    assert_rows(credits(*rows, consistent=False), wanted)
    # One falling point: the first step is the first of the two that rise by .1, and stays.
    assert_rows(credits(*rows[:2], consistent=False), wanted[:2])


def test_the_first_step_is_no_turning_point_on_request():
    # C turns at once: .8 - .5; A turns at its second step
    assert_rows(credits(C, first_step=False), [[0.1, 0.1, -0.05, 0.15, 0]])
    assert_rows(credits(A, first_step=False), [[-0.1, 0.3, 0.15, -0.02, 0.12]])
    # it does not count when balancing either: C and A rise by .3 and .2, B falls
    assert turned(C, A, B).any(-1).tolist() == [True, False, True]
    assert turned(C, A, B, first_step=False).any(-1).tolist() == [False, True, True]


# ---- missing probes


def test_a_probe_without_a_reward_leaves_its_increments_unknown():
    table = turning_points(reward_table([[0.0, None, 0.1, 0.05, 0.2, 0.3]], ends=[range(6)]))
    assert table.valid[0, 0].tolist() == [False, False, True, True, True]
    # the step behind the gap does not turn; the one behind the dip does: .3 - .05
    assert_rows(table.values[:, 0, 2:], [[-0.05, 0.25, 0.1]])


@pytest.mark.parametrize("missing", [0, 5])
def test_without_the_first_or_last_reward_a_row_has_increments_only(missing):
    rewards = [None if k == missing else reward for k, reward in enumerate(A)]
    table = turning_points(reward_table([rewards], ends=[range(6)]))
    wanted = increments(reward_table([rewards], ends=[range(6)]))
    assert table.valid.equal(wanted.valid)
    assert table.values[table.valid].equal(wanted.values[wanted.valid])


def test_rows_that_miss_probes_do_not_disturb_the_others():
    table = reward_table([UP, [None] * 4, DOWN, [0.3]], ends=[range(4), range(4), range(4), [0]])
    found = turning_points(table)
    assert found.values[[0, 2], 0].equal(credits(UP, DOWN))
    assert found.valid[:, 0].tolist() == [[True] * 3, [False] * 3, [True] * 3, [False] * 3]
    assert found.values.isfinite().all()


def test_rows_with_fewer_probes_end_with_their_own_last_one():
    assert_rows(credits(UP, A), [[-0.1, 0.3, 0.1], [-0.1, 0.3, 0.15, -0.02, 0.12]])


# ---- properties


def walks(num=200, steps=7):
    generator = torch.Generator().manual_seed(3)
    return torch.rand(num, steps + 1, generator=generator, dtype=torch.float64).mul(10).round().div(10)


def test_with_the_constraint_a_credit_is_amplified_and_never_flipped():
    rows = walks().tolist()
    plain = increments(prefix_rewards(*rows)).values
    found = turning_points(prefix_rewards(*rows), balance=False).values
    changed = found != plain
    assert changed.sum() > 100
    assert (found[changed].abs() > plain[changed].abs()).all()
    assert (found[changed].sign() == plain[changed].sign()).all()
    assert not changed[..., -1].any(), "nothing follows the last step"
    free = turning_points(prefix_rewards(*rows), consistent=False, balance=False).values
    assert (free.sign() != plain.sign()).any()


def test_without_turning_points_credits_add_up_to_the_overall_change():
    rows = walks().tolist()
    still = ~turned(*rows, balance=False).any(-1)
    assert 10 < still.sum() < len(rows)
    total = credits(*rows, balance=False).sum(-1)
    gained = torch.tensor([row[-1] - row[0] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(total[still], gained[still])


def test_balanced_turning_points_are_as_many_on_both_sides():
    rows = walks()
    kept = turned(*rows.tolist()).sum(-1)
    gained = rows[:, -1] - rows[:, 0]
    assert kept[gained > 0].sum() == kept[gained < 0].sum() > 20


def test_permuting_the_rows_of_a_group_permutes_their_advantages():
    rows = [[round(x + 0.01 * i, 3) for x in row] for i, row in enumerate(walks(6).tolist())]
    order = [4, 2, 0, 5, 1, 3]

    def advantages(listed):
        return group_normalize(turning_points(prefix_rewards(*listed))).values

    torch.testing.assert_close(advantages([rows[i] for i in order]), advantages(rows)[order])


def test_every_step_is_normalised_within_its_group():
    # two steps of a group of four, with population deviations
    table = prefix_rewards([0, 0.3, 0.25], [0, -0.1, -0.05], [0, 0.1, 0.1], [0, -0.1, -0.1])
    table = group_normalize(increments(table), std="population")
    wanted = [[1.506648, -1.410225], [-0.903989, 1.410225], [0.301330, 0], [-0.903989, 0]]
    assert_rows(table.values[:, 0], wanted)


def test_with_the_final_reward_in_every_column_it_is_grpo():
    final = torch.tensor([0.3, 0.9, 0.1, 0.4], dtype=torch.float64)
    table = turning_points(prefix_rewards(*walks(4, 3).tolist()))
    table = group_normalize(table.put(final[:, None, None].expand_as(table.values)))
    grpo = group_normalize(reward_table(final.tolist())).values[:, 0]
    torch.testing.assert_close(table.values[:, 0], grpo.expand(-1, 3))


def test_rows_without_a_step_have_no_credit():
    table = turning_points(reward_table([0.5, 0.7], length=[0, 0], ends=[[0], [0]]))
    assert table.values.shape == table.valid.shape == (2, 1, 1) and not table.valid.any()
