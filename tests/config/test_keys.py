"""Descriptions of keys and of options, for every key and every piece there is."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
import yaml

from mmrl.cli.describe import describe_default, describe_option, describe_type, split_docstring, yaml_of
from mmrl.config.binding import Pieces
from mmrl.config.keys import keys_of
from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import HOMES, find, pieces
from mmrl.config.schema import BuildConfig, Config, EvaluateConfig, Kind, Piece, as_piece
from mmrl.core.rng import Stream


@pytest.mark.parametrize("kind", [Config, EvaluateConfig, BuildConfig])
def test_every_key_has_a_comment_and_a_type(kind):
    for key in keys_of(kind):
        assert key.comment, f"{key.place}: the schema has no comment beside it"
        assert describe_type(key.wanted) not in ("", "anything") and describe_default(key.default), key.place


def test_a_key_is_described_with_range_default_and_comment():
    keys = {key.place: key for key in keys_of(Config)}
    key = keys["rollout.num_generations"]
    assert describe_type(key.wanted) == "whole number, at least 1"
    assert (describe_default(key.default), key.comment) == ("8", "rollouts per prompt")
    assert describe_default(keys["policy"].default) == "required"
    assert describe_default(keys["evaluation.metrics"].default) == "[mean]"
    assert keys["report.media_log_steps"].comment.startswith("Number of training steps, evenly spaced")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Annotated[tuple[Piece, ...], Kind("reward")], "list of reward pieces"),
        (Literal["a", "b"], "a or b"),
        (PositiveInt | None, "whole number, at least 1"),
        (tuple[str, ...], "list of text"),
        (dict[str, float], "mapping of number"),
    ],
)
def test_types_are_words(wanted, words):
    assert describe_type(wanted) == words


@pytest.mark.parametrize("kind", sorted(HOMES))
def test_the_yaml_of_every_piece_names_it_with_options_that_it_takes(kind):
    for entry in pieces(kind):
        value = yaml.safe_load(f"{{{yaml_of(entry)}}}")
        while "name" not in value and type(value) is dict:
            (value,) = value.values()
            value = value[0] if type(value) is list else value
            value = value if type(value) is dict else {"name": value}
        piece = as_piece(value, kind)
        assert piece.name == entry.full_name
        if not any(str(option).isupper() for option in piece.options.values()):
            Pieces(Stream()).check(kind, piece)
        for option in entry.options:
            assert describe_option(entry, option)


def test_the_options_of_a_docstring_are_separate():
    options = "Args:\n    a: First,\n        and more.\n    b: Second.\n"
    text = f"Do it.\n\n{options}\nRaises:\n    ValueError: At 0.\n"
    words, meanings = split_docstring(text)
    assert words == "Do it.\n\nRaises:\n    ValueError: At 0."
    assert meanings == {"a": "First, and more.", "b": "Second."}


def test_an_option_that_holds_pieces_says_of_which_kind():
    entry = find("objective", "policy_gradient")
    assert describe_option(entry, "surrogate") == "surrogate piece"
    assert describe_option(entry, "penalty") == "list of penalty pieces"
