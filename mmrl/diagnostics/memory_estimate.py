"""What a run takes of the machine's memory, before it begins."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import torch

from mmrl.config.binding import Pieces
from mmrl.config.registry import Entry, pieces
from mmrl.config.schema import Config
from mmrl.core.protocols import Policy
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt

PROMPTS = 8  # whose length is measured


def in_use(kind: str, config: Config, on: str = "") -> list[Entry]:
    """List the pieces of a kind that fit a run: those of no package, and of packages that the run names."""
    named = [config.policy, config.data, *config.rollout.engine, *config.rewards]
    scopes = {"", *(piece.name.rpartition(".")[0] for piece in named if ":" not in piece.name)}
    return [entry for entry in pieces(kind, on) if entry.scope in scopes]


def plan(config: Config) -> Mapping[str, float]:
    """Make the policy and some prompts of a run, and add up what it will take, in bytes."""
    made = Pieces(Stream(config.seed))
    data = made.make("data", config.data)
    return estimated(config, made.make("policy", config.policy), list(data[:PROMPTS]))


def estimated(config: Config, policy: Policy, prompts: list[Prompt]) -> Mapping[str, float]:
    """Add up the estimates that fit a run: bytes by what takes them."""
    total: Counter[str] = Counter()
    for entry in in_use("memory_estimate", config):
        total.update(dict(entry.target(config, policy, prompts)))
    return {name: size for name, size in total.items() if size}


def room() -> tuple[float, str]:
    """Measure the memory of the device that learns, in bytes, and name it."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[1]), torch.cuda.get_device_name()
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "main memory"
    except (AttributeError, ValueError, OSError):  # not on every system
        return 0.0, "memory of unknown size"
