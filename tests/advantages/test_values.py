"""Credit from values: VGPO's, and credit of critics around unchosen steps."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.normalize import batch_normalize, group_normalize
from mmrl.advantages.select import returns
from mmrl.advantages.shape import scale_by, value_anchor, value_weights
from mmrl.advantages.values import gae, lambda_returns, value_baseline, value_label, value_targets
from tests.support.tables import NAN, assert_rows, reward_table

REWARDS = [0.2, 0.3, 0.5, 0.6]


def test_value_weights_are_values_over_the_mean_of_the_row():
    # backwards: .6, .5 + .99 * .6 = 1.094, .3 + .99 * 1.094, .2 + .99 * 1.38306; their mean is 1.161572
    table = value_weights(returns(reward_table([REWARDS]), gamma=0.99))
    assert_rows(table.scored["value"], [[1.569229, 1.383060, 1.094000, 0.600000]])
    assert_rows(table.scored["value_weight"], [[1.350953, 1.190679, 0.941827, 0.516541]])
    assert table.values[:, 0].equal(table.scored["value"]), "the values themselves stay"


@pytest.mark.parametrize("row", [[-1.0, 0.5], [0.0, 0.0], [1e-7, 1e-7]])
def test_value_weights_are_1_where_the_mean_is_not_positive(row):
    assert_rows(value_weights(reward_table([row])).scored["value_weight"], [[1, 1]])


def test_value_weights_are_unknown_where_the_value_is_and_do_not_count_it():
    table = value_weights(reward_table([[None, 2.0, 6.0], [3.0]]))
    assert_rows(table.scored["value_weight"], [[NAN, 0.5, 1.5], [1.0]])
    assert table.scored["value_weight"][1, 1:].isnan().all()


def test_the_value_of_several_rewards_is_their_weighted_sum():
    table = reward_table({"a": [[1.0, 3.0]], "b": [[2.0, 0.0]]}, weights={"b": 0.5})
    assert_rows(value_weights(table).scored["value"], [[2.0, 3.0]])


def anchored(values, **options):
    """Normalise one place of a group and add the anchor."""
    table = group_normalize(value_weights(reward_table(values)), std="population")
    return value_anchor(table, **options).values[:, 0]


def test_value_anchor_adds_a_share_of_the_value():
    # +-.2 / (.141421 + 1e-4) = 1.413214, and a tenth of 1, 1.2, .8, 1
    assert_rows(anchored([1.0, 1.2, 0.8, 1.0]), [[0.1], [1.533214], [-1.333214], [0.1]])


def test_a_group_of_equals_still_learns_from_its_value():
    assert_rows(anchored([1.0] * 3), [[0.1]] * 3)
    assert_rows(anchored([0.5], k=1.0), [[0.5]])


def test_value_anchor_acts_on_the_first_steps_only():
    table = value_anchor(value_weights(reward_table([[1.0] * 7])).put(torch.zeros(1, 1, 7)))
    assert_rows(table.values[:, 0], [[0.1] * 5 + [0.0] * 2])
    table = value_anchor(reward_table([[1.0, 1.0]], ends=[[2, 6]]), of="reward", k=1.0)
    assert_rows(table.values[:, 0], [[2.0, 1.0]])  # places that end behind 2 and behind 6 steps


def test_value_anchor_names_the_label_that_is_missing():
    with pytest.raises(ValueError, match="'value', but there are only reward; put `value_weights` before it"):
        value_anchor(reward_table([1.0]))


def test_the_chain_of_vgpo():
    table = value_weights(returns(reward_table([REWARDS, [0.2, 0.3, 0.5, 0.2]]), gamma=0.99))
    omega, q = table.scored["value_weight"], table.scored["value"]
    table = scale_by(value_anchor(group_normalize(table, std="population"), steps=2), of="value_weight")
    mean, spread = q.mean(0), q.std(0, unbiased=False)
    wanted = (q - mean) / (spread + 1e-4)
    wanted[:, :2] += 0.1 * q[:, :2]
    torch.testing.assert_close(table.values[:, 0], omega * wanted)


def test_a_value_counts_where_any_reward_applies_and_by_those_alone():
    table = reward_table({"a": [[1, 2]], "b": [[None, 4]]})
    assert_rows(value_weights(table).scored["value"], [[1, 6]])


def test_values_are_divided_by_a_mean_above_one_in_a_million():
    found = value_weights(reward_table([[1e-6, 2e-6], [0.8e-6, 1e-6], [1e-3, 3e-3]]))
    assert_rows(found.scored["value_weight"], [[2 / 3, 4 / 3], [1, 1], [0.5, 1.5]])


# ---- steps that the policy did not choose have no value

WINDOW = [None] * 4  # what was written before this step


def test_whitening_after_gae_counts_steps_with_a_value_alone():
    # lambda 1: 1 - .5 and 1 - .6, then 0 - .5 and 0 - .4; mean 0, deviation sqrt(.82 / 3) = .522813
    wanted = [0.956365, 0.765092], [-0.956365, -0.765092]
    table = reward_table([1, 0], length=[2, 2], notes={"critic/value": [[0.5, 0.6], [0.5, 0.4]]})
    assert_rows(batch_normalize(gae(table, lam=1.0), eps=0).values[:, 0], wanted)
    table = reward_table([1, 0], length=[6, 2], notes={"critic/value": [[*WINDOW, 0.5, 0.6], [0.5, 0.4]]})
    found = batch_normalize(gae(table, lam=1.0), eps=0)
    assert_rows(found.values[:1, 0, 4:], wanted[:1])
    assert_rows(found.values[1:, 0], wanted[1:])
    assert found.valid[:, 0].tolist() == [[False] * 4 + [True] * 2, [True] * 2 + [False] * 4]
    assert lambda_returns(table).valid.equal(found.valid)


def test_the_value_of_a_prompt_is_that_of_the_first_step_that_has_one():
    table = reward_table([1, 0], length=[2, 2], notes={"critic/value": [[None, 0.5], [0.5, 0.6]]})
    assert_rows(value_baseline(table).values[:, 0], [[0.5], [-0.5]])
    assert_rows(value_label(table).scored["predicted"], [[0.5], [0.5]])


def test_the_target_of_a_prompt_is_at_the_first_step_that_the_policy_chose():
    # Two steps of an earlier window come first; the prefix ends at step 3, a reply of a tool, and 4 follows.
    notes = {"logp": [[None, None, -1.0, None, -1.0], [-1.0]]}
    table = reward_table([1, 0], length=[5, 1], notes=notes)
    found = value_targets(table)
    assert_rows(found.values[:, 0], [[0, 0, 1, 0, 0], [0]])
    assert found.valid[:, 0].tolist() == [[False, False, True, False, False], [True] + [False] * 4]
    found = value_targets(reward_table([[0.5, 1], [0]], ends=[[3, 5], [1]], length=[5, 1], notes=notes))
    assert_rows(found.values[:1, 0], [[0, 0, 0, 0, 0.5]])
    assert found.valid[0, 0].tolist() == [False] * 4 + [True]


def test_a_prefix_after_which_the_policy_chose_nothing_has_no_target():
    notes = {"logp": [[-1.0, None]]}
    found = value_targets(reward_table([[0.5, 1]], ends=[[1, 2]], length=[2], notes=notes))
    assert not found.valid.any() and not found.learn.any()


# q = log pi - log ref of [.2, -.1, .3] and [-.2, .1]; the means are .133333 and -.05
