"""Gates: conditions on a stage's evaluation that must hold before the next stage starts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.config.loading import ConfigError, nearest
from mmrl.config.plain import as_list
from mmrl.config.schema import convert

HELD_OUT = "eval_"  # prefix of the metrics of an evaluation
PREVIOUS = re.compile(r"previous(?:\s*([+-])\s*(\d+(?:\.\d*)?(?:e-?\d+)?))?")
WANTED = "a number, or `previous` with a number added or taken away: previous - 0.01"


@dataclass(frozen=True)
class Gate:
    """A condition on the last evaluation of a stage, from the stage's key `keep_if`.

    Args:
        of: Name of the metric in metrics.jsonl, such as `eval_mean_iou`.
        not_below: Lower bound of the metric: a number or an expression such as `previous - 0.01`, where
            `previous` is the metric of the stage whose model this stage started from. None: no bound.
        not_above: Upper bound of the metric, in the same form.
    """

    of: str
    not_below: Any = None
    not_above: Any = None

    @property
    def compares(self) -> bool:
        """Whether a bound of this gate refers to the metric of the earlier stage (`previous`)."""
        return any(isinstance(bound, str) for bound in (self.not_below, self.not_above))

    def refusal(self, after: Mapping[str, float], before: Mapping[str, float]) -> str:
        """Return the reason why the metrics after a stage fail the gate; empty if the metrics pass.

        `before` has the metrics of the earlier stage. Raises `ConfigError` if a needed metric is missing.
        """
        value = measured(self.of, after)
        for words, bound, sign in (("not below", self.not_below, 1), ("not above", self.not_above, -1)):
            if bound is None:
                continue
            limit = bound_of(bound, measured(self.of, before) if isinstance(bound, str) else math.nan)
            if not sign * value >= sign * limit:  # NaN fails the gate
                spelled = f"{bound} = {limit:.6g}" if isinstance(bound, str) else f"{limit:.6g}"
                return f"{self.of} is {value:.6g}, and keep_if wants it {words} {spelled}"
        return ""


def gates_of(raw: Any, place: str) -> tuple[Gate, ...]:
    """Parse `keep_if`: one mapping or a list of mappings. Raises `ConfigError` for anything else."""
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
    """Evaluate a bound: a number, or a text relative to `previous`. Raises `ConfigError` otherwise."""
    match bound:
        case bool():
            pass
        case int() | float() if math.isfinite(bound):
            return float(bound)
        case str() if relative := PREVIOUS.fullmatch(bound.strip()):
            sign, number = relative.groups()
            return previous + float(f"{sign}{number}" if sign else 0.0)
    raise ConfigError(f"'{place}' must be {WANTED}, not {bound!r}")


def measured(name: str, metrics: Mapping[str, float]) -> float:
    """Return a metric by name; raises `ConfigError` if the evaluation has none of that name."""
    if name not in metrics:
        hint = nearest(name, metrics) or f"there are {', '.join(sorted(metrics)) or 'none'}"
        raise ConfigError(f"keep_if: the evaluation has no metric '{name}'; {hint}")
    return metrics[name]
