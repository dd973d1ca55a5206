"""Rewards of the form of a text: best, worst and malformed answers."""

from __future__ import annotations

import pytest

from mmrl.core.answers import words_of
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.rewards.text import (
    answer_cluster,
    exact_match,
    overlong,
    precomputed,
    tag_format,
    think_format,
)


def asked(target="", **columns):
    return Prompt("p", (Message("user", (Part("why"),)),), target=target, columns=columns)


def measure(reward, *texts, prompt=None, **options):
    """Measure texts as answers to one prompt."""
    prompt = prompt or asked()
    return reward([prompt] * len(texts), [Outcome(text=text) for text in texts], **options)


def test_tag_format_wants_exactly_the_blocks_in_order():
    good = "<think>because</think>\n <answer>1 to 2</answer>"
    swapped = "<answer>1 to 2</answer><think>because</think>"
    assert measure(tag_format, good, swapped) == [1, 0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 to 2",
        "<think>a</think>",
        "so <think>a</think><answer>b</answer>",
        "<think>a</think><answer>b</answer> indeed",
        "<think>a</think> hence <answer>b</answer>",
        "<think>a<answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a</think><think>b</think><answer>c</answer>",
        "<think><think>a</think><answer>b</answer>",
    ],
)
def test_anything_else_has_not_the_format(text):
    assert measure(tag_format, text) == [0]


def test_case_space_around_and_empty_blocks_do_not_matter():
    assert measure(tag_format, " <THINK>\n\n</think>\n<Answer></ANSWER>\n") == [1]


def test_other_tags_may_be_asked_by_option_by_the_answer_or_by_the_prompt():
    bare = "<answer>3</answer>"
    assert measure(tag_format, bare) == [0]
    assert measure(tag_format, bare, tags="answer") == [1]
    assert measure(tag_format, bare, prompt=asked(format="answer")) == [1]
    shown = Outcome(text=bare, tags={"format": "answer"})
    assert tag_format([asked()], [shown]) == [1]
    assert tag_format([asked()], [shown], tags="think,answer") == [0], "the option comes first"
    assert tag_format([asked(format="think,answer")], [shown]) == [1], "then what the answer says"


def test_an_answer_without_text_has_no_format():
    assert tag_format([asked()], [Outcome()]) == [0]


def test_think_format_wants_one_closed_block_at_the_beginning():
    good, late, open_ = "<think>a\nb</think> c", "c <think>a</think>", "<think>a"
    assert measure(think_format, good, late, open_, "<think>a<think>b</think>") == [1, 0, 0, 0]


def test_exact_match_compares_the_last_block_but_for_case_and_space():
    answers = [
        "<answer>no</answer> <answer> New\n York </answer>",
        "<answer>New York</answer><answer>no</answer>",
    ]
    assert measure(exact_match, *answers, prompt=asked("new york")) == [1, 0]


def test_exact_match_without_a_block_compares_the_whole_text():
    assert measure(exact_match, "New  York", "it is New York", "", prompt=asked("new york")) == [1, 0, 0]
    assert measure(exact_match, "7", prompt=asked(7)) == [1]


def test_exact_match_reads_another_tag():
    assert measure(exact_match, "<box>7</box> 8", prompt=asked(7), tag="box") == [1]


DAPO = {"max_completion_length": 20480, "soft_punish_cache": 4096}


def test_overlong_falls_from_0_to_minus_1_before_the_limit():
    # the line begins at 20480 - 4096 = 16384, and is halfway at 18432
    lengths = [16000, 16384, 18432, 20480, 20481]
    outcomes = [Outcome(text="", end=length) for length in lengths]
    assert overlong([asked()] * 5, outcomes, **DAPO) == [0, 0, -0.5, -1, -1]


def test_overlong_without_a_buffer_is_a_step():
    outcomes = [Outcome(end=10), Outcome(end=11)]
    assert overlong([asked()] * 2, outcomes, max_completion_length=10, soft_punish_cache=0) == [0, -1]


def test_overlong_refuses_an_outcome_of_unknown_length():
    with pytest.raises(ValueError, match="counts steps, but the outcome of prompt 'p' has no `end`"):
        overlong([asked()], [Outcome(text="long")], **DAPO)


def test_recorded_reads_what_was_measured_and_does_not_apply_elsewhere():
    outcomes = [Outcome(recorded={"clip": 0.25}), Outcome(recorded={"other": 1.0})]
    assert precomputed([asked()] * 2, outcomes, key="clip") == [0.25, None]


def test_words_are_compared_without_articles_and_punctuation_and_numbers_in_digits():
    assert words_of("The dog, and  TWO cats!") == ["dog", "and", "2", "cats"]


def test_answer_cluster_numbers_equal_answers_alike():
    answers = [
        "<answer>New  York</answer>",
        "so <answer>new york</answer>",
        "NEW YORK",
        "York",
        " ",
        "<answer> </answer>",
    ]
    first, second, whole, other, *empty = measure(answer_cluster, *answers, prompt=asked("paris"))
    assert first == second == whole != other and 0 <= other < 1
    assert empty == [None, None]
