"""Rewards and labels that the data know."""

from __future__ import annotations

from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome


@reward
@per_outcome
def column_value(prompt: Prompt, outcome: Outcome, *, column: str) -> float | None:
    """Read a number from a column of the row, for use as a label; None where the row has none there.

    With `weight: 0` the chain reads it by its name: a predicted value (`shrunk_mean`), a hardness
    (`scale_by`). `column` is the name. Raises `ValueError` for what is no number.
    """
    value = prompt.columns.get(column)
    match value:
        case None:
            return None
        case int() | float() if type(value) is not bool:
            return float(value)
    raise ValueError(f"prompt '{prompt.uid}' has {value!r} in the column '{column}', which is no number")
