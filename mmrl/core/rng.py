"""Seeded random streams. Draws are keyed by names, so they depend on neither the order of a batch nor the
number of processes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


@dataclass
class Stream:
    """Where all random draws of a run come from. The run moves `step` and `round`; pieces only read."""

    seed: int = 0
    step: int = 0
    round: int = 0
    purpose: str = "train"

    def generator(self, *key: str | int) -> torch.Generator:
        """Make the generator of this moment and key, on the CPU."""
        words = "\x1f".join(map(str, (self.seed, self.purpose, self.step, self.round, *key)))
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)

    def fixed(self, *key: str | int) -> torch.Generator:
        """Make a generator that does not depend on the moment: for what is drawn once per run."""
        return Stream(self.seed, purpose=self.purpose).generator(*key)
