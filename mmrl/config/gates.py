"""Gates of stages: what the evaluation of a stage has to show before the next stage may go on from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.config.loading import ConfigError, nearest
from mmrl.config.plain import as_list
from mmrl.config.schema import convert

HELD_OUT = "eval_"  # how the names of an evaluation's metrics begin
PREVIOUS = re.compile(r"previous(?:\s*([+-])\s*(\d+(?:\.\d*)?(?:e-?\d+)?))?")
WANTED = "a number, or `previous` with a number added or taken away: previous - 0.01"


@dataclass(frozen=True)
class Gate:
    """A condition on an evaluation, `keep_if` of a stage.

    Args:
        of: A metric of the last evaluation of the stage, by its name in metrics.jsonl: `eval_mean_iou`.
        not_below: The least value with which the stage is kept: a number, or `previous - 0.01`, where
            `previous` is the value of the stage that it began from.
        not_above: The largest value, likewise.
    """

    of: str
    not_below: Any = None
    not_above: Any = None

    @property
    def compares(self) -> bool:
        """Whether it compares with the stage before."""
        return any(isinstance(bound, str) for bound in (self.not_below, self.not_above))

    def refusal(self, after: Mapping[str, float], before: Mapping[str, float]) -> str:
        """Say why a stage is not kept, from its metrics and those of the one before; empty where it is kept.

        Raises `ConfigError` where one of them lacks the metric.
        """
        value = measured(self.of, after)
        for words, bound, sign in (("not below", self.not_below, 1), ("not above", self.not_above, -1)):
            if bound is None:
                continue
            limit = bound_of(bound, measured(self.of, before) if isinstance(bound, str) else math.nan)
            if not sign * value >= sign * limit:  # NaN is not kept
                spelled = f"{bound} = {limit:.6g}" if isinstance(bound, str) else f"{limit:.6g}"
                return f"{self.of} is {value:.6g}, and keep_if wants it {words} {spelled}"
        return ""


def gates_of(raw: Any, place: str) -> tuple[Gate, ...]:
    """Read `keep_if`: a mapping or a list of them. Raises `ConfigError` for anything else."""
    gates = []
    for i, given in enumerate(as_list(raw) if raw else ()):
        at = f"{place}[{i}]" if isinstance(raw, list | tuple) else place
        gate = convert(given, Gate, at)
        if not gate.of.startswith(HELD_OUT):
            raise ConfigError(
                f"'{at}.of' must be a metric of the last evaluation, as {HELD_OUT}mean_iou is, not "
                f"'{gate.of}'"
            )
        if gate.not_below is None and gate.not_above is None:
            raise ConfigError(f"'{at}' wants `not_below` or `not_above`, {WANTED}")
        for key in ("not_below", "not_above"):
            if (bound := getattr(gate, key)) is not None:
                bound_of(bound, 0.0, f"{at}.{key}")
        gates.append(gate)
    return tuple(gates)


def bound_of(bound: Any, previous: float, place: str = "keep_if") -> float:
    """Compute a bound: a number, or one relative to `previous`. Raises `ConfigError` for anything else."""
    match bound:
        case bool():
            pass
        case int() | float() if math.isfinite(bound):
            return float(bound)
        case str() if found := PREVIOUS.fullmatch(bound.strip()):
            sign, number = found.groups()
            return previous + float(f"{sign}{number}" if sign else 0.0)
    raise ConfigError(f"'{place}' must be {WANTED}, not {bound!r}")


def measured(name: str, metrics: Mapping[str, float]) -> float:
    """Look a metric up."""
    if name not in metrics:
        hint = nearest(name, metrics) or f"there are {', '.join(sorted(metrics)) or 'none'}"
        raise ConfigError(f"keep_if: the evaluation has no metric '{name}'; {hint}")
    return metrics[name]
