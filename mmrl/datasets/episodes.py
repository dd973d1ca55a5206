"""Empty prompts, for environments that state the task themselves."""

from __future__ import annotations

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Message, Part, Prompt


@data
def episodes(*, count: PositiveInt = 64) -> list[Prompt]:
    """Create empty prompts, for environments whose method `reset` states the task.

    In every step, an environment draws a new start state for a prompt. Rewards in TRL's form get prompts and
    completions as messages.

    Args:
        count: Number of prompts.
    """
    empty = Message("user", (Part(),))
    columns = {"prompt": [{"role": "user", "content": ""}]}
    return [Prompt(f"episode-{number}", (empty,), columns=columns) for number in range(count)]
