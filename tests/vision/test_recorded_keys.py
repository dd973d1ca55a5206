"""Keys of recorded turns that a chat template does not read are named."""

from __future__ import annotations

import json

import pytest
from jinja2 import Environment

from mmrl.core.types import Message, Part
from mmrl.vision.models.recorded_keys import check_keys

TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>"
    "{% if turn.reasoning_content and loop.last %}<think>{{ turn.reasoning_content }}</think>{% endif %}"
    "{% for part in turn.content %}{{ part.text }}{% endfor %}"
    "{% for call in turn.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "crop", "arguments": {}}}


def render(messages):
    return Environment().from_string(TEMPLATE).render(messages=messages)


def turn(role, **keys):
    return Message(role, (Part("x"),), json.dumps(keys))


def test_keys_that_the_template_reads_somewhere_are_no_fault():
    # The thought of an earlier turn is left out by the template's own rule.
    turns = [turn("user"), turn("assistant", tool_calls=[CALL], reasoning_content="so"), turn("user")]
    known = {}
    check_keys([*turns, turn("tool", name="crop", tool_call_id="1")], render, known)
    assert set(known.values()) == {True} and len(known) == 2


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (turn("assistant", thinking="so"), "`thinking` .*rename it to `reasoning_content`"),
        (turn("user", name="Ada"), "`name` of a message of the role 'user'; leave it out"),
    ],
)
def test_other_keys_are_named(told, message):
    with pytest.raises(ValueError, match=message):
        check_keys([told], render, {})
