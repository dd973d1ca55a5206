"""Conversations of tiny models, which write no JSON: their texts become calls by a rule."""

from __future__ import annotations

import time
from typing import Any

from PIL import Image

from mmrl.core.tool_calls import Call
from mmrl.vision.engines.with_tools import WithTools


def ruled(number: int) -> str:
    """Say a number again.

    Args:
        number: Which.
    """
    return f"0{number}"


def slow(number: int) -> str:
    """Say a number again, after a while.

    Args:
        number: Which.
    """
    time.sleep(0.02)
    return f"0{number}"


def calls_of(text: str) -> list[Call]:
    """Read a call from the letters of an answer: of `crop` where their sum is odd, else often of `ruled`."""
    total = sum(map(ord, text))
    if total % 2:
        return [Call("crop", {"image": 0, "box": [0, 0, 0.5 + total % 5 / 10, 1]})]
    return [] if total % 4 else [Call("ruled", {"number": total})]


def slow_calls_of(text: str) -> list[Call]:
    """Read the calls of `calls_of`, of `slow` in place of `ruled`."""
    return [Call("slow" if call.name == "ruled" else call.name, call.arguments) for call in calls_of(text)]


def broken_calls_of(text: str) -> list[Call]:
    """Read a call of one of `BROKEN` from the letters of an answer."""
    return [Call(BROKEN[sum(map(ord, text)) % len(BROKEN)], {})]


def raises() -> str:
    """Raise an error."""
    raise RuntimeError("no index")


def hangs() -> str:
    """Answer too late."""
    time.sleep(10)
    return "late"


def garbage() -> Any:
    """Return what is no reply."""
    return object()


def wide() -> Any:
    """Show an image that no model reads."""
    return Image.new("RGB", (40_000, 100))


BROKEN = ("raises", "hangs", "garbage", "wide")


class Talkative(WithTools):
    """Tools that are called by rule, in turns that end at every third token."""

    parse = staticmethod(calls_of)

    def __post_init__(self) -> None:
        super().__post_init__()
        encoder = self.policy.prompt_encoder
        encoder.end = [encoder.end[0], *range(0, 256, 3)]


class SlowlyTalkative(Talkative):
    """The same with a tool that takes its time."""

    parse = staticmethod(slow_calls_of)


class Broken(Talkative):
    """Tools that all fail."""

    parse = staticmethod(broken_calls_of)
