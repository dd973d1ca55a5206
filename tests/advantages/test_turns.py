"""Advantages over turns of conversations, by the worked numbers of the papers."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.normalize import group_center, group_normalize, leave_one_out
from mmrl.advantages.roles import alignment, sibling_shape, unique_center
from mmrl.advantages.select import returns
from mmrl.advantages.shape import scale, total
from mmrl.advantages.tools import (
    ToolProductivity,
    delegated_reward,
    gated_bonus,
    partial_credit,
    productivity,
)
from mmrl.advantages.turns import (
    action_credit,
    episode_mean,
    gigpo,
    history_groups,
    information_gain,
    per_episode,
    share_among_turns,
)
from tests.support.tables import assert_rows, reward_table


def played(rewards, **tags):
    """Lay out conversations with a reward for every turn."""
    turns = [[str(turn) for turn in range(len(row))] for row in rewards]
    return reward_table(rewards, tags={"turn": turns, **tags})


TWO = played([[0, 0, 1], [0, 0]], state=[["s0", "s1", "s2"], ["s0", "s1"]])


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({}, [[0.85125, 0.875, 0.4], [-1.05125, -1.075]]),
        ({"scale": "group"}, [[1.437401, 1.437401, 0.730295], [-1.802549, -1.802549]]),
        # counted once the scores differ from 1/2
        ({"count": "episode"}, [[0.95125, 0.975, 0.5], [-0.95125, -0.975]]),
        ({"omega": 0.0}, [[0.4] * 3, [-0.6] * 2]),
    ],
    ids=str,
)
def test_gigpo_gives_the_worked_numbers(options, wanted):
    assert_rows(gigpo(TWO, **options).values[:, 0], wanted)


def test_gigpo_compares_a_turn_without_a_state_with_none():
    table = played([[0, 0, 1], [0, 0]], state=[["s0", "", ""], ["s0", ""]])
    assert_rows(gigpo(table).values[:, 0], [[0.85125, 0.4, 0.4], [-1.05125, -0.6]])


def test_gigpo_without_states_names_the_tag():
    with pytest.raises(ValueError, match="no outcome has the tag 'state'"):
        gigpo(played([[0, 1], [0, 0]]))


def test_turns_of_one_number_are_compared_as_in_matchtir():
    table = played([[0.5, 1], [1, 0, 0]])
    options = {"gamma": 0.9, "same": ("place",), "scale": "group", "count": "episode", "singleton": "raw"}
    assert_rows(returns(table, gamma=0.9).values[:, 0], [[1.4, 1], [1, 0, 0]])
    halved = scale(gigpo(table, **options), factor=0.5)
    assert_rows(halved.values[:, 0], [[0.707105] * 2, [-0.707105, -0.707105, -0.353552]])


STATES = [["s0", "s1", "s2"], ["s0", "s1", "s2"], ["s0", "s3", "s2"]]


@pytest.mark.parametrize(
    "offset, third", [(1, [0.46, -0.54, 0.2]), (0, [0.466667, -0.533333, 0.2])], ids=["code", "paper"]
)
def test_history_groups_give_the_worked_numbers(offset, third):
    # The paper's example has returns of its own; with gamma 1 they are these.
    table = played([[-0.0475, -0.05, 1], [0, 0, 0], [-0.04, -0.04, 0.8]], state=STATES)
    assert_rows(returns(table).values[:, 0], [[0.9025, 0.95, 1], [0, 0, 0], [0.72, 0.76, 0.8]])
    found = history_groups(table, depth=1, gamma=1.0, weight_offset=offset).values[:, 0]
    wanted = [[0.361667, 0.475], [-0.540833, -0.475], [0.179167, 0]]
    assert_rows(found, [[*row, last] for row, last in zip(wanted, third, strict=True)], tolerance=3e-6)


def test_a_context_is_no_longer_than_the_conversation_so_far():
    # Equal states everywhere: the first turn has the depth 1 alone, the second both.
    table = played([[0, 1], [0, 0]], state=[["s", "s"], ["s", "s"]])
    found = history_groups(table, depth=1, gamma=1.0, weight_offset=0).values[:, 0]
    # Four turns of state s: returns 1, 1, 0, 0. Two with the history s s: returns 1, 0.
    assert_rows(found, [[0.5, 0.5], [-0.5, -0.5]], tolerance=1e-5)


def test_information_gain_rewards_the_rise_of_the_right_answer():
    table = reward_table(
        {"f1": [[None, None, 1], [None, None, 0]], "p": [[0.1, 0.3, 0.6], [0.1, 0.2, 0.15]]},
        weights={"p": 0.0},
        tags={"turn": [list("012")] * 2},
    )
    gained = information_gain(table, of="p")
    assert_rows(gained.values[:, 0], [[0.2, 0.3, 1], [0.1, -0.05, 0]])
    carried = returns(gained)
    assert_rows(carried.values[:, 0], [[1.5, 1.3, 1], [0.05, -0.05, 0]])
    assert_rows(group_center(carried).values[:, 0], [[0.725, 0.675, 0.5], [-0.725, -0.675, -0.5]])


def test_a_conversation_weighs_the_same_however_many_turns_it_has():
    table = played([[1, 1, 1, 1], [1, 1]])
    assert_rows(episode_mean(table).values[:, 0], [[0.25] * 4, [0.5] * 2])
    assert_rows(episode_mean(table, scale="mul").values[:, 0], [[4] * 4, [2] * 2])


def test_an_action_is_compared_with_others_of_its_kind():
    table = reward_table(
        {"reward": [[1, 1], [0, 0]], "use": [[1, 0.5], [0, 1]]},
        weights={"use": 0.0},
        tags={"action": [["add", "link"], ["add", "stop"]]},
    )
    # add: 1 and 0 about 1/2; link and stop were chosen once
    assert_rows(action_credit(table, of="use").values[:, 0], [[1.25, 1], [-0.25, 0]])


def test_a_conversation_that_was_won_shares_one_reward_among_its_turns():
    # meow-tea-taro: won with three paid turns; lost, of 4 in all; won without any paid turn
    table = reward_table(
        {
            "turn": [[0, 1, 0, 1, 1], [1, 0, 1, None, None], [0, 0, None, None, None]],
            "won": [[None] * 4 + [1], [None, None, 0, None, None], [None, 1, None, None, None]],
        },
        weights={"won": 0.0},
        tags={"turn": [list("01234"), [*"012", "", ""], [*"01", "", "", ""]]},
    )
    shared = share_among_turns(total(table), of="won", largest=4)
    third = 1 / 3
    assert_rows(shared.values[:1, 0], [[0, third, 0, third, third]])
    assert_rows(shared.values[1:2, 0, :3], [[0.25, 0, 0.25]])
    assert_rows(shared.values[2:, 0, :2], [[0, 0]])
    assert_rows(returns(shared).values[:1, 0], [[1, 1, 2 / 3, 2 / 3, 1 / 3]])
    assert_rows(share_among_turns(total(table), of="won", largest=0.5).values[1:2, 0, :3], [[1, 0, 1]])


# ---- roles


def test_mars_counts_equal_returns_of_a_player_once():
    table = played([[0, 1], [0, 0]], role=[["A", "A"], ["A", "A"]])
    centred = group_center(table, by=("role",))
    carried = returns(centred, by=("role",))
    assert_rows(carried.values[:, 0], [[0.5, 0.75], [-0.5, -0.25]])
    found = unique_center(carried, by=("role",)).values[:, 0]
    assert_rows(found, [[0.375, 0.625], [-0.625, -0.375]])
    twice = reward_table([[1, 1], [1, 0]])
    assert_rows(unique_center(twice).values[:, 0], [[0.5, 0.5], [0.5, -0.5]])  # the mean of 1 and 0


def test_returns_of_a_player_leave_out_the_turns_of_others():
    table = played([[1, 10, 2, 20, 4]], role=[["A", "B", "A", "B", "A"]])
    assert_rows(returns(table, gamma=0.5, by=("role",)).values[:, 0], [[3, 20, 4, 20, 4]])


def test_alignment_adds_the_others_advantage():
    roles = [["A", "B"] * 3]
    table = played([[1, 0.3, -0.5, 0.4, 0.2, -0.6]], role=roles)
    found = alignment(table).values[0, 0]
    assert_rows(found[None, 0::2], [[1, 0.237280, -0.308723]])
    assert_rows(alignment(table, discounted=True).values[:, 0, 0::2], [[1, 0.227789, -0.284519]])
    assert torch.equal(alignment(table, beta=0.0).values, table.values)
    # The other player's: w = .96 * .96 * .3, and its own advantage .4 against the other's -.5
    assert found[3].item() == pytest.approx(0.4 + 2 * 0.27648 * -0.5)


def test_games_of_one_start_are_compared_with_the_others():
    table = played([[1, 0], [0, 2], [3, 1]])
    found = leave_one_out(returns(table, gamma=0.96))
    assert_rows(found.values[:, 0], [[-1.94, -1.5], [-0.56, 1.5], [2.5, 0]])


def test_alignment_of_three_players_is_an_error():
    with pytest.raises(ValueError, match="two players"):
        alignment(played([[1, 2, 3]], role=[["A", "B", "C"]]))


def test_a_public_baseline_is_that_of_a_class_of_roles():
    # AdvEvo-MARL: attackers and defenders; then all are divided by one deviation
    table = reward_table([1, 0.5, 0, -0.2, 0.6], tags={"role": ["a", "a", "a", "d", "d"]})
    centred = group_center(table, by=("role",))
    assert_rows(centred.values[:, 0], [[0.5], [0], [-0.5], [-0.4], [0.4]])
    found = group_normalize(centred, by=(), std="population", eps=0.0).values[:, 0]
    assert_rows(found, [[1.234662], [0], [-1.234662], [-0.987730], [0.987730]])


def test_a_tree_is_shaped_by_parents_and_siblings():
    tree = {"node": list("01234"), "parent": ["", "", "0", "0", "1"]}
    table = reward_table([0.4, 0.8, 1, 0, 0.6], tags=tree)
    shaped = sibling_shape(table)
    assert_rows(shaped.values[:, 0], [[0.2], [1], [1.4], [-0.35], [0.5]])
    found = group_normalize(shaped, by=("group",), eps=1e-9).values[:, 0]
    assert_rows(found, [[-0.513265], [0.659912], [1.246500], [-1.319824], [-0.073324]])
    assert torch.equal(sibling_shape(table, gamma=0.0).values, table.values)


def test_sub_agents_earn_by_what_the_main_agent_reached():
    # Three conversations: right, wrong, right with a sub-agent of a bad format; two sub-agents' turns each.
    table = reward_table(
        {
            "right": [[None, None, 1], [None, None, 0.1], [None, None, 1]],
            "format": [[1, 1, 1], [1, 1, 1], [1, 0, 1]],
        },
        weights={"format": 0.0},
        tags={"turn": [list("012")] * 3, "role": [["main", "sub", "main"]] * 3},
    )
    rewarded = delegated_reward(table, of="right", format="format")
    assert rewarded.valid[:, 0].tolist() == [[False, True, True]] * 3
    assert_rows(rewarded.values[:, 0, 1:], [[1, 1], [0.1, 0.1], [0, 1]])
    merged = per_episode(rewarded, by=("role",), advantage=(by_role,))
    mean = 1.1 / 3
    assert_rows(merged.values[:, 0, 1:2], [[1 - mean], [0.1 - mean], [-mean]])
    assert_rows(merged.values[:, 0, ::2], [[0.3, 0.3], [-0.6, -0.6], [0.3, 0.3]])


def by_role(table):
    return group_center(table, by=("group", "role"))


# ---- tools


@pytest.mark.parametrize(
    "least, smoothing, wanted",
    [(2, 1.0, [0, 0.866025, 1, 0.951057, 0.866025]), (0, 1.0, [1, 0.5, 0.309017, 0.222521])],
)
def test_tool_productivity_is_one_at_the_fewest_calls(least, smoothing, wanted):
    found = [productivity(calls, least, smoothing) for calls in range(len(wanted))]
    assert found == pytest.approx(wanted, abs=1e-6)


def test_the_fewest_calls_of_a_prompt_are_remembered():
    piece = ToolProductivity(of="right", calls="tool_calls")
    first = reward_table({"right": [1, 1, 0], "tool_calls": [4, 2, 0]}, weights={"tool_calls": 0.0})
    assert torch.equal(piece(first).values, first.values), "no answer was right yet"
    piece.observe((), first)
    assert_rows(piece(first).values[:, 0], [[0.866025], [1], [0]])
    later = reward_table({"right": [1], "tool_calls": [3]}, weights={"tool_calls": 0.0})
    piece.observe((), later)
    assert_rows(piece(later).values[:, 0], [[0.951057]])


def test_wrong_answers_earn_for_what_they_found():
    table = reward_table({"right": [0, 1, 0, 0], "entities": [0.5, 0.75, 0.25, 0]}, weights={"entities": 0.0})
    shaped = partial_credit(table, of="right", found="entities")
    assert_rows(shaped.values[:, 0], [[0.2], [1], [0.1], [0]])
    wanted = [[-0.273315], [1.475899], [-0.491966], [-0.710618]]
    assert_rows(group_normalize(shaped, eps=1e-6).values[:, 0], wanted)
    nobody = reward_table({"right": [0, 0], "entities": [0, 0]}, weights={"entities": 0.0})
    assert partial_credit(nobody, of="right", found="entities").values.tolist() == [[[0]], [[0]]]


def test_good_steps_are_paid_for_behind_a_right_answer_of_a_good_format():
    cases = [(1, 1, 0.75), (1, 1, 1.0), (1, 0, 1.0), (0, 1, 1.0), (0, 0, 1.0), (1, 1, None)]
    right, good, share = zip(*cases, strict=True)
    table = reward_table(
        {"right": right, "format": good, "share": share}, weights={"format": 0.0, "share": 0.0}
    )
    found = gated_bonus(table, of="right", format="format", share="share").values[:, 0]
    assert_rows(found, [[1.3], [1.4], [0.8], [0.2], [0], [1]])


def test_roles_without_their_tag_are_a_clear_error():
    with pytest.raises(ValueError, match="no outcome has the tag 'role', which the engine or the data set"):
        per_episode(played([[0, 1], [0, 0]]), by=("role",), advantage=(by_role,))
