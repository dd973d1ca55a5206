"""Rewards of stepwise retrieval: the route with a tiny embedding model, and the recall of answers."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.types import Outcome, Prompt
from mmrl.papers.r1_router import RouteReward, answer_recall
from tests.rewards.tiny_text import write_bert

TARGET = {"query": "Who painted it?", "retriever": ["Text Image Retriever"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def route(folder):
    return RouteReward(model=folder, device="cpu")


def of(route, *texts, target=TARGET):
    return route([Prompt("a", (), target)] * len(texts), [Outcome(text=text) for text in texts])


def step(query, retriever):
    return f"<think>so</think>\n<sub-question>{query}</sub-question>\n<ret> {retriever} </ret>"


def test_half_is_for_the_question_and_half_for_the_retriever(route):
    same, other = "WHO painted it?", "when was he born"
    near = float(route.embed(["who painted it?"])[0] @ route.embed([other])[0])
    assert -1 <= near < 0.95
    right, wrong = "Text Image Retriever", "table retriever"
    found = of(route, step(same, right), step(same, wrong), step(other, right), step(other, wrong))
    assert found == pytest.approx([1, 0.5, 0.5 * near + 0.5, 0.5 * near], abs=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "<sub-question>who painted it?</sub-question><ret>text image retriever</ret>",
        "<think>so</think><ret>text image retriever</ret>",
        "<think>so</think><sub-question>who painted it?</sub-question>",
        step("who painted it?", "the web"),
        step("who painted it?", "none, text image retriever"),
        step("who painted it?", ""),
    ],
)
def test_a_step_that_is_not_well_formed_earns_0(route, text):
    assert of(route, text) == [0]


def test_two_retrievers_are_no_route(route):
    assert of(route, step("who painted it?", "text retriever, text image retriever")) == pytest.approx([0.5])


def test_none_may_be_the_target(route):
    target = {"query": "None", "retriever": ["none"]}
    assert of(route, step("none", "None"), target=target) == pytest.approx([1])


def test_batches_and_padding_do_not_matter(folder, route):
    texts = ["who painted it?", "when was he born", "he"]
    one_by_one = RouteReward(model=folder, device="cpu", batch_size=1)
    torch.testing.assert_close(route.embed(texts), one_by_one.embed(texts), rtol=0, atol=1e-5)
    means = [
        RouteReward(model=folder, device="cpu", batch_size=n, pooling="mean").embed(texts) for n in (1, 3)
    ]
    torch.testing.assert_close(*means, rtol=0, atol=1e-5)
    assert not torch.allclose(means[0], route.embed(texts), atol=1e-2)


def test_other_steps_are_not_scored(route):
    assert of(route, step("who painted it?", "none"), target="Rembrandt") == [None]
    assert answer_recall([Prompt("a", (), TARGET)], [Outcome(text="<answer>x</answer>")]) == [None]


# ---- the recall of answers


def recall(text, target):
    return answer_recall([Prompt("a", (), target)], [Outcome(text=text)])[0]


def say(text):
    return f"<think>so</think><answer>{text}</answer>"


def test_a_short_answer_wants_every_word():
    assert recall(say("It was Rembrandt van Rijn."), "rembrandt van rijn") == 1
    assert recall(say("Rembrandt"), "rembrandt van rijn") == 0
    assert recall(say("two"), "2") == 1


def test_a_long_answer_earns_its_recall():
    target = "he was born in Leiden in 1606"  # seven words, of which `in` is twice
    assert recall(say(target), target) == 1
    assert recall(say("in Leiden, 1606"), target) == pytest.approx(3 / 7)
    assert recall(say("in Leiden, in 1606"), target) == pytest.approx(4 / 7)


def test_of_several_answers_that_of_the_best_f1_counts():
    several = ("the Night Watch of Rembrandt in Amsterdam", "Night Watch")
    # F1 of the second is 1, of the first 2 * 2 / (2 + 6).
    assert recall(say("the night watch"), several) == 1
    # F1 of the first is 2 * 5 / (5 + 6), of the second 2 * 2 / (5 + 2); 5 of 6 words are not full recall.
    assert recall(say("night watch of rembrandt amsterdam"), several) == 0


@pytest.mark.parametrize(
    "text", [None, "", "Rembrandt", "<answer>Rembrandt</answer>", "<think>Rembrandt</think>"]
)
def test_a_missing_block_earns_0(text):
    assert recall(text, "Rembrandt") == 0


def test_an_answer_without_a_word_earns_0():
    assert recall(say("..."), "Rembrandt") == 0
    assert recall(say("..."), "...") == 0
