"""Games for tests: rules that any answer fits, and an engine that answers by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator

from mmrl.core.games import Game
from mmrl.core.types import Message, Outcome, Part, Prompt, Trajectory
from mmrl.data.templates import quoted
from tests.support.toys import ToyText


class Telephone(Game):
    """A speaker sees the prompt, a guesser what the speaker said; who has more letters wins a round.

    The number of rounds is drawn, so that games end at different times.
    """

    roles = ("speaker", "guesser")

    def begin(self, prompt: Prompt, generator: Generator) -> Any:
        return (prompt, 1 + int(torch.randint(3, (), generator=generator)), ())

    def acting(self, state: Any) -> Sequence[str]:
        _, rounds, said = state
        return (self.roles[len(said) % 2],) if len(said) < 2 * rounds else ()

    def observe(self, state: Any, player: str) -> Sequence[Message]:
        prompt, _, said = state
        if player == "speaker":
            return prompt.messages
        return [Message("user", (Part("heard: " + quoted(said[-1])),))]

    def act(self, state: Any, player: str, answer: str) -> Any:
        prompt, rounds, said = state
        return (prompt, rounds, (*said, answer))

    def payoff(self, state: Any) -> dict[str, float]:
        letters = {
            role: sum(len(set(a)) for a in state[2][place::2]) for place, role in enumerate(self.roles)
        }
        ahead = letters["speaker"] - letters["guesser"]
        return {"speaker": float(ahead), "guesser": float(-ahead)}


@dataclass
class Answering:
    """An engine that answers every prompt by a function, and lists what it was asked in every round."""

    policy: ToyText
    answer: Callable[[Prompt], str]
    notes = frozenset()

    def __post_init__(self) -> None:
        self.rounds: list[list[Prompt]] = []

    def rollout(self, prompts: Sequence[Prompt]) -> tuple[Trajectory, ...]:
        self.rounds.append(list(prompts))
        return tuple(
            Trajectory(p, p.uid, (Outcome(text=self.answer(p), end=2, tags={"finish": "stop"}),), None, 2)
            for p in prompts
        )
