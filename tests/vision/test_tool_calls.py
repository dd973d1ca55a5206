"""Arguments of calls: types are checked, images are found by their numbers, also where they are optional."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Literal

import pytest
from PIL import Image

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import CallError, parse_calls
from mmrl.vision.environments.grid_world import GridWorld
from mmrl.vision.tools.functions import ShownImage, Tool
from tests.vision import tiny

IMAGES = [tiny.picture(seed=0), tiny.picture(seed=1)]


def left_out(image: ShownImage = 0) -> str:
    """Look.

    Args:
        image: Which.
    """
    return ""


def optional(image: Image.Image | None = None, marked: ShownImage | None = None) -> str:
    """Look.

    Args:
        image: Which.
        marked: Which.
    """
    return ""


def positional(image: Image.Image, way: Literal["up", "down"], /, *, option: int = 0) -> str:
    """Look.

    Args:
        image: Which.
        way: Where.
    """
    return ""


def typed(number: int, boxes: list[list[float]], words: dict[str, Any] | None = None) -> str:
    """Compute.

    Args:
        number: A whole one.
        boxes: Some.
        words: Any.
    """
    return ""


class Way(Enum):
    UP = "up"
    DOWN = "down"


def bare(pair: tuple, listed: list, words: dict, way: Way = Way.UP) -> str:
    """Compute.

    Args:
        pair: Two.
        listed: Some.
        words: Any.
        way: Where.
    """
    return ""


def grouped(number: int, colours: set[str]) -> str:
    """Compute.

    Args:
        number: A whole one.
        colours: Some.
    """
    return ""


def several(images: list[Image.Image]) -> str:
    """Look.

    Args:
        images: Which.
    """
    return ""


def either(image: ShownImage | str) -> str:
    """Look.

    Args:
        image: Which.
    """
    return ""


def test_the_default_of_an_image_is_its_number():
    tool = Tool.of(left_out)
    assert tool.bind({}, IMAGES) == [IMAGES[0]] and tool.bind({"image": 1}, IMAGES) == [IMAGES[1]]
    with pytest.raises(CallError, match="of which there is none, not 0"):
        tool.bind({}, [])


def test_an_optional_image_is_an_image_or_none():
    tool = Tool.of(optional)
    assert tool.images == {"image", "marked"}
    assert tool.bind({"image": 1}, IMAGES) == [IMAGES[1], None]
    assert tool.bind({"image": None, "marked": 0}, IMAGES) == [None, IMAGES[0]]
    assert tool.schema["function"]["parameters"]["properties"]["image"]["type"] == "integer"
    with pytest.raises(CallError, match="not 7"):
        tool.bind({"marked": 7}, IMAGES)


def test_positional_only_arguments_are_given_by_name():
    assert Tool.of(positional).bind({"way": "up", "image": 0}, IMAGES) == [IMAGES[0], "up"]


@pytest.mark.parametrize("function", [several, either])
def test_images_inside_of_other_types_are_an_error_of_the_configuration(function):
    with pytest.raises(ConfigError, match="must be one image, or an image or None"):
        Tool.of(function)
    piece = Piece("vision.with_tools", {"tool": f"{__name__}:{function.__name__}"})
    with pytest.raises(ConfigError, match="must be one image"):  # before a model is loaded
        Pieces(Stream(0)).check("engine", piece)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"number": 0.5, "boxes": []}, "'number' must be a whole number, not 0.5"),
        ({"number": "3", "boxes": []}, "'number' must be a whole number, not '3'"),
        ({"number": True, "boxes": []}, "'number' must be a whole number, not True"),
        ({"number": 1, "boxes": [[1, "2"]]}, r"'boxes\[0\]\[1\]' must be a number, not '2'"),
        ({"number": 1, "boxes": [0.5]}, r"'boxes\[0\]' must be a list"),
        ({"number": 1, "boxes": [], "words": {"a": float("nan")}}, "'words.a' must be a finite number"),
    ],
)
def test_arguments_of_another_type_are_an_error_for_the_model(given, message):
    with pytest.raises(CallError, match=f"typed: {message}"):
        Tool.of(typed).bind(given, [])


def test_arguments_that_fit_stay_as_they_were_written():
    given = {"number": 3, "boxes": [[0, 0.5]], "words": None}
    assert Tool.of(typed).bind(given, []) == [3, [[0, 0.5]], None]


def test_containers_without_the_types_of_their_members_take_any():
    tool = Tool.of(bare)
    assert tool.bind({"pair": [1, "a"], "listed": [], "words": {"a": 1}}, []) == [
        [1, "a"], [], {"a": 1}, Way.UP
    ]  # fmt: skip
    with pytest.raises(CallError, match="'pair' must be a list, not 3"):
        tool.bind({"pair": 3, "listed": [], "words": {}}, [])
    with pytest.raises(CallError, match="must be a finite number"):
        tool.bind({"pair": [float("nan")], "listed": [], "words": {}}, [])


def test_a_value_of_an_enum_is_its_member():
    tool, given = Tool.of(bare), {"pair": [], "listed": [], "words": {}}
    assert tool.schema["function"]["parameters"]["properties"]["way"]["enum"] == ["up", "down"]
    assert tool.bind({**given, "way": "down"}, [])[3] is Way.DOWN
    with pytest.raises(CallError, match="'way' must be one of 'up', 'down', not 'left'"):
        tool.bind({**given, "way": "left"}, [])


def test_a_type_that_cannot_be_described_is_an_error_of_the_configuration_that_names_the_argument():
    wanted = r"cannot describe the argument 'colours' of the tool '.*grouped' to a model"
    with pytest.raises(ConfigError, match=wanted):
        Tool.of(grouped)
    with pytest.raises(ConfigError, match=wanted):  # before a model is loaded
        Pieces(Stream(0)).check("engine", Piece("vision.with_tools", {"tool": f"{__name__}:grouped"}))


def test_a_move_by_half_a_cell_is_refused():
    move = Tool.of(GridWorld().move)
    with pytest.raises(CallError, match="move: 'cells' must be a whole number, not 0.5"):
        move.bind({"direction": "up", "cells": 0.5}, [])
    assert move.bind({"direction": "up", "cells": 2}, []) == ["up", 2]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_no_json(number):
    written = f'{{"name": "move", "arguments": {{"cells": {number}}}}}'
    (error,) = parse_calls(f"<tool_call>{written}</tool_call>")
    assert isinstance(error, CallError) and f"{number} is no finite number" in str(error)
    inside = json.dumps({"name": "move", "arguments": f'{{"cells": {number}}}'})  # JSON in a text
    (error,) = parse_calls(f"<tool_call>{inside}</tool_call>")
    assert isinstance(error, CallError)


def test_two_tools_of_one_name_are_found_by_the_check_and_told_apart_by_a_label():
    pieces, name = Pieces(Stream(0)), f"{__name__}:typed"
    with pytest.raises(ConfigError, match="two tools are called 'typed'; give one of them a `label`"):
        pieces.check("engine", Piece("vision.with_tools", {"tool": [name, {"name": name, "timeout": 3.0}]}))
    named = {"name": name, "label": "other"}
    pieces.check("engine", Piece("vision.with_tools", {"tool": [name, named]}))
    assert Tool.of(pieces.make("tool", Piece(name, {"label": "other"}))).schema["function"]["name"] == "other"
