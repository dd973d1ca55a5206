"""Selection of preference pairs: keep, reverse or drop a pair by the scores of its answers."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from mmrl.core.rng import Stream
from mmrl.data.video import MediaError

TIE = 1e-8  # rewards closer than this are equal
SELECTED = KEPT, FLIPPED = "kept", "flipped"
FAULTS = ("bad_row", "missing", "unreadable")  # of a row or its image
DROPS = ("empty", "identical", "not_finite", "length", "tie", "small_gap", "duplicate")

Decide = Literal["score", "dial", "random"]


@dataclass(frozen=True)
class ScoredPair:
    """Two scored answers about an image, the better one by expectation first; or the fault of the image."""

    place: str  # of the row or the image, relative to the source
    image: str = ""  # its file, relative to the source
    prompt: str = ""
    texts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()  # tokens
    scores: tuple[float | None, ...] = ()
    h: tuple[float | None, ...] = ()  # hallucination ratios
    split: tuple[bool, ...] = ()  # of each answer: whether it exceeds the encoder's context
    digest: str = ""  # of the image file
    fault: str = ""  # one of FAULTS, or of DROPS for pairs that cannot be decided
    what: str = ""  # description of the fault

    @property
    def gap(self) -> float:
        """Score of the first answer minus score of the second."""
        return self.scores[0] - self.scores[1]


@dataclass(frozen=True)
class SelectionRule:
    """Rule that keeps, reverses or drops pairs by their score gap; see `vision.clip_pairs` for options."""

    decide: Decide = "score"
    tau_keep: float | None = None
    tau_flip: float | None = None
    quantile: float = 0.2
    length_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.length_ratio and self.length_ratio < 1:
            raise ValueError(f"`length_ratio` must be 1 or more, or 0 for none, not {self.length_ratio}")

    def fault(self, pair: ScoredPair) -> str:
        """Return the reason why a pair cannot be decided; empty if it can."""
        if pair.fault:
            return pair.fault
        first, second = (" ".join(text.split()) for text in pair.texts)  # ignore white space
        if not first or not second:
            return "empty"
        if first == second:
            return "identical"
        if any(score is None or not math.isfinite(score) for score in pair.scores):
            return "not_finite"
        if self.length_ratio and max(pair.lengths) > self.length_ratio * max(1, min(pair.lengths)):
            return "length"
        return ""

    def thresholds(self, gaps: Sequence[float]) -> tuple[float, float]:
        """Return the least absolute gaps at which a pair is kept, and reversed."""
        sizes = sorted(map(abs, gaps)) or [0.0]
        # The quantile by linear interpolation between its two neighbours.
        rank = self.quantile * (len(sizes) - 1)
        low, high = sizes[math.floor(rank)], sizes[math.ceil(rank)]
        default = low + (high - low) * (rank - math.floor(rank))
        return tuple(default if tau is None else tau for tau in (self.tau_keep, self.tau_flip))

    def judge(self, gap: float, thresholds: tuple[float, float], coin: float) -> str:
        """Return `KEPT`, `FLIPPED`, or the reason of a drop; `coin` is a random number in [0, 1)."""
        if self.decide == "dial":
            return KEPT
        if self.decide == "random":
            return KEPT if coin < 0.5 else FLIPPED
        if abs(gap) <= TIE:
            return "tie"
        if gap >= thresholds[0]:
            return KEPT
        return FLIPPED if gap <= -thresholds[1] else "small_gap"


def with_faults(rule: SelectionRule, pairs: Iterable[ScoredPair]) -> Iterator[ScoredPair]:
    """Set the fault of every pair that cannot be decided; a repeated image with its prompt is a duplicate."""
    seen: set[bytes] = set()
    for pair in pairs:
        fault = rule.fault(pair)
        if not fault:
            # 96 bits, because the keys of all images of a build are in memory.
            key = hashlib.blake2b(f"{pair.digest}\n{pair.prompt}".encode(), digest_size=12).digest()
            fault = "duplicate" if key in seen else ""
            seen.add(key)
        yield replace(pair, fault=fault)


@dataclass
class PairSelector:
    """Decides pairs one by one and counts the verdicts."""

    rule: SelectionRule
    thresholds: tuple[float, float]
    stream: Stream
    counts: Counter[str] = field(default_factory=Counter)
    dropped: list[str] = field(default_factory=list)
    before: float = 0.0  # sum of the gaps of all pairs that could be decided
    after: float = 0.0  # sum of the gaps of the selected pairs, reversed ones negated
    split: int = 0

    def select(
        self, pairs: Iterable[ScoredPair], image_of: Callable[[ScoredPair], bytes]
    ) -> Iterator[tuple[ScoredPair, str, bytes]]:
        """Decide pairs one by one; yield the selected ones with their verdicts and images."""
        for pair in pairs:
            coin = torch.rand((), generator=self.stream.fixed("coin", pair.place))
            verdict = pair.fault or self.rule.judge(pair.gap, self.thresholds, float(coin))
            image = b""
            if verdict in SELECTED:
                try:
                    image = image_of(pair)
                except MediaError as error:
                    verdict, pair = "missing", replace(pair, what=str(error))
            self.counts[verdict] += 1
            self.split += sum(pair.split)
            if not pair.fault:
                self.before += pair.gap
            if verdict in SELECTED:
                self.after += pair.gap if verdict == KEPT else -pair.gap
                yield pair, verdict, image
            else:
                self.dropped.append(f"{pair.place}: {pair.what or verdict}")

    def summary(self) -> dict[str, int]:
        """Count all rows, kept and reversed ones, and dropped pairs by reason."""
        dropped = {name: self.counts[name] for name in (*FAULTS, *DROPS) if self.counts[name]}
        kept, flipped = self.counts[KEPT], self.counts[FLIPPED]
        return {"train": kept + flipped, KEPT: kept, FLIPPED: flipped, **dropped}

    def means(self) -> dict[str, float]:
        """Return the mean gap of decidable pairs, and of selected ones."""
        rows = self.counts[KEPT] + self.counts[FLIPPED]
        decided = rows + self.counts["tie"] + self.counts["small_gap"]
        return {
            "mean_gap_before": self.before / max(1, decided),
            "mean_gap_after": self.after / max(1, rows),
        }
