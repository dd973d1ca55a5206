"""Rewards and labels from columns of the data: of a row, or of the two answers of a pair."""

from __future__ import annotations

from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import number, unpacked
from mmrl.data.row_fields import has_content
from mmrl.rewards.adapters import per_outcome


@reward
@per_outcome
def column_value(prompt: Prompt, outcome: Outcome, *, column: str) -> float | None:
    """Read a label (a value for other pieces) from a column of the row; None if the row lacks the column.

    A label is not added to the reward, so set `weight: 0`. Advantage functions read it by its name, e.g. as
    a predicted value (`shrunk_mean`) or a difficulty (`scale_by`). `ValueError` for other than a number.
    """
    value = prompt.columns.get(column)
    if not has_content(value):
        return None
    try:
        return number(value, column)
    except ValueError as error:
        raise ValueError(
            f"prompt '{prompt.uid}' has {value!r} in the column '{column}', which is no number"
        ) from error


@reward
@per_outcome
def pair_column(prompt: Prompt, outcome: Outcome, *, column: str) -> float | None:
    """Read a preference pair's label (chosen and rejected value) from a column; None without a value.

    The column has the label of the chosen and of the rejected answer, `[4, 2]`, or their difference as a
    number, such as TRL's `margin`: above 0 the chosen answer is better, below 0 the rejected one, 0 is a tie.
    Numbers may be texts, as in CSV cells. Raises `ValueError` for another value, and for an answer that is
    not one of a pair.
    """
    value, preferred = unpacked(prompt.columns.get(column)), outcome.recorded.get("preferred")
    if not has_content(value):
        return None
    if preferred is None:
        raise ValueError(f"prompt '{prompt.uid}' has no pair of a chosen and a rejected answer")
    sides = value if isinstance(value, list | tuple) else [value]
    try:
        numbers = [number(side, column) for side in sides]
        chosen, rejected = numbers if sides is value else (numbers[0] / 2, -numbers[0] / 2)
    except ValueError as error:
        raise ValueError(
            f"prompt '{prompt.uid}' has {value!r} in the column '{column}'; wanted a number, or a list of "
            "the numbers of the chosen and the rejected answer"
        ) from error
    return chosen if preferred else rejected
