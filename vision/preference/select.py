"""Two answers to one picture as a preference pair: which is better, which pairs are dropped, and why."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from mmrl.core.rng import Stream

TIE = 1e-8  # rewards closer than this are the same
KEPT, FLIPPED = "kept", "flipped"
FAULTS = ("bad_row", "missing", "unreadable")  # what was wrong with a row or its picture
DROPS = ("empty", "identical", "not_finite", "length", "tie", "small_gap", "duplicate")

Decide = Literal["score", "dial", "random"]


@dataclass(frozen=True)
class Pair:
    """Two answers, first the one that was meant to be better; or what was wrong with their picture."""

    place: str  # of the row or the picture, relative to the source
    image: str = ""  # its file, relative to the source
    prompt: str = ""
    texts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()  # tokens
    scores: tuple[float | None, ...] = ()
    h: tuple[float | None, ...] = ()  # hallucination ratios
    split: tuple[bool, ...] = ()  # which answers were longer than the encoder reads at once
    digest: str = ""  # of the picture's bytes
    fault: str = ""  # one of FAULTS
    what: str = ""  # in words

    @property
    def gap(self) -> float:
        """Tell how much better the first answer was scored."""
        return self.scores[0] - self.scores[1]


@dataclass(frozen=True)
class Rule:
    """How pairs are decided. Thresholds that are not given are the `quantile` of the gaps' sizes."""

    decide: Decide = "score"
    tau_keep: float | None = None
    tau_flip: float | None = None
    quantile: float = 0.2
    length_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.quantile < 1:
            raise ValueError(f"`quantile` must lie in [0, 1), not {self.quantile}")
        if min(self.tau_keep or 0.0, self.tau_flip or 0.0) < 0:
            raise ValueError(
                f"`tau_keep` and `tau_flip` must be 0 or more, not {self.tau_keep} and {self.tau_flip}"
            )
        if self.length_ratio and self.length_ratio < 1:
            raise ValueError(f"`length_ratio` must be 1 or more, or 0 for none, not {self.length_ratio}")

    def drop(self, pair: Pair) -> str:
        """Say why a pair cannot be decided at all; nothing if it can."""
        if pair.fault:
            return pair.fault
        first, second = (" ".join(text.split()) for text in pair.texts)
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
        """Give the least gaps at which a pair is kept and reversed."""
        sizes = torch.tensor(gaps, dtype=torch.float64).abs().sort().values
        usual = 0.0
        if len(sizes):
            # Between neighbours, as usual; `torch.quantile` refuses more than 16 million numbers.
            at = self.quantile * (len(sizes) - 1)
            low, high = sizes[math.floor(at)], sizes[math.ceil(at)]
            usual = float(low + (high - low) * (at - math.floor(at)))
        return (
            usual if self.tau_keep is None else self.tau_keep,
            usual if self.tau_flip is None else self.tau_flip,
        )

    def judge(self, gap: float, thresholds: tuple[float, float], coin: float) -> str:
        """Keep a pair that can be decided, reverse it, or say why it is dropped; `coin` is a number in [0,
        1)."""
        if self.decide == "dial":
            return KEPT
        if self.decide == "random":
            return KEPT if coin < 0.5 else FLIPPED
        if abs(gap) <= TIE:
            return "tie"
        if gap >= thresholds[0]:
            return KEPT
        return FLIPPED if gap <= -thresholds[1] else "small_gap"


class Repeated:
    """Remembers which pictures were asked about with which prompt."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def __call__(self, pair: Pair) -> bool:
        """Tell whether there was such a pair before."""
        key = hashlib.blake2b(f"{pair.digest}\n{pair.prompt}".encode(), digest_size=12).digest()
        known = key in self.seen
        self.seen.add(key)
        return known


def decidable(rule: Rule, pairs: Iterable[Pair]) -> Iterator[tuple[Pair, str]]:
    """Go through pairs, and say of each why it cannot be decided; nothing if it can."""
    repeated = Repeated()
    for pair in pairs:
        yield pair, rule.drop(pair) or ("duplicate" if repeated(pair) else "")


@dataclass
class Verdicts:
    """Decides pairs one after the other, and counts."""

    rule: Rule
    thresholds: tuple[float, float]
    stream: Stream
    counts: Counter[str] = field(default_factory=Counter)
    dropped: list[str] = field(default_factory=list)
    before: float = 0.0  # the gaps of all pairs that could be decided
    after: float = 0.0  # those of the pairs in the data set, as they stand there
    split: int = 0

    def decide(self, pair: Pair, reason: str) -> str:
        """Decide a pair, unless there is a reason that it cannot be."""
        verdict = reason
        if not reason:
            coin = torch.rand((), generator=self.stream.fixed("coin", pair.place))
            verdict = self.rule.judge(pair.gap, self.thresholds, float(coin))
            self.before += pair.gap
        self.split += sum(pair.split)
        self.counts[verdict] += 1
        if verdict in (KEPT, FLIPPED):
            self.after += pair.gap if verdict == KEPT else -pair.gap
        else:
            self.dropped.append(f"{pair.place}: {pair.what or verdict}")
        return verdict

    def take_back(self, pair: Pair, verdict: str, reason: str) -> None:
        """Leave a pair out after all: its picture is gone."""
        self.counts[verdict] -= 1
        self.counts["missing"] += 1
        self.after -= pair.gap if verdict == KEPT else -pair.gap
        self.dropped.append(f"{pair.place}: {reason}")

    @property
    def told(self) -> dict[str, int]:
        """Give the counts: rows, of these kept and reversed, and what was left out, by reason."""
        left_out = {name: self.counts[name] for name in (*FAULTS, *DROPS) if self.counts[name]}
        kept, flipped = self.counts[KEPT], self.counts[FLIPPED]
        return {"train": kept + flipped, KEPT: kept, FLIPPED: flipped, **left_out}

    @property
    def means(self) -> dict[str, float]:
        """Give the mean gap of what could be decided, and of what is in the data set."""
        reasons = sum(self.counts[name] for name in ("tie", "small_gap"))
        rows = self.counts[KEPT] + self.counts[FLIPPED]
        return {
            "mean_gap_before": self.before / max(1, rows + reasons),
            "mean_gap_after": self.after / max(1, rows),
        }
