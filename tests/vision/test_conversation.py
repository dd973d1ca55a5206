"""Conversations whose older images leave the prompt: rows of one episode, learned as they were sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece, as_piece
from mmrl.core.chat import turns_of_outcomes
from mmrl.core.episodes import join_episodes
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call
from mmrl.core.types import Frames, Media, Message, Part
from mmrl.filters import varied
from mmrl.reporting.metrics import describe_lengths
from mmrl.training.method import through_chain
from mmrl.training.score import score
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_environments import WithEnvironments
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.tools.conversation import recent_media
from mmrl.vision.tools.images import crop
from tests.vision import tiny
from tests.vision.playing import Ladder
from tests.vision.talking import Talkative, ruled

FAMILY = "qwen2_5_vl"


class Looking(Talkative):
    """Most answers cut something out of the image, some ask for a text, and few ask for nothing."""

    @staticmethod
    def parse(text: str) -> list[Call]:
        total = sum(map(ord, text))
        if total % 7 == 0:
            return []
        if total % 5 == 0:
            return [Call("ruled", {"number": total % 7})]
        return [Call("crop", {"image": 0, "box": [0, 0, 0.5 + total % 5 / 10, 1]})]


class APartEachTurn(Looking):
    """The same conversations, with a row for every turn, although nothing leaves the prompt."""

    def end(self, talks):
        for talk in talks:
            talk.begins = list(range(len(talk.turns)))
        return super().end(talks)


@pytest.fixture
def converse(checkpoint, monkeypatch):
    """Hold conversations about two images, four about each."""
    policies = {}

    def start(kind=Looking, family=FAMILY, **options):
        if family not in policies:
            policies[family] = Tokens(model=str(checkpoint(family)), dtype="float32")
        policy = policies[family]
        monkeypatch.setattr(policy.prompt_encoder, "end", policy.prompt_encoder.end)  # `Talkative` adds to it
        inner = Generate(policy, stream=Stream(1), max_completion_length=6)
        engine = kind(inner, stream=Stream(1), tool=(crop, ruled), max_turns=5, **options)
        asked = [tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(2) for _ in range(4)]
        return policy, engine.rollout(asked)

    return start


def episodes(rows):
    """List the rows of every conversation of more than one row, in order of turns."""
    found = {}
    for row in rows:
        if name := row.outcomes[-1].tags.get("episode"):
            found.setdefault(name, []).append(row)
    return {name: sorted(made, key=turn_of) for name, made in found.items()}


def turn_of(row):
    return int(row.outcomes[-1].tags["turn"])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_rows_after_older_images_left_are_learned_as_they_were_sampled(converse, family):
    policy, rows = converse(family=family, only_n_most_recent_images=1)
    found = episodes(rows)
    assert found and any(len(made) > 2 for made in found.values())
    for made in found.values():
        for row in made[1:]:  # its prompt shows the image of the question, and the last one of a tool
            read = policy.prompt_encoder.transcript(row.steps.prompt.ids)
            assert read.count("<image: ") == 2 and "[image omitted]" in read
    batch = policy.collate(rows)
    with torch.no_grad():
        logp = policy(batch).logp
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside], logp[inside].float(), rtol=0, atol=3e-5)


def test_no_token_is_learned_twice_and_rows_say_where_they_belong(converse):
    policy, rows = converse(only_n_most_recent_images=1, turn_outcomes=True)
    assert [row.prompt.uid for row in rows[:8]] == ["p0"] * 4 + ["p1"] * 4, "answers come first"
    for name, made in episodes(rows).items():
        assert name == f"{made[0].group}/0/{name[-1]}" and made[-1] in rows[:8]
        turns = [outcome.tags["turn"] for row in made for outcome in row.outcomes]
        assert turns == list(map(str, range(len(turns)))), "every turn is an outcome of one row"
        assert all(row.length == row.outcomes[-1].end == len(row.steps.ids) for row in made)
        assert [row.outcomes[-1].tags["finish"] for row in made[:-1]] == ["call"] * (len(made) - 1)
        assert made[-1].outcomes[-1].tags["finish"] != "call"
        for row in made:
            # Rewards read the conversation up to the turn, with all images that tools showed.
            *_, told = turns_of_outcomes(row)
            texts = [message.text for message in told if message.role == "assistant"]
            assert len(texts) == int(row.outcomes[-1].tags["turn"]) + 1
            assert texts[-len(row.outcomes) :] == [outcome.text for outcome in row.outcomes]
            # Pages show what was read: an image stands for every mark.
            assert row.logged["conversation"].count("<image: ") == len(row.shown) <= 1


def scored(rows):
    made = [
        Pieces(Stream()).make("reward", Piece(f"{__name__}:{name}", options), place="x")
        for name, options in (("letters", {"at": "every"}), ("ending", {}))
    ]
    return score(made, rows, notes=frozenset({"entropy"}))


def letters(completions, **columns):
    """Measure a turn."""
    return [sum(map(ord, text)) % 11 / 10 for text in completions]


def ending(completions, **columns):
    """Measure the answer."""
    return [float(len(text) % 3) for text in completions]


def by_turn(rows, table):
    """Map the conversation and the place of a step to its advantage."""
    found, before = {}, {}
    number = {row.outcomes[-1].tags.get("episode"): i for i, row in enumerate(rows[:8])}
    for i in sorted(range(len(rows)), key=lambda i: turn_of(rows[i])):
        name = i if i < 8 else number[rows[i].outcomes[-1].tags["episode"]]
        begin = 0
        for place, end in enumerate(table.ends[i].tolist()):
            for _ in range(begin, end):
                step = before[name] = before.get(name, -1) + 1
                found[name, step] = float(table.values[i, 0, place])
            begin = max(begin, end)
    return found


CHAINS = [
    ["total", "group_normalize"],
    ["total", "gigpo"],
    ["total", {"name": "returns", "gamma": 0.9}, "group_center"],
    ["total", {"name": "per_episode", "advantage": ["group_normalize"]}, "episode_mean"],
]


@pytest.mark.parametrize("every", [True, False])
def test_one_row_and_rows_of_turns_give_the_same_advantages(converse, every):
    _, whole = converse(turn_outcomes=every)
    _, parts = converse(APartEachTurn, turn_outcomes=every)
    assert len(parts) > 2 * len(whole) == 16 and not episodes(whole)
    one, many = scored(whole), scored(parts)
    if every:
        joined = join_episodes(many)
        for name in ("valid", "ends", "length", "learn"):
            assert torch.equal(getattr(joined, name), getattr(one, name)), name
        assert torch.equal(joined.values[joined.valid], one.values[one.valid])
        for name in ("state", "finish", "turn", "group"):
            assert torch.equal(joined.ids[name], one.ids[name]), name
    assert describe_lengths(one) == describe_lengths(many)
    assert torch.equal(varied(one), varied(many)[: len(whole)])
    assert torch.equal(one.at_end("ending"), many.at_end("ending")[: len(whole)])
    for chain in CHAINS if every else CHAINS[:1]:
        bound = [Pieces(Stream()).make("advantage", as_piece(piece, "")) for piece in chain]
        only = [replace_rewards(table, every) for table in (one, many)]
        credit = [through_chain(bound, table, 0) for table in only]
        found = [by_turn(rows, table) for rows, table in zip((whole, parts), credit, strict=True)]
        assert len(set(found[0].values())) > 1
        assert found[0].keys() == found[1].keys()
        for key, value in found[0].items():
            assert found[1][key] == pytest.approx(value, abs=1e-9), (chain, key)


def replace_rewards(table, every):
    """Leave rewards of turns out where turns are no outcomes: rows differ in how many have some."""
    if every:
        return table
    place = table.names.index("letters")
    values = table.values.clone()
    values[:, place] = 0
    return table.replace(values=values)


def test_an_environment_is_scored_once_and_its_first_image_stays(checkpoint, monkeypatch):
    class Playing(WithEnvironments):
        parse = staticmethod(lambda text: [Call("climb", {"rungs": 1}), Call("look", {})])

    policy = Tokens(model=str(checkpoint(FAMILY)), dtype="float32")
    monkeypatch.setattr(policy.prompt_encoder, "end", list(range(3, 300)))
    inner = Generate(policy, stream=Stream(0), max_completion_length=3)
    engine = Playing(inner, stream=Stream(0), environment=Ladder, max_turns=4, only_n_most_recent_images=1)
    asked = [replace(tiny.ask("p0", tiny.picture(seed=0), "what"), columns={"top": 3}) for _ in range(2)]
    rows = engine.rollout(asked)
    assert len(rows) == 2 * 3  # of four turns, the third and the fourth follow an image that left
    for made in episodes(rows).values():
        assert [row.outcomes[-1].recorded for row in made] == [{}, {}, {"Ladder": 1.0}]
        assert len({id(row.outcomes[-1].environment) for row in made}) == 1
        assert [row.steps.prompt.media["image_grid_thw"].shape[0] for row in made] == [1, 2, 2]


def test_more_images_than_there_may_be_are_an_error_of_the_configuration():
    with pytest.raises(ConfigError, match="'x.only_n_most_recent_images' must be at most 'max_images', 0"):
        options = {"tool": ["vision.crop"], "max_images": 0, "only_n_most_recent_images": 1}
        Pieces(Stream(0)).check("engine", Piece("vision.with_tools", options), place="x")


def test_a_text_stands_for_older_media():
    def shown(kind):
        return Part(media=Media(kind, kind, lambda: Frames(torch.zeros(1, 3, 2, 2), torch.zeros(1))))

    old = [Message("tool", (Part("a"), shown("video"), shown("image")))]
    new = [Message("tool", (shown("image"),)), Message("tool", (Part("b"),))]
    for most in (0, 3, 4):
        assert recent_media([old, new], most) == [old, new]
    first = [Message("tool", (Part("a"), Part("[video omitted]"), old[0].parts[2]))]
    assert recent_media([old, new], 2) == [first, new]
    both = [Message("tool", (Part("a"), Part("[video omitted]"), Part("[image omitted]")))]
    assert recent_media([old, new], 1) == [both, new]
