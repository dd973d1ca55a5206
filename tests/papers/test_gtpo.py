"""GTPO: tokens in conflict, by worked numbers."""

from __future__ import annotations

import torch

from mmrl.papers.gtpo import conflict_tokens
from tests.support.tables import assert_rows, reward_table

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


def test_conflict_tokens_run_over_steps_without_a_token():
    plain = conflict_tokens(WORKED).values[:, 0]
    tokens = [[5, None, 6, 7, None, 9], [5, 6, 8, 9]]
    entropy = [[0.5, None, 0.5, 0.5, None, 0.5], [0.3] * 4]
    table = reward_table([1, -1], length=[6, 4], notes={"token": tokens, "entropy": entropy})
    found = conflict_tokens(table).values[:, 0]
    assert_rows(found[0, [0, 2, 3, 5]][None], plain[:1].tolist())
    assert_rows(found[1:, :4], plain[1:].tolist())
