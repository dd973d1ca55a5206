"""Environments in TRL's form: state of a rollout, calls in order, seeds, faults, rewards, images."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
from dataclasses import replace

import numpy
import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call
from mmrl.data.dataset_io import write_rows
from mmrl.training.score import score
from mmrl.vision.datasets.conversations import conversations
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_environments import WithEnvironments
from mmrl.vision.environments.grid_world import GridWorld
from mmrl.vision.tools.replies import ToolFault
from tests.vision import tiny
from tests.vision.playing import Broken, Echo, Ladder, SlowLadder, rungs_left

CLIMB, LOOK = Call("climb", {"rungs": 1}), Call("look", {})
WEAR = (CLIMB, Call("climb", {"rungs": 2}), LOOK)


@pytest.fixture
def engine(exact):
    """Make an engine whose policy makes the same calls in every turn."""

    def make(environment=Ladder, calls=WEAR, *, seed=0, **options):
        class Scripted(WithEnvironments):
            parse = staticmethod(lambda text: list(calls))

        inner = Generate(exact("qwen2_5_vl"), stream=Stream(seed), max_completion_length=3)
        made = Scripted(inner, stream=Stream(seed), environment=environment, max_turns=3, **options)
        choose = made._choose

        def stopping(talks, *rest):  # what the tiny model writes has no end
            choose(talks, *rest)
            for talk in talks:
                talk.finish = ""

        made._choose = stopping
        return made

    return make


def asked(num=2, each=2, **columns):
    prompts = [tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(num)]
    return [replace(prompt, columns=columns) for prompt in prompts for _ in range(each)]


def bound(target, **options):
    return Pieces(Stream(0)).make("environment", Piece(f"tests.vision.playing:{target.__name__}", options))


def test_a_rollout_has_an_environment_whose_state_lasts_over_its_turns(engine):
    rows = engine().rollout(asked(top=6))
    made = [row.outcomes[-1].environment for row in rows]
    assert len({id(environment) for environment in made}) == 4
    assert all(environment.log == [1, 2, 1, 2] for environment in made)  # two turns of replies, in order
    assert [row.outcomes[-1].recorded for row in rows] == [{"Ladder": 1.0}] * 4
    for row in rows:
        assert row.outcomes[-1].tags["finish"] == "turns"
        assert row.prompt.text == "what\n Climb to rung 6."
        shown = row.logged["conversation"]
        assert "\n1\n" in shown and "\n3\n" in shown and "\n6\n" in shown and "You are on rung 6." in shown
        assert row.steps.suffix.media["image_grid_thw"].shape == (2, 3)
    # Rows of a prompt that begin alike share it, in rollouts and in learning.
    assert rows[0].steps.prompt is rows[1].steps.prompt is not rows[2].steps.prompt


def tops(rows):
    return [row.outcomes[-1].environment.top for row in rows]


def test_a_group_begins_alike_and_the_same_on_every_try(engine):
    state, arrays = random.getstate(), numpy.random.get_state()[1].copy()
    first = tops(engine(calls=()).rollout(asked(8)))
    assert first[::2] == first[1::2] and len(set(first)) > 2
    assert tops(engine(calls=()).rollout(asked(8))) == first
    assert tops(engine(calls=()).rollout(asked(8)[::-1])) == first[::-1]  # whatever came before
    assert tops(engine(calls=(), seed=1).rollout(asked(8))) != first
    assert random.getstate() == state and (numpy.random.get_state()[1] == arrays).all()
    own = tops(engine(calls=(), seed_rollouts=True).rollout(asked(8)))
    assert own[::2] != own[1::2]


def test_reset_gets_columns_images_and_a_seed_where_it_takes_them(engine):
    class Looks:
        def reset(self, image, seed, word, images=(), other="kept"):
            self.image, self.seed, self.word, self.images, self.other = image, seed, word, images, other
            word.append(1)

    prompts = asked(1, word=[], unused=1)
    rows = engine(Looks, calls=()).rollout(prompts)
    one, two = (row.outcomes[-1].environment for row in rows)
    assert one.seed == two.seed and one.other == "kept" and one.word == [1]
    pixels = prompts[0].media[0].load().pixels[0].permute(1, 2, 0)
    assert numpy.array_equal(numpy.asarray(one.image), pixels) and len(one.images) == 1
    assert one.image is not two.image
    assert rows[0].outcomes[-1].recorded == {} and rows[0].prompt.text == "what"


class Drawn:
    """Draws where it begins while it awaits something."""

    async def reset(self):
        await asyncio.sleep(0)
        self.top = random.randint(0, 10**9), numpy.random.randint(10**9)


def test_a_coroutine_that_begins_an_environment_draws_the_same_on_every_try(engine):
    state = random.getstate()
    first = tops(engine(Drawn, calls=()).rollout(asked()))
    assert first[0] == first[1] != first[2] == first[3]
    random.seed(3)
    assert tops(engine(Drawn, calls=()).rollout(asked())) == first
    random.setstate(state)

    late = Pieces(Stream(0)).make("environment", Piece(f"{__name__}:Late", {"timeout": 0.2}))
    with pytest.raises(ToolFault, match="`reset` of the environment 'Late' failed"):
        engine(late).rollout(asked(1, 1))


class Late:
    async def reset(self):
        await asyncio.sleep(30)


def test_rewards_in_trls_form_read_the_environments(engine):
    rows = engine().rollout(asked(top=8))
    rewards = [
        Pieces(Stream(0)).make("reward", Piece("tests.vision.playing:rungs_left")),
        Pieces(Stream(0)).make("reward", Piece("precomputed", {"key": "Ladder", "label": "Ladder"})),
    ]
    table = score(rewards, rows)
    assert table.at_end("rungs_left").tolist() == [-2.0] * 4
    assert table.at_end("Ladder").tolist() == [0.0] * 4
    assert rungs_left([rows[0].outcomes[-1].environment]) == [-2.0]


def test_the_order_in_which_environments_answer_changes_nothing(engine):
    fast, slow = (engine(kind).rollout(asked(3)) for kind in (Ladder, SlowLadder))
    for row, other in zip(fast, slow, strict=True):
        assert torch.equal(row.steps.ids, other.steps.ids)
        assert row.logged["conversation"].replace("Climb some rungs.", "") != ""
        assert row.outcomes[-1].environment.log == other.outcomes[-1].environment.log


def test_a_row_names_its_environment_and_sees_only_its_tools(engine):
    kinds = (bound(Ladder), bound(Echo, label="parrot"))
    prompts = asked(2, 1, environment="parrot") + [
        replace(asked(1)[0], uid="l", columns={"environment": "Ladder"})
    ]
    say = Call("say", {"words": "ab", "loud": True})
    rows = engine(kinds, calls=(CLIMB, say)).rollout(prompts)
    parrot, ladder = rows[0].outcomes[-1].environment, rows[2].outcomes[-1].environment
    assert parrot.said == [("ab", 1, True)] * 2 and ladder.log == [1, 1]
    assert parrot.kind == ""  # the column chooses, and is not passed on
    told = rows[0].logged["conversation"], rows[2].logged["conversation"]
    assert "there is no tool 'climb'; there are say" in told[0] and "there are climb, look" in told[1]
    assert len(rows[0].prompt.media) == 2 and len(rows[2].prompt.media) == 1
    assert rows[0].outcomes[-1].recorded == {}
    with pytest.raises(ValueError, match="name one of the environments Ladder, parrot in its column"):
        engine(kinds).rollout(asked(1, environment="chess"))


def test_rows_that_name_an_environment_alone_are_played(engine, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"environment": "Ladder", "top": 3}, {"environment": "Echo"}])
    rows = engine((bound(Ladder), bound(Echo)), calls=(CLIMB,)).rollout(
        conversations(path=str(tmp_path / "rows.jsonl"))
    )
    ladder, echo = (row.outcomes[-1].environment for row in rows)
    assert (ladder.top, ladder.log, echo.said) == (3, [1, 1], [])
    asked, shown = (row.prompt.columns["prompt"] for row in rows)
    assert asked == [{"role": "user", "content": " Climb to rung 3."}]
    assert rows[0].prompt.text == " Climb to rung 3." and len(rows[1].prompt.media) == 1
    assert shown[0]["content"].startswith("Begin with ")


def test_other_tools_stand_beside_an_environment(engine):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    (row, _) = engine(calls=(Call("add", {"a": 20, "b": 22}), CLIMB), tool=(add,)).rollout(asked(1))
    assert "\n42\n" in row.logged["conversation"] and row.outcomes[-1].environment.rung == 2

    def climb() -> str:
        """Climb."""
        return ""

    with pytest.raises(ConfigError, match="the environment 'Ladder' both have 'climb'"):
        engine(tool=(climb,))


def test_an_exception_of_a_tool_is_read_by_the_model(engine):
    (row, _) = engine(calls=(Call("climb", {"rungs": 9}), CLIMB)).rollout(asked(1))
    assert "Error: ValueError: You fell." in row.logged["conversation"]
    assert row.outcomes[-1].environment.log == [1, 1]


def test_a_beginning_that_fails_stops_the_run(engine):
    with pytest.raises(ToolFault, match="`reset` of the environment 'Broken' failed for prompt 'p0'"):
        engine(bound(Broken)).rollout(asked())
    with pytest.raises(ToolFault, match=r"no answer within 0\.2 s"):
        engine(bound(Broken, seconds=9.0, timeout=0.2)).rollout(asked())


def test_a_reward_that_fails_stops_the_run_or_is_no_number(engine):
    with pytest.raises(ToolFault, match="`get_reward` of the environment 'Broken' failed for prompt 'p0'"):
        engine(bound(Broken, at="get_reward")).rollout(asked())
    rows = engine(bound(Broken, at="get_reward", on_error="skip")).rollout(asked(1))
    assert math.isnan(rows[0].outcomes[-1].recorded["Broken"])  # never a silent 0


@pytest.mark.parametrize("on_error", ["tell", "skip", "raise"])
def test_an_environment_that_hangs_is_asked_nothing_more(engine, on_error):
    hangs = bound(Broken, at="climb", seconds=60.0, timeout=3.0, on_error=on_error)
    made = engine(hangs, calls=(LOOK, CLIMB, LOOK))
    if on_error == "raise":
        with pytest.raises(ToolFault, match="the tool 'climb' failed for prompt 'p0': no answer within"):
            made.rollout(asked(1))
        return
    rows = made.rollout(asked(1))
    for row in rows:
        assert row.outcomes[-1].tags["finish"] == "tool_error" and row.steps.suffix is None
        assert math.isnan(row.outcomes[-1].recorded["Broken"])
        lost = row.outcomes[-1].environment
        assert not lost and pickle.loads(pickle.dumps(lost)) == lost
        with pytest.raises(ToolFault, match="the environment 'Broken' of prompt 'p0' did not come back"):
            print(lost.rung)
    counted = Pieces(Stream(0)).make("reward", Piece("tests.vision.playing:played", {}), place="x")
    assert score([counted], rows).at_end("played").tolist() == [0.0, 0.0]


def test_the_grid_world_is_seen_and_moved_on(engine):
    up, nowhere = Call("move", {"direction": "up", "cells": 9}), Call("move", {"direction": "x"})
    for row in engine(GridWorld, calls=(up, nowhere)).rollout(asked(2)):
        grid = row.outcomes[-1].environment
        assert grid.agent[1] == 0 and "there is no direction 'x'" in row.logged["conversation"]
        assert row.outcomes[-1].recorded == {"GridWorld": float(grid.agent == grid.goal)}
        assert len(row.prompt.media) == 2  # that of the row, and the grid


def test_the_grid_world_pays_on_the_goal():
    world = GridWorld(size=3)
    (_, shown) = world.reset(seed=0)
    assert shown["image"].size == (84, 84) and world.get_reward() == 0.0
    across, down = (b - a for a, b in zip(world.agent, world.goal, strict=True))
    world.move("left" if across < 0 else "right", abs(across))
    assert world.move("up" if down < 0 else "down", abs(down))[1]["text"] == "arrived"
    assert world.get_reward() == 1.0


class Timid:
    pass


class Needy:
    def __init__(self, url):
        self.url = url

    def reset(self):
        pass


class Mute:
    def reset(self):
        pass

    def act(self, where):
        """Act."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Timid", "has no method `reset"),
        ("Needy", "cannot be made without `url`"),
        ("Mute", r"the argument 'where' of the tool '.*Mute\.act' has no type"),
    ],
)
def test_a_class_that_is_no_environment_is_an_error_of_the_configuration(name, message):
    piece = Piece("vision.with_environments", {"environment": f"{__name__}:{name}"})
    with pytest.raises(ConfigError, match=message):
        Pieces(Stream(0)).check("engine", piece)


