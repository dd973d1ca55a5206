"""Environments in TRL's form, and an engine whose tiny model calls their tools by a rule."""

from __future__ import annotations

import random
import time

from PIL import Image

from mmrl.core.tool_calls import Call
from mmrl.core.types import Message, Part, Prompt
from mmrl.vision.engines.with_environments import WithEnvironments


class Ladder:
    """Climb to a rung, which the row names or the beginning draws."""

    def reset(self, top: int | None = None, **row) -> str | None:
        self.top = random.randint(3, 9) if top is None else top
        self.rung, self.log, self.row = 0, [], row
        return f" Climb to rung {self.top}."

    def get_reward(self) -> float:
        return float(self.rung == self.top)

    def climb(self, rungs: int) -> int:
        """
        Climb some rungs.

        Args:
            rungs: How many rungs to climb.

        Returns:
            The rung that you are on.
        """
        if abs(rungs) > 4:
            raise ValueError("You fell.")
        self.log.append(rungs)
        self.rung += rungs
        return self.rung

    def look(self) -> list:
        """
        Look around.

        Returns:
            What you see.
        """
        shade = 20 * (self.rung % 12)
        shown = Image.new("RGB", (56, 28), (shade, 255 - shade, 90))
        return [{"type": "image", "image": shown}, {"type": "text", "text": f"You are on rung {self.rung}."}]

    @property
    def height(self) -> float:
        raise AssertionError("properties are no tools, and reading one may fail")


class SlowLadder(Ladder):
    """A ladder whose answers come back in another order."""

    def climb(self, rungs: int) -> int:
        """
        Climb some rungs.

        Args:
            rungs: How many rungs to climb.
        """
        time.sleep(0.05 * (7 * id(self) // 16 % 4))
        return super().climb(rungs)


class Echo:
    """Say something again; it has no reward of its own."""

    def reset(self, seed: int, environment: str = "") -> list:
        self.seed, self.said, self.kind = seed, [], environment
        return [{"type": "text", "text": f"Begin with {seed % 10}."}, Image.new("RGB", (28, 28))]

    async def say(self, words: str, times: int = 1, loud: bool = False) -> str:
        """
        Say it.

        Args:
            words: What to say.
            times: How often.
            loud: Whether to shout.
        """
        self.said.append((words, times, loud))
        return words * times


class Broken(Ladder):
    """A ladder that fails in one place."""

    def __init__(self, *, at: str = "reset", seconds: float = 0.0) -> None:
        self.at, self.seconds = at, seconds

    def reset(self, **row) -> str | None:
        self._fail("reset")
        return super().reset(**row)

    def climb(self, rungs: int) -> int:
        """
        Climb some rungs.

        Args:
            rungs: How many rungs to climb.
        """
        self._fail("climb")
        return super().climb(rungs)

    def get_reward(self) -> float:
        self._fail("get_reward")
        return super().get_reward()

    def _fail(self, here: str) -> None:
        if here == self.at:
            time.sleep(self.seconds)
            if not self.seconds:
                raise OSError("the ladder is gone")


def of_letters(text: str) -> list[Call]:
    """Read calls from the letters of an answer."""
    total = sum(map(ord, text))
    climb, look = Call("climb", {"rungs": total % 5}), Call("look", {})
    return [[climb], [look], [climb, look], []][total % 4]


class Playing(WithEnvironments):
    """Environments whose tools are called by a rule, in turns that end at every third token."""

    parse = staticmethod(of_letters)

    def __post_init__(self) -> None:
        super().__post_init__()
        encoder = self.policy.prompt_encoder
        encoder.end = [encoder.end[0], *range(0, 256, 3)]


def rungs_left(environments, **columns) -> list[float]:
    """Reward in TRL's form that reads the environments."""
    return [-float(abs(environment.top - environment.rung)) for environment in environments]


def seen(*, count: int = 4) -> list[Prompt]:
    """Make prompts for ladders, with and without a column of theirs."""
    prompts = []
    for number in range(count):
        columns = {"prompt": "what", **({"top": number} if number % 2 else {})}
        message = Message("user", (Part("what"),))
        prompts.append(Prompt(f"p{number}", (message,), "fox", columns=columns))
    return prompts


def played(environments, **columns) -> list[float]:
    """Reward in TRL's form that counts a conversation whose environment is lost as 0."""
    return [float(bool(environment)) for environment in environments]
