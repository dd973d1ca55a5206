"""Rubrics: weighted scores, a memory of failures, and changes of the criteria that survive a resume."""

from __future__ import annotations

import json
import re

import pytest

from mmrl.config.loading import ConfigError
from mmrl.core.from_numbers import reward_table
from mmrl.core.rng import Stream
from mmrl.papers.amaris import Failure, Rubric, likeness
from mmrl.rewards.asking import Unread
from tests.rewards.test_judge import Says, between, group

START = {"right": 3.0, "short": 1.0}
TABLE = reward_table([1.0])


def judged(text):
    """Score an answer `a b` by its numbers; the worst criterion fails because of the answer's words."""
    if "<edit>" in text:
        return '<edit>{"add": "polite"}</edit>'
    scores = [int(number) for number in between(text)[0].split()]
    scores += [1] * (len(re.findall(r"^\d\. ", text, re.MULTILINE)) - len(scores))
    worst = scores.index(min(scores)) + 1
    why = f"only {min(scores)}"
    return f"<rubric>{json.dumps({'scores': scores, 'worst': worst, 'why': why})}</rubric>"


def made(says=judged, criteria=START, **options):
    server = Says(says)
    return Rubric(stream=Stream(4), engine=lambda policy: server, criteria=criteria, **options), server


def observed(rubric, *texts, step=0):
    rubric.stream.step = step
    rewards = rubric(*group(*texts))
    rubric.observe((), TABLE)
    return rewards


def test_scores_are_weighted_and_weights_sum_to_one():
    rubric, server = made(update_every=0)
    assert rubric(*group("10 1", "1 10", "", "10 10")) == [0.75, 0.25, 0, 1]
    question = server.asked[0].messages[0].parts[0].text
    assert "1. right\n2. short" in question and '"scores": [10.0, 10.0]' in question


@pytest.mark.parametrize(
    "said",
    ["", "7 3", '{"scores": [7], "worst": 1, "why": ""}', '{"scores": [7, 11], "worst": 1, "why": ""}',
     '{"scores": [7, 3], "worst": 3, "why": ""}', '{"scores": [7, 3]}', '{"scores": [true, 3], "worst": 1}'],
)  # fmt: skip
def test_another_form_is_a_fault_and_never_zero(said):
    rubric, _ = made(lambda text: f"<rubric>{said}</rubric>")
    assert isinstance(rubric(*group("1 1"))[0], Unread)


def test_failures_are_remembered_by_criterion_and_criteria_change_between_rounds():
    rubric, server = made()
    assert observed(rubric, "10 1", "10 2", "10 2", "10 10", step=3)[0] == 0.75
    assert rubric.memory == [Failure(3, "short", 3, 4, "only 2; only 1")]  # the most frequent reason first
    assert rubric.criteria == {"right": 3, "short": 1, "polite": 2}  # with the mean weight
    assert rubric.pop_metrics() == {"rubric/version": 1, "rubric/criteria": 3, "rubric/unread": 0}
    asked = server.asked[-1].messages[0].parts[0].text
    assert "1. right (weight 3)" in asked and "- step 3, 3 of 4 answers by 'short': only 2; only 1" in asked
    # The next round is judged by three criteria; the third is 1 of 10, so 0 of 1: (3 + 1 + 0) / 6.
    assert rubric(*group("10 10")) == [pytest.approx(4 / 6)]


def test_a_state_goes_on_exactly():
    whole, _ = made(max_memory=3)
    half, _ = made(max_memory=3)
    for step, texts in enumerate([("10 1", "3 10"), ("1 10",), ("10 4", "9 9")]):
        if step == 2:
            again, _ = made(max_memory=3)
            again.load_state_dict(json.loads(json.dumps(half.state_dict())))
            half = again
        assert observed(whole, *texts, step=step) == observed(half, *texts, step=step)
    assert whole.state_dict() == half.state_dict()
    assert len(whole.memory) == 3 and len(whole.changes) == 1  # the same criterion is not added twice


def test_two_processes_remember_what_one_does():
    one, _ = made()
    observed(one, "10 1", "10 2", "1 10", step=1)
    two, _ = made()
    parts = []
    for texts in (("1 10", "10 2"), ("10 1",)):
        two(*group(*texts))
        parts.append([two.failures, two.judged])
    gathered = iter([json.loads(json.dumps(parts)), [{"add": "polite"}] * 2])
    two.connect(None, lambda value: next(gathered))
    two.stream.step = 1
    two.observe((), TABLE)
    assert one.state_dict() == two.state_dict()


def test_a_call_that_is_made_again_counts_once():
    rubric, _ = made(update_every=0)
    for _ in range(2):
        rubric(*group("10 1"))
    rubric.observe((), TABLE)
    assert [(item.count, item.total) for item in rubric.memory] == [(1, 1)]
    rubric.observe((), TABLE)  # a round without answers
    assert len(rubric.memory) == 1


@pytest.mark.parametrize(
    ("change", "wanted", "unread"),
    [
        ('{"update": 2, "text": "brief"}', {"right": 3, "brief": 1}, 0),
        ('{"delete": 1}', {"short": 1}, 0),
        ("{}", START, 0),
        ('{"delete": 3}', START, 1),
        ('{"update": 0, "text": "brief"}', START, 1),
        ('{"add": "right"}', START, 1),
        ('{"add": " "}', START, 1),
        ('{"add": "a", "delete": 1}', START, 1),
        ("nothing", START, 1),
    ],
)
def test_a_change_is_made_or_counted(change, wanted, unread):
    says = lambda text: f"<edit>{change}</edit>" if "<edit>" in text else judged(text)
    rubric, _ = made(says, ask_again=0)
    observed(rubric, "10 1")
    assert rubric.criteria == wanted and rubric.pop_metrics()["rubric/unread"] == unread


def test_limits_hold():
    rubric, server = made(max_criteria=2, update_every=2)
    observed(rubric, "10 1")
    assert not any("<edit>" in prompt.messages[0].parts[0].text for prompt in server.asked)
    observed(rubric, "10 1")
    assert rubric.criteria == START and rubric.pop_metrics()["rubric/unread"] == 1
    one, _ = made(lambda text: '<edit>{"delete": 1}</edit>' if "<edit>" in text else judged(text), {"a": 1})
    observed(one, "1")
    assert one.criteria == {"a": 1}


def test_a_proposal_reads_the_newest_failures_and_those_most_like_them():
    rubric, _ = made(recent=1, similar=1)
    whys = ["the colour is wrong", "far too long", "wrong colour of the cat"]
    rubric.memory = [Failure(i, "right", 1, 2, why) for i, why in enumerate(whys)]
    text = rubric._proposal().messages[0].parts[0].text
    newest, similar = text.split("Earlier failures like them:")
    assert "colour of the cat" in newest and "the colour is wrong" in similar
    assert "far too long" not in text


def test_likeness_is_the_cosine_of_word_counts():
    assert likeness("red cat", "red dog") == pytest.approx(0.5)
    assert likeness("red red cat", "red") == pytest.approx(2 / 5**0.5)
    assert likeness("", "red") == 0


@pytest.mark.parametrize("criteria", [{}, {"a": 0}, {"a": -1}])
def test_criteria_need_weights(criteria):
    with pytest.raises(ConfigError, match="texts with weights above 0"):
        made(criteria=criteria)
