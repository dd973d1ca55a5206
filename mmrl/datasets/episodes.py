"""Prompts of nothing, for environments that say themselves what is to be done."""

from __future__ import annotations

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Message, Part, Prompt


@data
def episodes(*, count: PositiveInt = 64) -> list[Prompt]:
    """Make `count` prompts without words, for environments whose `reset` says what is to be done.

    In every step the environments draw anew what the same prompts begin with. Rewards in TRL's form get
    messages.
    """
    asked = Message("user", (Part(),))
    columns = {"prompt": [{"role": "user", "content": ""}]}
    return [Prompt(f"episode-{number}", (asked,), columns=columns) for number in range(count)]
