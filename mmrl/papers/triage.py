"""Signals (arXiv 2604.00356): sample recorded conversations by a quality computed from signals.

Title: Signals: Trajectory Sampling and Triage for Agentic Interactions
Formula: score = 50 + weighted counts of signals, in tiers from 75 (excellent) to below 25 (severe).
Our reading: signals come as a column; clearly good and clearly bad conversations are the informative ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from mmrl.config.loading import ConfigError, nearest
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import sampler
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.samplers.candidates import evenness
from mmrl.samplers.sources import Sources, column_of

QUALITIES = {"excellent": 75.0, "good": 60.0, "neutral": 40.0, "poor": 25.0, "severe": 0.0}  # least scores
CONFIDENCE = (0.0, 0.6, 0.8, 0.95)  # of satisfaction after 0, 1, 2, and 3 or more hits
SEVERITIES = ("disengagement_severity", "misalignment_severity", "stagnation_severity")
SIGNALS = frozenset(SEVERITIES) | {
    *("satisfaction", "misalignment_ratio", "stagnation_count"),
    *("failures", "loops", "exhaustions", "escalations"),
}


def quality_score(signals: Mapping[str, float]) -> float:
    """Score a conversation from 0 to 100 by its signals; one without any has 50.

    `satisfaction` counts thanks and praise, `failures` failed calls, `loops` repeated ones, `exhaustions`
    limits that were reached; severities are from 0 to 3; `misalignment_ratio` is the share of turns that
    rephrase or correct, `stagnation_count` that of turns without progress.
    """
    of = {name: float(signals.get(name, 0.0)) for name in SIGNALS}
    score = 50.0 + 20 * CONFIDENCE[min(int(of["satisfaction"]), 3)]
    score -= 10 * of["disengagement_severity"]
    score -= 15 if of["misalignment_severity"] > 0 and of["misalignment_ratio"] > 0.3 else 0
    score -= 8 * of["stagnation_severity"] if of["stagnation_count"] > 2 else 0
    score -= 8 * of["failures"] + 5 * of["loops"] + 3 * of["exhaustions"]
    return min(max(score, 0.0), 100.0)


def quality_of(signals: Mapping[str, float]) -> str:
    """Name the quality of a conversation; one that was escalated, or with a severity of 3, is severe."""
    if signals.get("escalations", 0) > 0 or any(signals.get(name, 0) >= 3 for name in SEVERITIES):
        return "severe"
    score = quality_score(signals)
    return next(name for name, least in QUALITIES.items() if score >= least)


@sampler
class Triage:
    """Draw recorded conversations by their quality, for labels and preference data (arXiv 2604.00356).

    The quality follows from signals that were counted in the log of a conversation, without a model:
    `excellent` from a score of 75, `good` from 60, `neutral` from 40, `poor` from 25, else `severe`. Our
    readings: the signals come as a column; conversations that went clearly well or clearly wrong are the
    informative ones; escalation and giving up are one signal, `escalations`.

    Args:
        by: Column with the signals of a row, such as {satisfaction: 1, failures: 2, loops: 1}; the names are
            satisfaction, disengagement_severity, misalignment_severity, misalignment_ratio,
            stagnation_severity, stagnation_count, failures, loops, exhaustions and escalations. One that is
            not there is 0.
        weights: Weight of each quality in a draw, whatever its number of prompts; one that is not named has
            none. Null: 1 for excellent, poor and severe.
    """

    def __init__(
        self,
        data: Sequence[Prompt],
        *,
        stream: Stream,
        by: str = "signals",
        weights: Mapping[str, NonNegativeFloat] | None = None,
    ) -> None:
        self.stream = stream
        weights = dict.fromkeys(("excellent", "poor", "severe"), 1.0) if weights is None else weights
        unknown = next((name for name in weights if name not in QUALITIES), None)
        if unknown is not None:
            hint = nearest(unknown, QUALITIES) or f"there are {', '.join(QUALITIES)}"
            raise ConfigError(f"sampler 'triage': no quality is called '{unknown}' (`weights`); {hint}")
        read = [
            _checked(prompt, value) for prompt, value in zip(data, column_of(data, by, "triage"), strict=True)
        ]
        self.scores = [quality_score(signals) for signals in read]
        self.among = Sources(data, stream, [quality_of(signals) for signals in read], "triage")
        chance = [weights.get(name, 0.0) for name in self.among.names]
        if not sum(chance):
            raise ConfigError(
                f"sampler 'triage': no prompt has a quality with a weight above 0; there are "
                f"{', '.join(self.among.names)}, and `weights` are {dict(weights)}"
            )
        self.weights = torch.tensor(chance, dtype=torch.float64) / sum(chance)

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw a quality for every prompt, and a conversation of it, `num_generations` entries each."""
        self.among.candidates.begins()
        return self.among.draw(self.weights, num_prompts, num_generations)

    def pop_metrics(self) -> Mapping[str, float]:
        """Report the share of each quality in the draws."""
        named = {f"sampler/share/{name}": share for name, share in self.among.of(self.weights).items()}
        return {"sampler/entropy": evenness(self.weights), **named}


def _checked(prompt: Prompt, signals: object) -> Mapping[str, float]:
    """Return the signals of a prompt; raises `ConfigError` where they are no numbers by known names."""
    match signals:
        case Mapping():
            wrong = [
                name
                for name, value in signals.items()
                if name not in SIGNALS or type(value) not in (int, float) or not 0 <= value < math.inf
            ]
            if not wrong:
                return signals
            what = f"{wrong[0]!r}: {signals[wrong[0]]!r}"
        case _:
            what = repr(signals)
    raise ConfigError(
        f"sampler 'triage': the signals of prompt '{prompt.uid}' must be numbers from 0 by the names "
        f"{', '.join(sorted(SIGNALS))}, not {what}"
    )
