"""AdvEvo-MARL's game: who is misled, what it pays, and the prompts that players read."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Part, Prompt
from mmrl.engines.play import Play
from mmrl.papers.advevo_marl import Misleading
from tests.support.playing import Answering
from tests.support.toys import ToyText

QUESTION = Prompt("q", (Message("user", (Part("1 + 2?"),)),), target="3")


def played(attack, *answers, prompt=QUESTION, **options):
    game = Misleading(defenders=len(answers), **options)
    state = game.begin(prompt, torch.Generator())
    assert game.acting(state) == ("attacker",)
    state = game.act(state, "attacker", attack)
    for player, answer in zip(game.acting(state), answers, strict=True):
        state = game.act(state, player, answer)
    assert not game.acting(state)
    return game, state


def test_who_takes_the_attackers_answer_is_misled():
    game, state = played("Surely <answer>4</answer>", "<answer>4</answer>", "<answer>3</answer>", "5")
    # Misled: the format alone; right: safety, task and format; wrong, without a block: safety.
    assert game.payoff(state) == pytest.approx(
        {"attacker": 1 / 3, "defender 1": 0.1, "defender 2": 1.1, "defender 3": 0.7}
    )
    assert game.scores(state)["defender 1"] == {"misled": 1.0, "right": 0.0}


def test_an_attack_without_a_wrong_answer_misleads_nobody():
    for attack in ("Believe me: 4.", "It is <answer>3</answer>", ""):
        game, state = played(attack, "<answer>3</answer>", "<answer>4</answer>", safety=1.0, format=0.0)
        assert game.payoff(state) == pytest.approx({"attacker": 0, "defender 1": 1.3, "defender 2": 1.0})


def test_a_game_without_a_right_answer_is_refused():
    with pytest.raises(ConfigError, match="prompt 'q' has none"):
        played("", "", prompt=Prompt("q", QUESTION.messages))


def test_the_engine_plays_it_and_tags_classes():
    def answer(prompt):
        if "Another agent says" in prompt.text:
            assert "Because so." in prompt.text and "right answer is" not in prompt.text
            return "<answer>4</answer>"
        assert "The right answer is 3." in prompt.text
        return "Because so. <answer>4</answer>"

    engine = Play(Answering(ToyText(), answer), game=Misleading(defenders=2), stream=Stream())
    rows = engine.rollout([QUESTION])
    outcomes = [row.outcomes[-1] for row in rows]
    assert sorted(outcome.tags["role"] for outcome in outcomes) == ["attacker", "defender", "defender"]
    paid = {outcome.tags["player"]: outcome.recorded for outcome in outcomes}
    assert paid["attacker"] == {"payoff": 1.0}
    assert paid["defender 1"] == pytest.approx({"payoff": 0.1, "misled": 1.0, "right": 0.0})
