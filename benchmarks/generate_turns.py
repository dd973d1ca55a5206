"""Conversations for `benchmarks.generate`: after every turn but the last, a tool shows half of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call
from mmrl.core.types import Rollouts
from mmrl.vision.decoding.continuing import TurnSampler
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.engines.with_tools import WithTools


def look(image: Image.Image) -> Any:
    """Show the left half of an image.

    Args:
        image: The image.
    """
    return image.crop((0, 0, image.width // 2, image.height))


@dataclass(frozen=True)
class Ended:
    """Turns of full length that count as ended, so that the conversation goes on."""

    turns: TurnSampler

    def sample(self, requests: Sequence[GenerationRequest]) -> Rollouts:
        """Sample one turn for every request."""
        return tuple(
            replace(row, outcomes=(replace(row.outcomes[0], tags={"finish": "stop"}),))
            for row in self.turns.sample(requests)
        )

    def part(self, parents: Mapping[tuple[str, int], tuple[str, int]]) -> None:
        """Branch conversations."""
        self.turns.part(parents)


def conversations(engine: Any, turns: int) -> WithTools:
    """Wrap an engine in conversations of so many turns, which all call `look`."""
    converse = engine.converse
    engine.converse = lambda: Ended(converse())
    tools = WithTools(engine, stream=Stream(0), tool=(look,), max_turns=turns)
    tools.read_calls = lambda text: [Call("look", {"image": 0})]
    return tools
