"""Tags that pieces read are set by a piece of the run, which is checked before anything is loaded."""

from __future__ import annotations

import pytest

from mmrl.build import check
from mmrl.config.binding import Pieces
from mmrl.config.loading import merge, read
from mmrl.config.ranges import TagName, marks
from mmrl.config.registry import find, pieces
from mmrl.config.schema import Config, ConfigError, as_piece, parse
from mmrl.config.tags import tags_read
from mmrl.core.rng import Stream
from tests.support.configs import CONFIGS
from tests.support.playing import Telephone
from tests.support.rules import piece_name, rule

PLAY = {"name": "play", "game": "tests.support.playing:Telephone"}
STAGED = {"name": "play", "game": "tests.config.test_tags:Staged"}
SPY = {"name": "play", "game": "vision.spy"}


class Staged(Telephone):
    """A game whose turns have a tag of their own."""

    sets_tags = frozenset({"role", "stage"})

    def tags(self, state, player):
        return {"role": player, "stage": "first"}


def run(advantage, after=(), **changes):
    """Make the ready run with tools one of another chain, with further engines."""
    raw = merge(read(CONFIGS / "train" / "tools.yaml"), {"advantage": list(advantage), **changes})
    engine = [*raw["rollout"]["engine"], *after]
    return parse(merge(raw, {"rollout": {"engine": engine}}), Config)


def per_role(*chain):
    return {"name": "per_episode", "by": ["role"], "advantage": list(chain)}


@pytest.mark.parametrize(
    ("chain", "tag", "engines"),
    [
        ({"name": "group_center", "by": ["group", "role"]}, "role", [PLAY]),
        ("role_baseline", "role", [PLAY]),
        ({"name": "role_baseline", "role": "stage"}, "stage", [STAGED]),
        ({"name": "for_turns", "where": {"stage": "clue"}, "advantage": ["group_center"]}, "stage", [SPY]),
        ({"name": "alternate", "of": "short_answer"}, "stage", [STAGED]),
        (per_role("group_center"), "role", [PLAY]),
        ({"name": "per_episode", "advantage": [{"name": "group_center", "by": ["role"]}]}, "role", [PLAY]),
    ],
)
def test_a_chain_reads_tags_that_an_engine_sets(chain, tag, engines):
    wanted = rf"advantage\[1\]: '\w+' reads the tag '{tag}' of outcomes, which no engine.*; they set .*finish"
    with pytest.raises(ConfigError, match=wanted):
        check(run(["total", chain]))
    check(run(["total", chain], engines))


def test_the_words_say_how_to_declare_a_tag():
    with pytest.raises(ConfigError, match=r"sets_tags = frozenset\(\{'stage'\}\)"):
        check(run(["total", {"name": "alternate", "of": "short_answer"}]))
    check(run(["total", {"name": "action_credit", "of": "short_answer"}]))  # tools set `action`
    with pytest.raises(ConfigError, match="reads the tag 'part'"):
        check(run(["total", {"name": "group_center", "by": ["part"]}]))


def test_keys_of_every_table_are_no_tags():
    check(run(["total", {"name": "group_center", "by": ["group", "place", "on_policy", "turn_number"]}]))


def test_a_tag_of_a_sampler_is_known():
    chain = ["total", {"name": "group_center", "by": ["group", "wording"]}]
    with pytest.raises(ConfigError, match="'wording'"):
        check(run(chain))
    check(run(chain, sampler=["uniform", {"name": "with_wordings", "column": "paraphrases"}]))


def test_rewards_and_metrics_are_asked_about_tags_that_are_set():
    reward = [{"name": "exact_match", "at": "role=speaker", "label": "short_answer"}]
    with pytest.raises(ConfigError, match=r"rewards\[0\]: 'exact_match' reads the tag 'role'"):
        check(run(["total"], rewards=reward))
    check(run(["total"], [PLAY], rewards=reward))
    metric = [{"name": "turns", "where": {"role": "speaker"}}]
    with pytest.raises(ConfigError, match=r"metrics\[0\]: 'turns' reads the tag 'role'"):
        check(run(["total"], metrics=metric))
    check(run(["total"], [PLAY], metrics=metric))


def test_tags_of_derived_classes_are_those_of_their_base():
    assert find("engine", "vision.with_environments").sets_tags >= {"turn", "state"}
    assert find("game", "tests.support.playing:Telephone").sets_tags == {"role"}


@rule(pieces("advantage"), piece_name)
def test_every_option_of_keys_is_marked(entry):
    """Options that are called as keys usually are say so, so that a new piece is checked as well."""
    for name in {"by", "same", "where", "role", "tag", "state", "action"} & entry.options.keys():
        if not marks(entry.hints[name], TagName):
            yield f"annotate `{name}` with Tag, Tags or TagWords of mmrl.config.ranges"


def test_tags_of_pieces_inside_pieces_are_read_too():
    inner = {"name": "for_some", "where": {"stage": "clue"}, "advantage": ["hae"]}
    bound = Pieces(Stream()).make("advantage", as_piece({"name": "per_episode", "advantage": [inner]}, "x"))
    assert set(tags_read(bound)) == {"stage", "part"}
