"""The engine `play`: rounds of all games together, rows per turn, payoffs, limits and frozen opponents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.episodes import join_episodes
from mmrl.core.games import Game
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Part, Prompt
from mmrl.engines.play import Play
from mmrl.training.score import score
from tests.support.playing import Answering, Telephone
from tests.support.toys import ToyText

PROMPTS = [Prompt(uid, (Message("user", (Part(f"{uid}?"),)),)) for uid in ("a", "b")]


def said(prompt):
    return "xyz" if "heard" not in prompt.text else "x"


def play(answer=said, game=None, prompts=PROMPTS, games=2, **options):
    inner = Answering(ToyText(), answer)
    engine = Play(inner, game=game or Telephone(), stream=Stream(5), **options)
    rows = engine.rollout([prompt for prompt in prompts for _ in range(games)])
    return rows, inner, engine


def of_games(rows):
    found = {}
    for row in rows:
        found.setdefault(row.outcomes[-1].tags["game"], []).append(row)
    return found


def test_all_games_advance_together_and_every_turn_is_a_row():
    rows, inner, engine = play()
    games = of_games(rows)
    assert list(games) == ["a/0/0", "a/0/1", "b/0/0", "b/0/1"]
    assert len({len(turns) for turns in games.values()}) > 1  # some games are longer
    longest = max(map(len, games.values()))
    assert len(inner.rounds) == longest
    assert [len(asked) for asked in inner.rounds] == [
        sum(len(turns) > number for turns in games.values()) for number in range(longest)
    ]
    for name, turns in games.items():
        tags = [row.outcomes[-1].tags for row in turns]
        assert [tag["turn"] for tag in tags] == [str(number) for number in range(len(turns))]
        assert [tag["role"] for tag in tags] == ["speaker", "guesser"] * (len(turns) // 2)
        assert {tag["episode"] for tag in tags} == {name} and {tag["finish"] for tag in tags} == {"stop"}
        assert {row.prompt.uid for row in turns} == {row.group for row in turns} == {name[0]}
        assert turns[1].prompt.text == turns[1].logged["read"] == "heard: xyz"
        # Three letters against one in every round; only the last turn of a role has its payoff.
        ahead = 2.0 * len(turns) / 2
        assert [row.outcomes[-1].recorded for row in turns[-2:]] == [{"payoff": ahead}, {"payoff": -ahead}]
        assert not any(row.outcomes[-1].recorded for row in turns[:-2])
    told = engine.pop_metrics()
    assert told["game/turns"] == len(rows) / 4 and told["game/unfinished"] == 0
    assert told["game/share_of_turns/speaker"] == told["game/share_of_turns/guesser"] == 0.5


def test_every_turn_is_asked_under_a_uid_of_its_own_and_draws_depend_on_nothing_else():
    rows, inner, _ = play()
    asked = [prompt.uid for batch in inner.rounds for prompt in batch]
    assert len(set(asked)) == len(asked) == len(rows)
    alone = [play(prompts=[prompt])[0] for prompt in PROMPTS]
    assert [row.outcomes for row in rows] == [row.outcomes for part in alone for row in part]


def test_a_game_that_is_too_long_ends_as_it_stands():
    rows, _, engine = play(max_turns=2)
    games = of_games(rows)
    assert {len(turns) for turns in games.values()} == {2}
    finish = {name: turns[-1].outcomes[-1].tags["finish"] for name, turns in games.items()}
    assert set(finish.values()) == {"turns", "stop"}  # some games have one round
    assert engine.pop_metrics()["game/unfinished"] == list(finish.values()).count("turns") / 4


def test_turns_of_a_frozen_policy_are_heard_but_are_no_rows():
    loaded = ToyText()
    rows, inner, engine = play(frozen=("guesser",), policy=lambda: loaded)
    assert {row.outcomes[-1].tags["role"] for row in rows} == {"speaker"}
    assert engine.opponent.policy is loaded and not loaded.table.requires_grad
    assert all("heard" in prompt.text for batch in engine.opponent.rounds for prompt in batch)
    assert not any("heard" in prompt.text for batch in inner.rounds for prompt in batch)
    assert {row.outcomes[-1].recorded.get("payoff", 0) > 0 for row in rows} == {True, False}


def test_games_of_two_rounds_of_a_step_are_different_games():
    stream = Stream(5)
    engine = Play(Answering(ToyText(), said), game=Telephone(), stream=stream)
    rows = engine.rollout(PROMPTS[:1])
    stream.round = 1  # the prompt is drawn again, because its group was dropped
    rows += engine.rollout(PROMPTS[:1])
    table = score([], rows)
    assert list(of_games(rows)) == ["a/0/0", "a/1/0"]
    assert len(join_episodes(table)) == 2


@dataclass
class Talking(Answering):
    """An engine that answers after two calls, as `vision.with_tools` does."""

    def rollout(self, prompts):
        texts = ('<tool_call>{"name": "a"}</tool_call>', "xyz")
        call, done = (Message("assistant", (Part(text),)) for text in texts)
        talk = (call, Message("tool", (Part("reply"),))) * 2
        return tuple(
            replace(
                row,
                turns=(*talk, done),
                outcomes=(replace(row.outcomes[0], tags={"finish": "stop", "turn": "2"}),),
            )
            for row in super().rollout(prompts)
        )


@dataclass
class Around:
    """An engine around another, as a dataclass."""

    engine: Any
    notes = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts):
        return self.engine.rollout(prompts)


def test_turns_that_are_conversations_are_scored_whole():
    # Turns of the game have numbers from 0 to 3 and more, those of a conversation from 0 to 2.
    engine = Play(Talking(ToyText(), said), game=Telephone(), stream=Stream(5))
    rows = engine.rollout(PROMPTS)
    assert max(int(row.outcomes[0].tags["turn"]) for row in rows) > 2
    calls = Pieces(Stream()).make("reward", Piece("tool_calls", {"at": "every"}))
    assert score([calls], rows).scored["tool_calls"].flatten().tolist() == [2.0] * len(rows)


def test_a_frozen_policy_plays_through_the_same_wrappers():
    loaded = ToyText()
    inner = Around(Around(Answering(ToyText(), said)))
    engine = Play(inner, game=Telephone(), stream=Stream(5), frozen=("guesser",), policy=lambda: loaded)
    assert engine.opponent.policy is engine.opponent.engine.engine.policy is loaded
    assert inner.policy is inner.engine.engine.policy is not loaded
    assert {row.outcomes[-1].tags["role"] for row in engine.rollout(PROMPTS)} == {"speaker"}


class Wrapped:
    """An engine around another that cannot be copied."""

    def __init__(self, engine):
        self.engine, self.policy = engine, engine.policy


def test_an_engine_that_cannot_be_copied_is_named_before_a_policy_is_loaded():
    def load():
        raise AssertionError("loaded")

    inner = Around(Wrapped(Answering(ToyText(), said)))
    with pytest.raises(ConfigError, match="can be copied for another policy, .* not Wrapped"):
        Play(inner, game=Telephone(), stream=Stream(5), frozen=("guesser",), policy=load)


class Finished(Telephone):
    """Rules that know a payoff at the end alone."""

    def payoff(self, state):
        if self.acting(state):
            raise KeyError("winner")
        return super().payoff(state)


def test_rules_without_a_payoff_for_a_cut_game_stop_the_run_by_its_name():
    cut = r"failed for the game '[ab]/0/[01]' of Finished, which `max_turns` cut after 2 turns: KeyError"
    with pytest.raises(ValueError, match=cut):
        play(game=Finished(), max_turns=2)
    assert play(game=Finished())[0]


class Broken(Telephone):
    def __init__(self, *, how: str):
        self.how = how

    def observe(self, state, player):
        return "text" if self.how == "observe" else super().observe(state, player)

    def record(self, state, turns):
        return (
            [{"payoff": float("nan")} for _ in turns]
            if self.how == "record"
            else super().record(state, turns)
        )


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("observe", TypeError, r"Broken.observe must return messages .* for 'speaker', not 'text'"),
        (
            "record",
            ValueError,
            r"finite rewards .* for the game 'a/0/0' of Broken, of . turns, gave",
        ),
    ],
)
def test_faults_of_rules_name_them(how, kind, message):
    with pytest.raises(kind, match=message):
        play(game=Broken(how=how))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": ("judge",)}, "names some of the roles speaker, guesser of Telephone"),
        ({"frozen": ("speaker", "guesser")}, "so that another learns"),
        ({"frozen": ("speaker",)}, "needs the policy that plays these roles"),
    ],
)
def test_frozen_roles_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        play(**options)


def test_what_a_game_must_have():
    game = Game()
    for call in (game.begin, game.acting, game.observe, game.act, game.payoff):
        with pytest.raises(NotImplementedError):
            call(*[None] * (call.__code__.co_argcount - 1))
