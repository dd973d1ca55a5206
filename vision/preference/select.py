"""Selection of preference pairs: keep, reverse or drop a pair based on the scores of its answers."""

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

TIE = 1e-8  # scores with a smaller difference count as equal
SELECTED = KEPT, FLIPPED = "kept", "flipped"
FAULTS = ("bad_row", "missing", "unreadable")  # faults of a row or its image
DROPS = ("empty", "identical", "not_finite", "length", "tie", "small_gap", "duplicate")

Decide = Literal["score", "dial", "random"]


@dataclass(frozen=True)
class ScoredPair:
    """Two scored answers about an image, first the one expected to be better; or the fault of the image."""

    place: str  # name of the row or image, relative to the source
    image: str = ""  # image file, relative to the source
    prompt: str = ""
    texts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()  # of both answers, in tokens
    scores: tuple[float | None, ...] = ()
    h: tuple[float | None, ...] = ()  # hallucination ratios: weights of contrastive decoding
    split: tuple[bool, ...] = ()  # whether each answer exceeds the encoder's context
    digest: str = ""  # hash of the image file
    fault: str = ""  # a name in FAULTS or DROPS; empty if the pair can be used
    what: str = ""  # description of the fault

    @property
    def gap(self) -> float:
        """Return the score of the first answer minus the score of the second."""
        return self.scores[0] - self.scores[1]


@dataclass(frozen=True)
class SelectionRule:
    """Rule that keeps, reverses or drops pairs by score gap; `vision.clip_pairs` documents its options."""

    decide: Decide = "score"
    tau_keep: float | None = None
    tau_flip: float | None = None
    quantile: float = 0.2
    length_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.length_ratio and self.length_ratio < 1:
            raise ValueError(f"`length_ratio` must be 1 or more, or 0 for none, not {self.length_ratio}")

    def fault(self, pair: ScoredPair) -> str:
        """Return the reason why a pair cannot be used; an empty string if it can."""
        if pair.fault:
            return pair.fault
        first, second = (" ".join(text.split()) for text in pair.texts)  # normalise white space
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
        """Return two thresholds: the smallest |gap| of a kept pair and of a reversed pair."""
        sizes = sorted(map(abs, gaps)) or [0.0]
        # Interpolate the quantile linearly between the two nearest ranks.
        rank = self.quantile * (len(sizes) - 1)
        low, high = sizes[math.floor(rank)], sizes[math.ceil(rank)]
        default = low + (high - low) * (rank - math.floor(rank))
        return tuple(default if tau is None else tau for tau in (self.tau_keep, self.tau_flip))

    def judge(self, gap: float, thresholds: tuple[float, float], coin: float) -> str:
        """Return `KEPT`, `FLIPPED`, or the reason to drop the pair; `coin` is a random number in [0, 1)."""
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
    """Set `fault` of every unusable pair, such as a repeated image with the same prompt."""
    seen: set[bytes] = set()
    for pair in pairs:
        fault = rule.fault(pair)
        if not fault:
            # Keep 96-bit keys, because the keys of all pairs stay in memory.
            key = hashlib.blake2b(f"{pair.digest}\n{pair.prompt}".encode(), digest_size=12).digest()
            fault = "duplicate" if key in seen else ""
            seen.add(key)
        yield replace(pair, fault=fault)


@dataclass
class PairSelector:
    """Selector that applies a rule to pairs one by one (keep, reverse, drop) and counts the verdicts."""

    rule: SelectionRule
    thresholds: tuple[float, float]
    stream: Stream
    counts: Counter[str] = field(default_factory=Counter)
    dropped: list[str] = field(default_factory=list)
    before: float = 0.0  # sum of score gaps over all pairs without a fault
    after: float = 0.0  # sum over selected pairs, negated if reversed
    split: int = 0

    def select(
        self, pairs: Iterable[ScoredPair], image_of: Callable[[ScoredPair], bytes]
    ) -> Iterator[tuple[ScoredPair, str, bytes]]:
        """Judge pairs one by one; yield each selected pair with its verdict and image file content."""
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
        """Return the numbers of selected, kept and reversed pairs, and of dropped pairs for each reason."""
        dropped = {name: self.counts[name] for name in (*FAULTS, *DROPS) if self.counts[name]}
        kept, flipped = self.counts[KEPT], self.counts[FLIPPED]
        return {"train": kept + flipped, KEPT: kept, FLIPPED: flipped, **dropped}

    def means(self) -> dict[str, float]:
        """Return the mean gap of all pairs without a fault, and of the selected pairs."""
        rows = self.counts[KEPT] + self.counts[FLIPPED]
        decided = rows + self.counts["tie"] + self.counts["small_gap"]
        return {
            "mean_gap_before": self.before / max(1, decided),
            "mean_gap_after": self.after / max(1, rows),
        }
