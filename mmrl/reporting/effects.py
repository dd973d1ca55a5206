"""Table of the settings that differ between two evaluations, and of the effect of each on the results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mmrl.reporting.predictions import Predictions

CONTEXT = 60, 120  # characters shown before and after the first difference of two prompts
SHOWN = 60  # most characters of a value in the table


@dataclass(frozen=True)
class MetricChange:
    """A metric of the first evaluation's stored answers, scored before and after one setting is changed."""

    name: str  # "a -> b" if the reward is named differently
    before: float  # NaN if the metric exists only after the change
    after: float
    low: float = math.nan  # interval of the paired difference
    high: float = math.nan

    @property
    def text(self) -> str:
        """The change on one line."""
        if math.isnan(self.before):
            return f"{self.name} {self.after:.4g}"
        gap = f"{self.after - self.before:+.4g} ({self.low:+.4g} to {self.high:+.4g})"
        return f"{self.name} {gap}: {self.before:.4g} -> {self.after:.4g}"


@dataclass(frozen=True)
class PromptDifference:
    """Summary of the prompts whose rendered model inputs differ between two settings."""

    different: int
    prompts: int  # number of compared prompts
    uid: str = ""  # the first prompt that differs
    first: str = ""  # its text after the chat template
    second: str = ""
    media: bool = False  # whether only its media tensors differ

    @property
    def place(self) -> int:
        """Index of the first character that differs."""
        pairs = zip(self.first, self.second, strict=False)
        shorter = min(len(self.first), len(self.second))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)

    def excerpts(self) -> list[tuple[str, str]]:
        """Split both texts around the first difference: the text before it, and the text from it on."""
        at, (before, after) = self.place, CONTEXT
        start = max(0, at - before)
        return [
            ("…" * (start > 0) + text[start:at], text[at : at + after] + "…" * (len(text) > at + after))
            for text in (self.first, self.second)
        ]

    @property
    def text(self) -> str:
        """The number of different prompts, as a phrase."""
        what = "; of the first only the pixels or sounds" if self.media else ""
        return f"{self.different} of {self.prompts} prompts differ{what}"


@dataclass(frozen=True)
class Effect:
    """A setting that differs between two evaluations, and its measured effect on the first.

    Args:
        setting: Dotted configuration key, or `packages.NAME`, `code.KEY`, `machine.NAME`.
        first: Value in the first evaluation.
        second: Value in the second evaluation.
        metrics: Metrics of stored answers that were scored again, before and after the change.
        prompts: Prompts that were rendered again.
        fault: Why stored answers or prompts could not be used.
        command: Command that evaluates the first with only this setting of the second; "" if none can.
    """

    setting: str
    first: Any
    second: Any
    metrics: Sequence[MetricChange] = ()
    rescored: bool = False
    prompts: PromptDifference | None = None
    fault: str = ""
    command: str = ""

    @property
    def text(self) -> str:
        """The effect as one line."""
        if self.rescored:
            changed = "; ".join(change.text for change in self.metrics)
            return changed or "no change of any metric of the stored answers"
        parts = [self.prompts.text] if self.prompts else []
        parts += [self.fault] if self.fault else []
        run = "needs a run" + (f": {self.command}" if self.command else "")
        return "; ".join([*parts, run])


@dataclass(frozen=True)
class Explanation:
    """Effects of all settings that differ, and a comparison of the stored prompts."""

    effects: Sequence[Effect] = ()
    stored_prompts: PromptDifference | None = None
    notes: Sequence[str] = field(default=())

    def rows(self, names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
        """Return the titles and the rows of the table of settings."""
        titles = ["setting", *names, "effect on the first"]
        return titles, [[e.setting, short(e.first), short(e.second), e.text] for e in self.effects]

    def differing_prompts(self) -> list[tuple[str, PromptDifference]]:
        """List the prompt differences to show, each with its cause."""
        shown = [(e.setting, e.prompts) for e in self.effects if e.prompts and e.prompts.different]
        if self.stored_prompts and self.stored_prompts.different:
            shown.append(("as both evaluations read them", self.stored_prompts))
        return shown

    def plain(self) -> dict[str, Any]:
        """Convert to JSON values."""
        settings = [asdict(effect) | {"effect": effect.text} for effect in self.effects]
        stored = asdict(self.stored_prompts) if self.stored_prompts else None
        return {"settings": settings, "stored_prompts": stored, "notes": list(self.notes)}


def short(value: Any) -> str:
    """Format a value of a setting for a table."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace non-finite numbers by None, at any depth, because JSON has no NaN."""
    return json.loads(json.dumps(values, default=str), parse_constant=lambda constant: None)


def prompt_difference(
    first: Mapping[str, tuple[str, str]], second: Mapping[str, tuple[str, str]], uids: Sequence[str]
) -> PromptDifference:
    """Count the prompts whose input hashes differ, and show the first one; values are (text, hash)."""
    different = [uid for uid in uids if first[uid][1] != second[uid][1]]
    if not different:
        return PromptDifference(0, len(uids))
    uid = different[0]
    (text, inputs), (other, others) = first[uid], second[uid]
    media = text == other and inputs.split()[:1] == others.split()[:1]
    return PromptDifference(len(different), len(uids), uid, text, other, media)


def stored_prompts(first: Predictions, second: Predictions) -> PromptDifference | None:
    """Compare the prompts recorded by two evaluations; None if either recorded none."""
    stored = [
        {row["uid"]: (row["rendered"], row["inputs"]) for row in one.rows if row.get("inputs")}
        for one in (first, second)
    ]
    uids = [uid for uid in stored[0] if uid in stored[1]]
    return prompt_difference(*stored, uids) if uids else None


def same_name(first: Any, second: Any) -> bool:
    """Whether two entries "name hash" of recorded code have the same name."""
    return str(first).split()[:1] == str(second).split()[:1]
