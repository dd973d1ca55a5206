"""Pairs and captions are shown beside their images, with scores, and with wrong objects marked."""

from __future__ import annotations

import re

import pytest
import torch

from mmrl.core.reward_table import Measured, RewardTable
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Trajectory
from mmrl.vision.benchmarks.chair import Scene
from mmrl.vision.benchmarks.object_vocabulary import ontology_of
from mmrl.vision.visualizations.answers import captions, marked, pairs

WORDS = ontology_of({"pear": [], "cherries": [], "hot dog": ["frankfurter"]})


def asked(uid, target=None, **columns):
    frames = Frames(torch.full((1, 3, 8, 8), 90, dtype=torch.uint8), torch.zeros(1).double(), 0.0)
    message = Message("user", (Part(media=Media("image", uid, lambda: frames)), Part("describe")))
    return Prompt(uid, (message,), target, columns=columns)


def measured(*rows):
    made = tuple(Trajectory(prompt, prompt.uid, (outcome,), None, 1) for prompt, outcome in rows)
    return Measured({}, {}, made, RewardTable.empty())


def answer(text, preferred, score):
    return Outcome(text=text, recorded={"preferred": preferred, "score": score})


def test_pairs_show_the_better_answer_first_with_scores_and_the_dial():
    prompt = asked("p", h_pos=0.0, h_neg=0.452, flipped=True)
    page = pairs(
        {"<m>": measured((prompt, answer("a <pear>", 0.0, 0.25)), (prompt, answer("nuts", 1.0, 0.5)))}
    )
    words = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert words == (
        "Pairs: &lt;m&gt; chosen 0.500 nuts rejected 0.250 a &lt;pear&gt; h_pos 0.00, h_neg 0.45, reversed"
    )
    assert page.count("data:image/jpeg;base64,") == 1


def test_pairs_pass_over_rows_that_are_none():
    alone, plain = asked("a"), asked("b")
    rows = [(alone, answer("x", 1.0, 0.5)), (plain, Outcome(text="x")), (plain, Outcome(text="y"))]
    assert pairs({"m": measured(*rows)}) == ""


def test_pairs_are_chosen_at_equal_distances():
    rows = [(asked(f"p{i}"), answer(f"word{i}-{j}", float(j), 0.0)) for i in range(6) for j in range(2)]
    page = pairs({"m": measured(*rows)}, num=3)
    assert re.findall(r"word(\d)-1", page) == ["0", "2", "4"]


def test_captions_show_every_model_and_strike_out_what_is_not_there():
    scene = Scene(frozenset({"pear"}), WORDS)
    prompt = asked("p", scene)
    page = captions(
        {
            "start": measured((prompt, Outcome(text="a pear and some cherries"))),
            "after": measured((prompt, Outcome(text="a pear"))),
        }
    )
    assert re.findall(r"<s [^>]*>([^<]*)</s>", page) == ["cherries"]
    assert page.index("start") < page.index("after") and page.count("<img ") == 1
    assert captions({"m": measured((asked("q", "a target of another kind"), Outcome(text="x")))}) == ""


@pytest.mark.parametrize(
    "text, struck",
    [
        ("Hot dogs, a pear", ["Hot dogs"]),
        ("a frankfurter", ["frankfurter"]),
        ("cherries & cherries", ["cherries", "cherries"]),
        ("a <pear>", []),
        ("pearls", []),
    ],
)
def test_marked_strikes_out_words_for_absent_objects_and_escapes_the_rest(text, struck):
    page = marked(Scene(frozenset({"pear"}), WORDS), text)
    assert re.findall(r"<s [^>]*>([^<]*)</s>", page) == struck
    assert "<pear>" not in page
    assert (
        re.sub(r"</?s\b[^>]*>", "", page).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        == text
    )
