"""Watches that every weighted reward applies to something, so that none is trained with that is None
everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.binding import Bound
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Rollouts
from mmrl.training.score import RewardFault

ROUNDS = 10  # rounds that a reward may not apply to: answers have to be good enough for some
PROMPTS = 1000  # prompts, or all there are: a task may have a small share of the data


class Applied:
    """Stops a run when a weighted reward gave None for all answers of `ROUNDS` rounds, and of all prompts or
    `PROMPTS` of them.

    A label (weight 0) may be None, and so may a reward with `on_absent: warn`. Rounds in which a reward
    failed do not count for it.
    """

    def __init__(self, rewards: Sequence[Bound], prompts: int) -> None:
        watched = [b.name for b in rewards if b.weight and b.call.get("on_absent", "raise") == "raise"]
        self.absent = dict.fromkeys(watched, 0)  # prompts asked in vain; a reward that applied is taken out
        self.rounds, self.enough = 0, min(prompts, PROMPTS)

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Take note of a round."""
        self.rounds += 1
        never = set(table.absent)
        for name in list(self.absent):
            if name in never:
                self.absent[name] += len(set(table.uids))
            elif f"fault/{name}" not in table.ids:
                del self.absent[name]
        for name, asked in self.absent.items():
            if self.rounds >= ROUNDS and asked >= self.enough:
                raise RewardFault(
                    f"reward '{name}' gave None for every answer to {asked} prompts in {self.rounds} rounds, "
                    "so nothing is learned from it; see whether it reads what the data have, give it the "
                    "weight 0, or set `on_absent: warn` on it if it will apply later"
                )

    def state_dict(self) -> dict[str, Any]:
        """Give what was seen."""
        return {"rounds": self.rounds, "absent": dict(self.absent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.rounds, self.absent = state["rounds"], dict(state["absent"])
