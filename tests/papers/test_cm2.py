"""Checklists: what is paid when, and what counts as met."""

from __future__ import annotations

import json

import pytest

from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.fields import RowError
from mmrl.papers.cm2 import Checklist, Criterion, conversations, newly_met, read_criteria
from mmrl.rewards.asking import Unread
from mmrl.runtime.scoring import SCORING, Scoring
from tests.rewards.test_judge import between, judging, logged


def asked(*criteria, uid="p"):
    return Prompt(uid, (Message("user", (Part("What is it?"),)),), columns={"criteria": list(criteria)})


def turn(text, number, **tags):
    return Outcome(text=text, tags={"turn": str(number), **tags})


def finds(*words):
    """Judge the n-th criterion as met where the answer has the n-th word, which is quoted."""

    def says(text):
        (answer,) = between(text)
        found = {str(i): word if word in answer else None for i, word in enumerate(words, 1)}
        return f"Let me see. <checklist>{json.dumps(found)}</checklist>"

    return says


def test_the_share_of_the_weights_that_are_met():
    prompt = asked("names a cat", {"criterion": "names a colour", "weight": 3})
    reward, server = judging(finds("cat", "red"), Checklist)
    assert reward([prompt] * 4, [Outcome(text=t) for t in ("a red cat", "a cat", "red", "")]) == [
        1, 0.25, 0.75, 0,
    ]  # fmt: skip
    assert len(server.asked) == 3
    question = server.asked[0].messages[0].parts[0].text
    assert "1. names a cat\n2. names a colour" in question and "copied letter by letter" in question


def test_a_conversation_is_paid_for_a_criterion_once_and_adds_up_to_the_whole():
    prompt = asked("looks", "names a cat", "names a colour", "greets")
    reward, server = judging(finds("look", "cat", "red", "hello"), Checklist)
    texts = ["I look", "a cat", "a red cat, look"]
    found = reward([prompt] * 5, [*(turn(t, i) for i, t in enumerate(texts)), turn("red", 0), turn("", 1)])
    assert found == [0.25, 0.25, 0.25, 0.25, 0]
    whole = judging(finds("look", "cat", "red", "hello"), Checklist)[0]
    assert whole([prompt], [Outcome(text=" ".join(texts))]) == [0.75]
    assert "I look\n\na cat" in server.asked[1].messages[0].parts[0].text


def test_of_a_conversation_with_one_outcome_all_turns_are_read():
    reward, server = judging(finds("look", "cat"), Checklist)
    said = (("assistant", "I look"), ("tool", "x"), ("assistant", "a cat"))
    talk = [Message(role, (Part(text),)) for role, text in said]
    token = SCORING.set(Scoring([None], [talk], [0]))
    found = reward([asked("looks", "names a cat")], [turn("a cat", 1)])
    SCORING.reset(token)
    assert found == [1] and "I look\n\na cat" in server.asked[0].messages[0].parts[0].text


@pytest.mark.parametrize(("needed", "wanted"), [("by_then", [0, 1, 0]), ("before", [0, 0.5, 0.5])])
def test_a_criterion_counts_where_those_that_it_needs_are_met(needed, wanted):
    # The answer needs the look, and comes before it.
    prompt = asked({"criterion": "answers", "needs": [2]}, "looks")
    reward, _ = judging(finds("cat", "look"), Checklist, needed=needed)
    assert reward([prompt] * 3, [turn("cat", 0), turn("look", 1), turn("and", 2)]) == wanted
    assert reward([prompt] * 2, [turn("look", 0), turn("cat", 1)]) == [0.5, 0.5]


def test_needs_of_needs_are_met_in_one_turn_or_in_one_each():
    criteria = [Criterion("a"), Criterion("b", needs=(0,)), Criterion("c", needs=(1,))]
    everything = frozenset({0, 1, 2})
    assert newly_met(criteria, set(), everything, by_then=True) == {0, 1, 2}
    assert newly_met(criteria, set(), everything, by_then=False) == {0}
    assert newly_met(criteria, {0}, everything, by_then=False) == {1}
    assert newly_met(criteria, set(), frozenset({1, 2}), by_then=True) == set()


def test_a_quote_that_the_answer_does_not_have_is_not_met():
    says = lambda text: '<checklist>{"1": "a  red\\ncat", "2": "a dog", "3": " "}</checklist>'
    reward, _ = judging(says, Checklist)
    found, metrics = logged(lambda: reward([asked("a", "b", "c")], [Outcome(text="I see a red cat.")]))
    assert found == [pytest.approx(1 / 3)]
    assert metrics["checklist/misquoted"] == [0, 1, 1]


def test_without_quotes_true_is_met():
    says = lambda text: '<checklist>{"1": true, "2": null, "3": false}</checklist>'
    reward, server = judging(says, Checklist, evidence="none")
    assert reward([asked("a", "b", "c")], [Outcome(text="x")]) == [pytest.approx(1 / 3)]
    assert "otherwise true" in server.asked[0].messages[0].parts[0].text


@pytest.mark.parametrize(
    "said", ["yes", "[]", '{"1": "x"}', '{"1": "x", "2": null, "3": null}', '{"1": true, "2": null}', "{"]
)
def test_another_form_is_a_fault_and_never_zero(said):
    reward, server = judging(lambda text: f"<checklist>{said}</checklist>", Checklist)
    (found,) = reward([asked("a", "b")], [Outcome(text="x")])
    assert isinstance(found, Unread) and "with the entries 1, 2" in repr(found)
    assert len(server.asked) == 3


def test_prompts_have_lists_of_their_own():
    one, two, none = asked("a"), asked("a", "b", uid="q"), Prompt("r", one_message())
    says = lambda text: (
        '<checklist>{"1": "x", "2": null}</checklist>'
        if "2. b" in text
        else '<checklist>{"1": "x"}</checklist>'
    )
    reward, _ = judging(says, Checklist)
    assert reward([one, two, none], [Outcome(text="x")] * 3) == [1, 0.5, None]


def one_message():
    return (Message("user", (Part("What?"),)),)


@pytest.mark.parametrize(
    "entry",
    [3, " ", {}, {"criterion": "a", "weight": 0}, {"criterion": "a", "weight": "2"},
     {"criterion": "a", "needs": [2]}, {"criterion": "a", "colour": "red"}],
)  # fmt: skip
def test_other_criteria_are_errors_that_name_the_prompt(entry):
    with pytest.raises(RowError, match="the column 'criteria' of prompt 'p' has"):
        read_criteria(asked(entry), "criteria")


def test_none_in_a_field_is_no_field():
    entry = {"criterion": "a", "weight": None, "needs": None}
    assert read_criteria(asked(entry), "criteria") == [Criterion("a")]


def test_turns_of_rows_and_of_episodes_are_put_together():
    prompts = [asked(uid=uid) for uid in "ppppqqq"]
    outcomes = [turn("", 0), turn("", 1), turn("", 0), turn("", 2), turn("", 3), Outcome(), Outcome()]
    assert conversations(prompts, outcomes) == [[0, 1], [2, 3], [4], [5], [6]]
    rows = [turn("", 1, episode="a"), turn("", 0, episode="b"), turn("", 0, episode="a")]
    assert conversations(prompts[:3], rows) == [[2, 0], [1]]
