"""Unit tests that code passes: what a server is asked, what the forms give, what is a fault."""

from __future__ import annotations

import json

import pytest

from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import RowError
from mmrl.papers.verpo import TestPasses, code_of
from tests.rewards.test_http import server

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
