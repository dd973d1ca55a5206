"""Conversations of tiny models that part at their turns, with tools that are called by a rule."""

from __future__ import annotations

from mmrl.core.tool_calls import Call
from mmrl.papers.slate import WithStepCandidates
from mmrl.papers.treecua_dpo import WithTurnBranches
from mmrl.vision.engines.with_tools import WithTools
from tests.vision.talking import Talkative, calls_of

CALLED = []


def counted(number: int) -> str:
    """Say a number again, and count the call.

    Args:
        number: Which.
    """
    CALLED.append(number)
    return f"0{number}"


def failing(number: int) -> str:
    """Fail.

    Args:
        number: Which.
    """
    raise RuntimeError("no index")


class Alone(WithTools):
    """Conversations that share nothing, with tools that are called by rule."""

    parse = staticmethod(calls_of)


class CallsCounted:
    """The tool `counted` is called in every turn."""

    @staticmethod
    def parse(text):
        return [Call("counted", {"number": sum(map(ord, text))})]


class CallsFailing:
    """The tool `failing` is called in every turn."""

    @staticmethod
    def parse(text):
        return [Call("failing", {"number": 1})]


class Branching(Talkative, WithTurnBranches):
    """A tree of them."""


class Stepwise(Talkative, WithStepCandidates):
    """Candidates of their turns."""
