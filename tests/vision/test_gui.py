"""Rewards of screen actions: types, places, texts, and how near a click is."""

from __future__ import annotations

import math

import pytest

from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks.boxes import Boxes
from mmrl.vision.rewards.gui import click_inside, click_proximity, click_reward, parse_action

CLICK = '{"action": "click", "value": null, "position": [0.2, 0.3]}'


def of_one(reward, target, text, **options):
    return reward([Prompt("a", (), target)], [Outcome(text=text)], **options)[0]


def act(action):
    return f"<think>\n\n</think><action>{action}</action>"


def click(x, y):
    return act(f"{{'action': 'CLICK', 'value': None, 'position': [{x}, {y}]}}")


def test_a_click_counts_up_to_a_distance_of_0_14():
    assert of_one(click_reward, CLICK, click(0.2, 0.3)) == 2
    assert of_one(click_reward, CLICK, click(0.34, 0.3)) == 2, "0.34 - 0.2 is 0.14, rounded up as a float"
    assert of_one(click_reward, CLICK, click(0.341, 0.3)) == 1
    # The distance is Euclidean: (0.1, 0.1) is sqrt(0.02) = 0.1414 away.
    assert of_one(click_reward, CLICK, click(0.3, 0.4)) == 1
    assert of_one(click_reward, CLICK, click(0.3, 0.4), threshold=0.15) == 2
    assert of_one(click_reward, CLICK, click(0.3, 0.4), of="value") == 0
    assert of_one(click_reward, CLICK, click(0.3, 0.4), of="type") == 1


def test_other_actions_earn_their_type_alone():
    target = "<action>{'action': 'input', 'value': \"it's\", 'position': None}</action>"
    same = act('{"action": "Input", "value": "it\'s", "position": [0.2, 0.3]}')
    assert of_one(click_reward, target, same) == 1
    assert of_one(click_reward, target, same, of="value") == 0
    assert of_one(click_reward, target, click(0.2, 0.3)) == 0
    assert of_one(click_reward, CLICK, same) == 0


def test_a_position_may_be_a_text():
    assert of_one(click_reward, CLICK, act("{'action': 'click', 'position': '[0.2, 0.3]'}")) == 2


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{'action': 'click', 'position': [0.2, 0.3]}",
        "<action></action>",
        act("__import__('os').getcwd()"),
        act("{'action': ('click').lower(), 'position': [0.2, 0.3]}"),
        act("{'action': 3, 'position': [0.2, 0.3]}"),
        act("[" * 3000),
        act("-" * 3000 + "1"),
        act("{'action': 'click', 'position': [" + "9" * 5000 + ", 0]}"),
    ],
)
def test_an_answer_that_cannot_be_read_earns_0_and_nothing_is_evaluated(text):
    assert of_one(click_reward, CLICK, text) == 0


@pytest.mark.parametrize(
    "position", ["null", "[0.2]", "[0.2, NaN]", '["a", "b"]', "[true, false]", "7", '"[["']
)
def test_a_click_without_a_place_earns_its_type(position):
    text = act(f'{{"action": "click", "position": {position}}}')
    assert of_one(click_reward, CLICK, text) == 1


def test_a_row_without_an_action_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="prompt 'a': wanted as its answer an action"):
        of_one(click_reward, "tap it", click(0, 0))


def test_the_last_block_is_parsed():
    assert parse_action(act("{'action': 'back'}") + click(1, 1))["action"] == "CLICK"


# ---- proximity


def test_click_proximity_of_the_worked_distances():
    # A box of half sizes 10 and 5 around (100, 50): clicks at 0, 0.5, 1.2 and 2.5 half widths.
    target = Boxes(((90, 45, 110, 55),), ("",))
    near = [of_one(click_proximity, target, f"<answer>[{x}, 50]</answer>") for x in (100, 105, 112, 125)]
    assert near == pytest.approx([1, 0.882497, 0.486752, 0.043937], abs=1e-6)
    assert of_one(click_proximity, target, "[100, 60]") == pytest.approx(math.exp(-2))
    assert of_one(click_proximity, target, "[100, 60]", sigma=2.0) == pytest.approx(math.exp(-0.5))
    assert of_one(click_proximity, target, "[90, 45, 110, 55]") == 1, "the middle of a box"
    assert of_one(click_proximity, target, "nowhere") == 0
    assert of_one(click_proximity, "a word", "[1, 2]") is None


def test_click_proximity_converts_units_and_takes_the_nearest_target():
    target = Boxes(((0, 0, 2, 2), (90, 45, 110, 55)), ("", ""), (0.2, 0.1))  # thousandths of 200 x 100
    assert of_one(click_proximity, target, "[500, 500]") == of_one(click_inside, target, "[500, 500]") == 1


def test_a_click_inside_of_any_target_box_counts():
    target = Boxes(((0, 0, 2, 2), (90, 45, 110, 55)), ("", ""))
    said = ("[90, 45]", "<answer>[1, 1]</answer>", "[80, 40, 120, 60]", "[89, 45]", "nowhere")
    assert [of_one(click_inside, target, text) for text in said] == [1, 1, 1, 0, 0]
    assert of_one(click_inside, "a word", "[1, 2]") is None
    assert of_one(click_inside, Boxes(()), "[1, 2]") == of_one(click_proximity, Boxes(()), "[1, 2]") == 0
