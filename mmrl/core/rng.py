"""Seeded random streams that are keyed by names, not by the order of draws.

Draws thus depend neither on the order of a batch nor on the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Stream:
    """Source of all random draws of a run; only the run sets the training `step` and sampling `round`."""

    seed: int = 0
    step: int = 0
    round: int = 0
    purpose: str = "train"  # "evaluate" and "inference" draw from streams of their own
    stage: int = 0  # index of the training stage in a multi-stage run

    def generator(self, *key: str | int) -> torch.Generator:
        """Create the CPU generator of a key for the current training step and sampling round."""
        # The separator distinguishes (1, 23) from (12, 3).
        run = (self.seed, self.stage) if self.stage else (self.seed,)
        words = "\x1f".join(map(str, (*run, self.purpose, self.step, self.round, *key)))
        data = words.encode("utf-8", "surrogatepass")  # keys may be file names, which may be invalid UTF-8
        digest = hashlib.blake2b(data, digest_size=8).digest()  # `hash` differs between processes
        return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)

    def fixed(self, *key: str | int) -> torch.Generator:
        """Create the CPU generator of a key, equal in all training steps and sampling rounds."""
        return Stream(self.seed, purpose=self.purpose, stage=self.stage).generator(*key)

    def seed_of(self, *key: str | int) -> int:
        """Derive a seed from a key, equal in all training steps and sampling rounds; see `seeded`."""
        return int(torch.randint(1 << 31, (1,), generator=self.fixed(*key)))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator (for weight initialisation) in this context, then restore it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
