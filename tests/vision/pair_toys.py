"""A model that talks at random, an engine for it, and a reward that looks at one pixel: pairs in no time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.rewards.adapters import per_outcome

WORDS = ["a", "red", "green", "blue", "dog", "cat", "box", "ball", "on", "under", "beside", "the", "table"]


class Talker:
    """A policy that is nothing but weights."""

    outputs: frozenset[str] = frozenset()

    def __init__(self, *, weight: float = 1.0) -> None:
        self.module = nn.Linear(1, 1)
        nn.init.constant_(self.module.weight, weight)
        nn.init.zeros_(self.module.bias)


class Talk:
    """Say words that depend on the seed, the prompt and the turn; the second answer has the ratio 0.6."""

    notes: frozenset[str] = frozenset()

    def __init__(self, policy: Talker, *, stream: Stream, pause: float = 0.0, log: str = "") -> None:
        self.policy, self.stream, self.pause, self.log = policy, stream, pause, log

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        time.sleep(self.pause)
        asked: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            index = asked[prompt.uid] = asked.get(prompt.uid, -1) + 1
            generator = self.stream.generator(prompt.uid, index)
            drawn = torch.randint(
                len(WORDS), (int(torch.randint(3, 9, (), generator=generator)),), generator=generator
            )
            text = " ".join(WORDS[i] for i in drawn.tolist())
            text = {"same": "always this", "mute": " "}.get(prompt.uid.split(".")[0], text)
            answer = Outcome(text=text, end=len(drawn), recorded={"contrast_alpha": 0.6 * (index % 2)})
            rows.append(Trajectory(prompt, prompt.uid, (answer,), None, len(drawn)))
        if self.log:
            with Path(self.log).open("a") as file:
                file.writelines(f"{prompt.uid}\n" for prompt in prompts)
        return tuple(rows)


@per_outcome
def brightness(prompt: Prompt, outcome: Outcome) -> float | None:
    """Like texts whose length fits the first pixel; a image called `blank` gives no number."""
    if prompt.uid.startswith("blank"):
        return None
    level = float(prompt.media[0].load().pixels[0, 0, 0, 0]) / 255
    return 1.0 if prompt.uid.startswith("tie") else -abs(level - len(outcome.text) / 50)


def always_long(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
    """Like long texts."""
    return [float(len(outcome.text)) for outcome in outcomes]
