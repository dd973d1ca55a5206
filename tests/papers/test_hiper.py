"""Hierarchical advantages by the worked numbers of HiPER."""

from __future__ import annotations

from mmrl.papers.hiper import hae, hae_with_switches
from tests.support.tables import assert_rows, reward_table


def test_hae_gives_the_worked_advantages_of_plans_and_actions():
    # A plan of one token before the turns 0 and 2, and four actions of one token.
    parts = ["plan", "act", "act", "plan", "act", "act"]
    low, high = [0, 0.3, 0.4, 0, 0.5, 0.6], [0.5, 9, 9, 0.7, 9, 9]
    table = reward_table(
        [[None, 0, 0.2, None, 0, 1]],
        tags={"part": [parts], "turn": [list("001223")]},
        notes={"critic/value": [low], "planner/value": [high]},
    )
    found = hae(table).values[0, 0]
    assert_rows(found[None, [1, 2, 4, 5]], [[0.559667, 0.493, 0.4702, 0.4]])
    assert_rows(found[None, [0, 3]], [[0.654088, 0.29]])


def test_hae_credits_the_decision_to_keep_a_plan():
    # The same conversation, where every turn decides first; the decision of turn 1 keeps the plan.
    parts = ["switch", "plan", "act", "switch", "act", "switch", "plan", "act", "switch", "act"]
    low = [0, 0, 0.3, 0, 0.4, 0, 0, 0.5, 0, 0.6]
    high = [9, 0.5, 9, 9, 9, 9, 0.7, 9, 9, 9]
    third = [0.1, 9, 9, 0.2, 9, 0.3, 9, 9, 0.4, 9]
    rewards = [None, None, 0, -0.05, 0.2, None, None, 0, None, 1]
    notes = {"critic/value": [low], "planner/value": [high], "terminator/value": [third]}
    table = reward_table([rewards], tags={"part": [parts], "turn": [list("0001122233")]}, notes=notes)
    found = hae_with_switches(table).values[0, 0]
    assert_rows(found[None, [2, 4, 7, 9]], [[0.559667, 0.493, 0.4702, 0.4]])
    assert_rows(found[None, [1, 6]], [[0.654088, 0.29]])
    # To the end of the segment: .99 .2 + .99^2 .7; -.05 + .2 + .99 .7; .99; 1; less the decision's value.
    assert_rows(found[None, [0, 3, 5, 8]], [[0.78407, 0.643, 0.69, 0.6]])
