"""Pieces that read tokens, entropies and log-probabilities: GTPO, SPO's mask, Clip-Cov, EGPO."""

from __future__ import annotations

import math

import torch

from mmrl.advantages.tokens import conflict_tokens, high_covariance, keep_steps
from tests.support.tables import assert_rows, reward_table


def test_keep_steps_keeps_a_range_of_steps_or_rows():
    table = reward_table([1, -1], length=[3, 2], notes={"entropy": [[0.1, 0.9, 0.2], [0.8, 0.8]]})
    assert_rows(keep_steps(table, at_most=0.7).values[:, 0], [[1, 0, 1], [0, 0]])
    assert_rows(keep_steps(table, at_least=0.2, at_most=0.85).values[:, 0], [[0, 0, 1], [-1, -1]])
    found = keep_steps(table, at_most=0.7, level="row")  # means .4 and .8
    assert_rows(found.values[:, 0], [[1, 1, 1], [0, 0]])
    assert found.learn[:, :2].all()
    dropped = keep_steps(table, at_most=0.7, level="row", drop=True)
    assert_rows(dropped.values[:, 0], [[1, 1, 1], [-1, -1]])
    assert dropped.learn[:, :2].tolist() == [[True, True], [False, False]]


def test_keep_steps_keeps_all_where_the_mean_is_outside():
    table = reward_table([1, -1], notes={"entropy": [[0.6], [0.9]]})
    assert_rows(keep_steps(table, at_most=0.7, if_mean_inside=True).values[:, 0], [[1], [-1]])
    assert_rows(keep_steps(table, at_most=0.8, if_mean_inside=True).values[:, 0], [[1], [0]])


def test_keep_steps_of_likely_tokens():
    logp = [[math.log(p) for p in (0.99, 0.5, 0.95, 0.6)]]
    table = reward_table([2], length=[4], notes={"logp": logp})
    assert_rows(keep_steps(table, of="logp", at_most=math.log(0.9)).values[:, 0], [[0, 2, 0, 2]])


def test_keep_steps_by_advantage_times_entropy():
    entropy = [[0.1, 1.2, 0.4, 0.9, 0.05, 0.3], [5.0]]
    table = reward_table([1.213557, 0], length=[6, 1], notes={"entropy": entropy})
    # keys .12 1.46 .49 1.09 .06 .36 and 0 for the row without an advantage
    found = keep_steps(table, of="weighted_entropy", top=3 / 7).values[0, 0].ne(0)
    assert found.tolist() == [False, True, True, True, False, False]


def test_keep_steps_leaves_what_was_not_noted():
    table = reward_table([1, 1], length=[2, 2], notes={"entropy": [[None, None], [9, 9]]})
    assert_rows(keep_steps(table, at_most=1.0).values[:, 0], [[1, 1], [0, 0]])
    assert_rows(keep_steps(table, at_most=1.0, level="row").values[:, 0], [[1, 1], [0, 0]])


WORKED = reward_table(
    [1, -1], length=[4, 4], notes={"token": [[5, 6, 7, 9], [5, 6, 8, 9]], "entropy": [[0.5] * 4, [0.3] * 4]}
)


def test_conflict_tokens_give_the_worked_numbers():
    # 5 6 from the start and 9 from the end: three in conflict; .95 / 3 and -1.03 / 3
    good, bad = 0.95 / 3, -1.03 / 3
    found = conflict_tokens(WORKED).values[:, 0]
    assert_rows(found, [[2 * good, 2 * good, good, 2 * good], [0, 0, bad, 0]])
    # the loss of REINFORCE, with the mean over steps and the sum over rows
    assert_rows(-found.mean(-1), [-0.554167, 0.085833])


