"""Recorded answers as rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.protocols import Policy
from mmrl.registry import engine
from mmrl.types import Prompt, Rollouts


@engine
class Stored:
    """Read the answers of a prompt in order, beginning anew behind the last: demonstrations, or the rows of a
    pair."""

    notes: frozenset[str] = frozenset()

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Encode one answer for every entry."""
        asked: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            if not prompt.answers:
                raise ValueError(
                    f"prompt '{prompt.uid}' has no recorded answers; the engine `stored` needs them"
                )
            turn = asked.get(prompt.uid, 0)
            rows.append(self.policy.encode(prompt, prompt.answers[turn % len(prompt.answers)]))
            asked[prompt.uid] = turn + 1
        return tuple(rows)
