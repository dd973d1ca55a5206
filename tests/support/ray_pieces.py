"""Rewards and engines that tests make in Ray actors, in a module that an actor imports quickly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from mmrl.core.rng import Stream
from mmrl.rewards.adapters import log_metric, per_outcome

# ---- rewards


class Noisy:
    """Draw by prompt, log, and depend on an option that follows a schedule."""

    def __init__(self, *, stream: Stream, scale: float = 1.0) -> None:
        self.stream, self.scale = stream, scale

    def __call__(self, prompts, outcomes):
        log_metric("noisy/process", float(len(outcomes) > 0))
        for outcome in outcomes:
            log_metric("noisy/words", len(outcome.text.split()) / 3)
        noise = [torch.rand((), generator=self.stream.generator("noisy", p.uid)).item() for p in prompts]
        return [self.scale * x + len(o.text.split()) / 7 for x, o in zip(noise, outcomes, strict=True)]


def in_words(prompts, completions, completion_ids, trainer_state, log_extra, **columns):
    """Count tokens, in TRL's form."""
    log_extra("words", [len(c.split()) for c in completions])
    return [trainer_state.global_step + len(ids) / 9 for ids in completion_ids]


async def slowly(prompts, completions, **columns):
    """Wait, and give nothing to some."""
    await asyncio.sleep(0.01)
    return [None if "3" in completion else 0.25 for completion in completions]


def rivals(prompts, outcomes):
    """Compare the answers of a group."""
    best: dict[str, int] = {}
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        best[prompt.uid] = max(best.get(prompt.uid, 0), len(outcome.text))
    return [len(o.text) / max(1, best[p.uid]) for p, o in zip(prompts, outcomes, strict=True)]


@per_outcome
def variable(prompt, outcome, *, name: str = "MMRL_TEST"):
    """Read the environment."""
    return float(os.environ.get(name, "0"))


class Faulty:
    """Fail as a file says, which is taken away before."""

    def __init__(self, *, file: str) -> None:
        self.file = Path(file)

    def __call__(self, prompts, outcomes):
        if not self.file.exists():
            return [1.0] * len(outcomes)
        how = self.file.read_text()
        if how != "die":
            self.file.unlink()
        if how == "raise":
            raise LookupError("no span in p0")
        if how == "exit":
            sys.exit("enough")
        if how == "hang":
            time.sleep(600)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.5  # no list


# ---- engines


@dataclass(eq=False)
class Cold:
    """Sample at a temperature that follows a schedule, and say so."""

    engine: Any
    _: KW_ONLY
    stream: Stream
    power: float = 1.0
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self):
        self.policy = self.engine.policy

    def rollout(self, prompts):
        with torch.no_grad():
            before = self.policy.table.clone()
            self.policy.table.mul_(self.power)
            rows = self.engine.rollout(prompts)
            self.policy.table.copy_(before)
        return rows

    def pop_metrics(self):
        return {"cold/power": self.power}


class Broken:
    """Fail as it is told."""

    notes = frozenset()

    def __init__(self, engine, *, how: str) -> None:
        self.engine, self.policy, self.how = engine, engine.policy, how

    def rollout(self, prompts):
        if self.how == "die":
            os._exit(1)
        if self.how == "hang":
            time.sleep(60)
        raise FileNotFoundError("the answers are not there")
