"""The negotiation over images: payoffs by worked numbers, and what players read."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.games import Turn
from mmrl.core.types import Message, Part, Prompt
from mmrl.vision.games.negotiation import Deal, Negotiation
from tests.vision.test_spy import image, pair

IMAGES = tuple(image(name, 10) for name in "abc")
# The second player sees the images in the opposite order.
DEAL = Deal(IMAGES, ((0, 1, 2), (2, 1, 0)), ((1, 2, 3), (4, 1, 1)))


def played(game, *answers):
    state = DEAL
    for number, answer in enumerate(answers):
        state = game.act(state, game.roles[number % 2], answer)
    return state


def paid(game, state):
    turns = [Turn("", number, "", {}) for number in range(len(state.moves))]
    return [recorded["payoff"] for recorded in game.record(state, turns)]


ANSWERS = ("I like c. \\boxed{1, 3}", "\\boxed{1}", "\\boxed{3, 3, 9, 1.5}", "Take c! <image> \\boxed{3}")


def test_players_earn_what_they_alone_claim():
    game = Negotiation(rounds=2)
    state = played(game, *ANSWERS)
    # First a and c against c, then c against a; values are 1, 2, 3 and 4, 1, 1.
    assert paid(game, state) == pytest.approx([1 / 6, 0, 3 / 6, 4 / 6])
    assert game.payoff(state) == pytest.approx({"first": 4 / 6, "second": 4 / 6})
    assert not game.acting(state)
    against = Negotiation(rounds=2, zero_sum=True)
    assert paid(against, state) == pytest.approx([1 / 6, -1 / 6, -1 / 6, 1 / 6])


def test_players_read_their_order_their_values_and_the_words_of_the_other():
    game = Negotiation(rounds=3)
    (message,) = game.observe(played(game, *ANSWERS), "second")
    assert [part.media.name for part in message.parts[:-1]] == ["c", "b", "a"]
    text = message.parts[-1].text
    assert "Image 1: 1\nImage 2: 1\nImage 3: 4\n" in text
    assert "The other player said: I like c." in text and "You earned 0.67 of 1." in text
    assert "Take c! < image>" in text and "boxed{1, 3}" not in text and "1 rounds are left" in text


def test_games_of_a_prompt_are_drawn_and_need_two_images():
    game, draw = Negotiation(), torch.Generator().manual_seed(0)
    states = [game.begin(pair(), draw) for _ in range(8)]
    assert len({(state.orders, state.values) for state in states}) > 1
    assert all(1 <= value <= 9 for state in states for values in state.values for value in values)
    with pytest.raises(ValueError, match="has 1"):
        game.begin(Prompt("p", (Message("user", (Part(media=image("a", 1)),)),)), draw)
