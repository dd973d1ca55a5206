"""Rewards and labels from columns of the data."""

from __future__ import annotations

from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome


@reward
@per_outcome
def column_value(prompt: Prompt, outcome: Outcome, *, column: str) -> float | None:
    """Read a number from a column of the row, for use as a label; None if the row has no such column.

    Set `weight: 0`. Advantage functions then read the label by its name, e.g. as a predicted value
    (`shrunk_mean`) or a difficulty (`scale_by`). Raises `ValueError` for a value that is not a number.
    """
    value = prompt.columns.get(column)
    if value is None:
        return None
    if isinstance(value, int | float) and type(value) is not bool:
        return float(value)
    raise ValueError(f"prompt '{prompt.uid}' has {value!r} in the column '{column}', which is no number")
