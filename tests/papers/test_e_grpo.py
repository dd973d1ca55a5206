"""E-GRPO: entities that an answer names, and what a wrong answer earns for them."""

from __future__ import annotations

from mmrl.advantages.normalize import group_normalize
from mmrl.core.types import Outcome, Prompt
from mmrl.papers.e_grpo import entity_match, partial_credit
from tests.support.tables import assert_rows, reward_table


def test_answers_of_a_bad_format_or_that_were_cut_earn_nothing():
    measured = {"right": [1, 0, 0, 1], "entities": [0.5, 0.75, 0.25, 0.5], "format": [0, 1, 1, 1]}
    table = reward_table(
        measured,
        weights={"entities": 0.0, "format": 0.0},
        tags={"finish": ["stop", "stop", "length", "length"]},
    )
    # .3 * .75 / .75 for the second; the others have no format, or no end
    shaped = partial_credit(table, of="right", found="entities", unless="format")
    assert_rows(shaped.values[:, 0], [[0], [0.3], [0], [0]])


def one(piece, text, columns=None, tags=None, **options):
    prompt = Prompt("a", (), columns=columns or {})
    return piece([prompt], [Outcome(text, tags=tags or {})], **options)[0]


def test_entities_are_found_as_whole_words():
    columns = {"entities": ["The Eiffel Tower", "Paris", "Rome", "art"]}
    text = "<think>the Eiffel tower stands in Paris, partly</think> Rome"
    assert one(entity_match, text, columns) == 0.75
    assert one(entity_match, text, columns, tag="think") == 0.5
    assert one(entity_match, text) is None


def test_wrong_answers_earn_for_what_they_found():
    table = reward_table({"right": [0, 1, 0, 0], "entities": [0.5, 0.75, 0.25, 0]}, weights={"entities": 0.0})
    shaped = partial_credit(table, of="right", found="entities")
    assert_rows(shaped.values[:, 0], [[0.2], [1], [0.1], [0]])
    wanted = [[-0.273315], [1.475899], [-0.491966], [-0.710618]]
    assert_rows(group_normalize(shaped, eps=1e-6).values[:, 0], wanted)
    nobody = reward_table({"right": [0, 0], "entities": [0, 0]}, weights={"entities": 0.0})
    assert partial_credit(nobody, of="right", found="entities").values.tolist() == [[[0]], [[0]]]
