"""Seeded random streams, keyed by names instead of the order of draws.

So draws depend neither on the order of a batch nor on the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Stream:
    """The source of all random draws of a run, which advances `step` and `round`; pieces only read."""

    seed: int = 0
    step: int = 0
    round: int = 0
    purpose: str = "train"  # "evaluate" and "inference" draw from streams of their own
    stage: int = 0  # of several runs that go on from each other

    def generator(self, *key: str | int) -> torch.Generator:
        """Make the CPU generator of a key at this step and round."""
        # The separator tells (1, 23) from (12, 3).
        run = (self.seed, self.stage) if self.stage else (self.seed,)
        words = "\x1f".join(map(str, (*run, self.purpose, self.step, self.round, *key)))
        data = words.encode("utf-8", "surrogatepass")  # an id may be the name of a file, which is any bytes
        digest = hashlib.blake2b(data, digest_size=8).digest()  # Python salts its own `hash`
        return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)

    def fixed(self, *key: str | int) -> torch.Generator:
        """Make a generator that depends on neither step nor round, for what is drawn once per run."""
        return Stream(self.seed, purpose=self.purpose, stage=self.stage).generator(*key)

    def seed_of(self, *key: str | int) -> int:
        """Draw a seed once per run, for `seeded`."""
        return int(torch.randint(1 << 31, (1,), generator=self.fixed(*key)))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator, from which initialisers draw; outside it stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
