"""Games whose players call tools: turns that are conversations, and a frozen opponent with the same tools."""

from __future__ import annotations

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.chat import turns_of_outcomes
from mmrl.core.rng import Stream
from mmrl.engines.play import Play
from mmrl.training.score import score
from mmrl.vision.engines.generate import Generate
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.tools.images import crop
from tests.support.playing import Telephone
from tests.vision import tiny
from tests.vision.talking import Talkative, ruled
from tests.vision.test_conversation import APartEachTurn


def test_players_call_tools_and_so_does_a_frozen_opponent(checkpoint):
    def load():
        return Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float64")

    stream = Stream(3)
    inner = Generate(load(), stream=stream, max_completion_length=6)
    talking = Talkative(inner, stream=stream, tool=(crop, ruled), max_turns=3, turn_outcomes=True)
    engine = Play(talking, game=Telephone(), stream=stream, frozen=("guesser",), policy=load)
    rows = engine.rollout([tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(4)])
    assert {row.outcomes[-1].tags["role"] for row in rows} == {"speaker"}
    assert any(len(row.turns) > 1 for row in rows), "some players called a tool"
    # The whole conversation is scored, whatever the number of the turn in the game.
    assert all(turns_of_outcomes(row) == [row.turns] for row in rows)
    made = Pieces(Stream()).make("reward", Piece("tool_calls", {"at": "every"}))
    assert score([made], rows).scored["tool_calls"].shape == (len(rows), 1)
    opponent = engine.opponent
    assert isinstance(opponent, Talkative) and opponent.max_turns == 3
    assert opponent.engine.policy is opponent.policy is not talking.policy
    assert opponent.counts["turns"] > 0, "it played"
    assert not any(parameter.requires_grad for parameter in opponent.policy.module.parameters())


def test_a_turn_of_a_game_is_one_row(exact):
    policy, stream = exact("qwen2_5_vl"), Stream(3)
    end = policy.prompt_encoder.end
    inner = Generate(policy, stream=stream, max_completion_length=6)
    talking = APartEachTurn(inner, stream=stream, tool=(crop, ruled), max_turns=3)
    engine = Play(talking, game=Telephone(), stream=stream)
    try:
        with pytest.raises(ConfigError, match=r"APartEachTurn made \d+ rows of 4 turns, but play needs one"):
            engine.rollout([tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(4)])
    finally:
        policy.prompt_encoder.end = end
