"""Unit tests that code passes: what a server is asked, what the forms give, what is a fault."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch

from mmrl.advantages.normalize import group_center
from mmrl.advantages.shape import total
from mmrl.advantages.some import for_some
from mmrl.advantages.turns import per_episode
from mmrl.core.tensor import rarity
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import RowError
from mmrl.papers.verpo import TestPasses, code_of, rarity_weights, turn_discount
from tests.rewards.test_http import server
from tests.support.tables import assert_rows, reward_table

__all__ = ["server"]
TESTS = ["a", "b", "c"]


def coded(*letters):
    """Write answers whose code is the letters of the tests that it passes."""
    return [Outcome(text=f"So:\n```python\n{word}\n```\n") for word in letters]


def by_letter(asked):
    runs = asked["runs"]
    return {"passed": [[test in run["code"] for test in run["tests"]] for run in runs]}


def measured(server, prompts, outcomes, **options):
    server.answer = by_letter
    return TestPasses(url=server.url, **options)(prompts, outcomes)


def of(*uids, tests=TESTS):
    return [Prompt(uid, (), columns={"tests": tests}) for uid in uids]


def test_the_share_of_tests_or_whether_all_pass(server):
    prompts, outcomes = of("p", "p", "q", "q"), [*coded("ab", "abc", "c"), Outcome(text="No idea.")]
    assert measured(server, prompts, outcomes) == pytest.approx([2 / 3, 1, 1 / 3, 0])
    assert measured(server, prompts, outcomes, form="all") == [0, 1, 0, 0]


def test_what_is_sent_is_code_and_tests_equal_runs_once(server):
    prompts = [*of("p", "p", "p"), Prompt("free", ())]
    found = measured(server, prompts, [*coded("ab", "ab"), Outcome(text="words"), *coded("a")])
    assert found == [pytest.approx(2 / 3), pytest.approx(2 / 3), 0, None]
    assert server.seen == [{"runs": [{"uid": "p", "code": "ab", "tests": TESTS}]}]
    assert json.loads(json.dumps(server.seen)) == server.seen


def test_rare_tests_weigh_more_by_the_worked_numbers(server):
    # Pass rates .9 .8 .1 of ten answers: weights .215935 .238411 .902559
    letters = ["abc", *["ab"] * 7, "a", "x"]
    found = measured(server, of(*["p"] * 10), coded(*letters), form="rarity")
    a, b, c = 0.215935, 0.238411, 0.902559
    assert found == pytest.approx([a + b + c, *[a + b] * 7, a, 0], abs=1e-6)


def test_code_stands_in_the_last_fenced_block_or_in_a_tag():
    text = "```py\nold\n```\nno:\n```\nnew\n  more\n```\n<code>tagged</code>"
    assert code_of(text) == "new\n  more"
    assert code_of(text, "code") == "tagged"
    assert code_of("words with ``` in a line") == code_of("", "code") == ""


@pytest.mark.parametrize(
    "answer", [[[True, False]], [[1, 0, 1]], [None], [["yes", "no", "yes"]], [[True, False, True, True]]]
)
def test_an_answer_of_another_form_is_a_fault(server, answer):
    server.answer = lambda asked: {"passed": answer}
    with pytest.raises(ValueError, match="3 times true or false for the tests of prompt 'p'"):
        TestPasses(url=server.url)(of("p"), coded("a"))


def test_tests_are_a_list(server):
    for tests in ("a", [], {"a": 1}):
        with pytest.raises(RowError, match="wanted a list of tests in the column 'tests' of prompt 'p'"):
            measured(server, of("p", tests=tests), coded("a"))


def test_rare_and_isolated_checks_weigh_more():
    # ten answers with the pass rates .9 .8 .1; the weights of the worked example are .215935 .238411 .902559
    checks = {"a": [1] * 9 + [0], "b": [1] * 8 + [0] * 2, "c": [1] + [0] * 9}
    found = rarity_weights(reward_table(checks))
    a, b, c = 0.215935, 0.238411, 0.902559
    assert_rows(found.values, [a + b + c, *[a + b] * 7, a, 0])
    assert found.names == ("total",)


def test_turns_are_compared_over_the_whole_group():
    # [1,1,0], [1,0,0], [1,1,1] weigh .454346 .215935 1.356905, as turns of one answer; the mean is .675729
    turns = torch.tensor([[0.454346, 0.215935, 1.356905]], dtype=torch.float64)
    table = reward_table([turns[0].tolist()])
    found = group_center(table, by=("group",)).values[:, 0]
    assert_rows(found, [[-0.221383, -0.459794, 0.681176]])


def test_checks_of_other_prompts_share_no_weight():
    table = reward_table({"a": [1, 0, None, None], "b": [None, None, 1, 0]}, group="aabb")
    weight = math.exp(-0.5)
    assert_rows(rarity_weights(table).values, [weight, 0, weight, 0])


def played(rewards, **tags):
    """Lay out conversations with a reward for every turn."""
    turns = [[str(turn) for turn in range(len(row))] for row in rewards]
    return reward_table(rewards, tags={"turn": turns, **tags})


def test_every_turn_of_a_conversation_discounts_its_reward():
    table = played([[0, 0, 1], [0, 1]])
    assert_rows(turn_discount(table).values[:, 0], [[0, 0, 0.729], [0, 0.81]])


def test_verpo_adds_the_comparison_of_turns_to_that_of_conversations():
    # passes of three tests in two turns of two conversations: 110, 111 and 100, 100; rates 1, 1/2, 1/4
    rate = torch.tensor([[1.0, 0.5, 0.25]], dtype=torch.float64)[..., None]
    weight = rarity(rate, torch.ones_like(rate, dtype=torch.bool))[0, :, 0].tolist()
    # their distances .5 .75 .25 give N = 1 + .043937 + .000884, 1 + .043937 + .457833, 1 + .000884 + .457833
    assert weight == pytest.approx([0.352098, 0.403877, 0.533894], abs=1e-6)
    a, b, c = weight
    tests = [[a + b, a + b + c], [a, a]]
    table = reward_table(
        {"solved": [[None, 1], [None, 0]], "tests": tests},
        weights={"tests": 0.5},
        tags={"turn": [list("01")] * 2},
    )
    whole = for_some(
        table, of=("solved",), advantage=(turn_discount, partial(per_episode, advantage=(group_center,)))
    )
    made = total(for_some(whole, of=("tests",), advantage=(partial(group_center, by=("group",)),)))
    mean = (sum(tests[0]) + sum(tests[1])) / 4
    wanted = [[0.405 + 0.5 * (x - mean) for x in tests[0]], [-0.405 + 0.5 * (x - mean) for x in tests[1]]]
    assert_rows(made.values[:, 0], wanted)