def test_two_environments_of_one_name_are_refused(engine):
    with pytest.raises(ConfigError, match="give each a `label`"):
        engine((Ladder, Ladder))


class Rated(Ladder):
    """A ladder whose turns earn the rung."""

    def get_turn_reward(self):
        return self.rung


def test_a_turn_has_its_reward_its_action_and_how_likely_the_right_answer_was_before_it(engine):
    made, ended = engine(Rated, (CLIMB, LOOK), turn_outcomes=True, score_target=True, opener="so"), []
    end = made.end
    made.end = lambda talks: ended.extend(talks) or end(talks)
    prompts = [replace(prompt, target="fox") for prompt in asked(1, top=6)]
    rows = made.rollout(prompts)
    for row, talk in zip(rows, ended, strict=True):
        # Each of the two turns that go on climbs a rung; the calls of the last one are not made.
        assert [outcome.recorded.get("turn_reward") for outcome in row.outcomes] == [1, 2, None]
        action = '[["climb", {"rungs": 1}], ["look", {}]]'
        assert {(o.tags["action"], o.tags["tool"]) for o in row.outcomes} == {(action, "climb look")}
        encoder, policy = made.policy.prompt_encoder, made.policy
        forced = encoder.answer("so")[:-1], encoder.answer("fox")[:-1]
        for place, outcome in enumerate(row.outcomes):
            turns = [*talk.turns[:place], (talk.turns[place][0], torch.cat(forced))]
            steps = TokenRow.of_turns(turns)
            batch = policy.collate((replace(row, steps=steps, length=len(steps.ids)),))
            logp = policy(batch).logp.detach()[0, len(steps.ids) - len(forced[1]) : len(steps.ids)]
            assert outcome.recorded["answer_likelihood"] == pytest.approx(float(logp.mean().exp()), rel=1e-5)
            assert outcome.recorded["answer_probability"] == pytest.approx(float(logp.exp().mean()), rel=1e-5)
    with pytest.raises(ConfigError, match="set `turn_outcomes: true`, with"):
        engine(Rated, score_target=True)


def test_a_turn_on_the_grid_earns_by_coming_nearer():
    world = GridWorld(size=4)
    world.reset(seed=0)
    world.agent, world.goal, world.before = (0, 0), (2, 0), 2
    found = []
    for way in ("right", "down", "right", "up", "left"):
        world.move(way)
        found.append(world.get_turn_reward())
    assert found == [1, 0, 1, 1, 0]  # distances 1, 2, 1, 0, 1
