"""Base class for samplers that need the answer texts of all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Prompt, Rollouts


class ReadsAnswers:
    """Base class of samplers that need the answer texts of rows on all processes."""

    tell_all: Callable[[Any], list[Any]] | None = None  # None: single process

    def connect(self, ask: Callable[[Sequence[Prompt]], Rollouts], tell: Callable[[Any], list[Any]]) -> None:
        """Store `tell`, which gathers values from all processes; `ask` is not used."""
        self.tell_all = tell

    def texts(self, rollouts: Rollouts, table: RewardTable) -> list[str]:
        """List the answer texts of all rows of a table; `rollouts` are only the rows of this process."""
        own = [row.outcomes[-1].text or "" for row in rollouts]
        if self.tell_all is None and len(own) != len(table):
            raise ConfigError(
                f"the sampler '{type(self).__name__}' reads answers, and only some of them are on this "
                "process; give it the others by `connect`, or start the run on one process"
            )
        of_process = [iter(texts) for texts in (self.tell_all(own) if self.tell_all else [own])]
        places = table.process.tolist() if self.tell_all else [0] * len(table)
        return [next(of_process[place]) for place in places]