def test_conflicts_at_the_end_are_aligned_at_the_end_and_only_unbroken_runs_count():
    tokens = [[1, 2, 3, 8, 9], [4, 2, 8, 9]]
    table = reward_table([1, -1], length=[5, 4], notes={"token": tokens})
    table = table.note("entropy", torch.zeros(2, 5, dtype=torch.float64))
    found = conflict_tokens(table, per_conflict=False).values[:, 0]
    # 2 is at the same place, but 1 and 4 before it are not shared
    assert_rows(found, [[1, 1, 1, 2, 2], [-1, -1, 0, 0]])


def test_a_token_shared_from_both_sides_has_both_factors():
    table = reward_table([1, -1], length=[2, 2], notes={"token": [[1, 2], [1, 2]], "entropy": [[0, 0]] * 2})
    assert_rows(conflict_tokens(table, per_conflict=False).values[:, 0], [[4, 4], [0, 0]])


def test_groups_zeros_and_rows_without_tokens_make_no_conflicts():
    tokens = [[1, 2], [1, 2], [1, 2], [None, None]]
    notes = {"token": tokens, "entropy": [[0, 0]] * 4}
    table = reward_table([1, -1, 0, -1], length=[2] * 4, group="abaa", notes=notes)
    assert_rows(conflict_tokens(table).values[:, 0], [[1, 1], [-1, -1], [0, 0], [-1, -1]])


def test_rows_of_no_advantage_pay_for_their_entropy():
    notes = {"token": [[1, 2], [1, 3], [1, 4]], "entropy": [[0.5] * 2, [0.3] * 2, [0.4] * 2]}
    found = conflict_tokens(reward_table([1, -1, 0], length=[2] * 3, notes=notes)).values[:, 0]
    # the first token is in conflict: 2 (1 - .05), 0 (-1 - .03); -.04 without a conflict
    assert_rows(found, [[1.9, 0.95], [0, -1.03], [-0.04, -0.04]])


def test_tokens_that_the_policy_did_not_choose_are_in_no_conflict():
    tokens = [[5, 7, 7, 6, 7, 9], [5, 6, 8, 9]]
    notes = {"token": tokens, "logp": [[-1, None, None, -1, -1, -1], [-1] * 4]}
    notes["entropy"] = [[0.5, None, None, 0.5, 0.5, 0.5], [0.3] * 4]
    found = conflict_tokens(reward_table([1, -1], length=[6, 4], notes=notes)).values[:, 0]
    plain = conflict_tokens(WORKED).values[:, 0]
    assert_rows(found[:1, [0, 3, 4, 5]], plain[:1].tolist())
    assert_rows(found[1:, :4], plain[1:].tolist())


def test_high_covariance_notes_the_steps_that_rise_together():
    # A: 1 1 -1 -1, mean 0; logp -1 -3 -1 -3, mean -2: covariances 1 -1 -1 1
    table = reward_table([1, -1], length=[2, 2], notes={"logp": [[-1, -3], [-1, -3.5]]})
    # logp -3.5 instead: mean -2.125; covariances 1.125, -.875, -1.125, 1.375
    found = high_covariance(table, share=0.25)
    assert found.notes["high_covariance"].tolist() == [[0, 0], [0, 1]]
    assert high_covariance(table, share=0.5).notes["high_covariance"].tolist() == [[1, 0], [0, 1]]
    assert_rows(found.values[:, 0], [[1, 1], [-1, -1]])
    unknown = reward_table([1], length=[2], notes={"logp": [[None, None]]})
    assert high_covariance(unknown).notes["high_covariance"].tolist() == [[0, 0]]


def test_conflict_tokens_run_over_steps_without_a_token():
    plain = conflict_tokens(WORKED).values[:, 0]
    tokens = [[5, None, 6, 7, None, 9], [5, 6, 8, 9]]
    entropy = [[0.5, None, 0.5, 0.5, None, 0.5], [0.3] * 4]
    table = reward_table([1, -1], length=[6, 4], notes={"token": tokens, "entropy": entropy})
    found = conflict_tokens(table).values[:, 0]
    assert_rows(found[0, [0, 2, 3, 5]][None], plain[:1].tolist())
    assert_rows(found[1:, :4], plain[1:].tolist())
