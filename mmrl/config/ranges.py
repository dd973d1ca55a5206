"""Ranges of options as types: `temperature: PositiveFloat = 1.0` rejects 0 before anything is loaded.

A range is metadata of `Annotated`, so that functions can be called with plain numbers. NaN, infinities and
whole numbers beyond 64 bits are outside every range.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

LARGEST = 2**63 - 1  # largest value of int64 tensors


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `above` excludes `low` itself, and `below` excludes `high`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        over = value > self.low if self.above else value >= self.low
        # Comparisons with NaN are False, so no range contains it.
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        """Format the range for error messages, such as `more than 0 and at most 1`."""
        low = f"{'more than' if self.above else 'at least'} {self.low:g}" if self.low > -math.inf else ""
        high = f"{'less than' if self.below else 'at most'} {self.high:g}" if self.high < math.inf else ""
        return " and ".join(filter(None, (low, high)))


@dataclass(frozen=True)
class Ascending:
    """A list in ascending order, such as a lower and an upper bound."""

    def __contains__(self, value: Sequence[float]) -> bool:
        return list(value) == sorted(value)

    def __str__(self) -> str:
        return "in ascending order"


@dataclass(frozen=True)
class AtMost:
    """A number that must be at most the value of another option of the same piece, if both are given."""

    option: str

    def __str__(self) -> str:
        return f"at most `{self.option}`"


@dataclass(frozen=True)
class BelowGenerations:
    """A number of rollouts that must be below `rollout.num_generations`."""

    def __str__(self) -> str:
        return "less than `rollout.num_generations`"


@dataclass(frozen=True)
class DividesGenerations:
    """Numbers whose product must divide `rollout.num_generations`, such as the branches per tree level."""

    def __str__(self) -> str:
        return "with a product that divides `rollout.num_generations`"


@dataclass(frozen=True)
class TagName:
    """An option with outcome tags (a tag, a list, or a mapping's keys) that some piece must set."""

    def __str__(self) -> str:
        return "a tag of outcomes"


class Taken:
    """An option of a schedule that is a value of the scheduled option, and must be in that option's range."""

    def __str__(self) -> str:
        return "in the range of what follows"


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, above=True)]
NonNegativeFloat = Annotated[float, Range(0)]
FiniteFloat = Annotated[float, Range()]
Probability = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]  # a fraction above 0
ShareBelowOne = Annotated[float, Range(0, 1, below=True)]  # a fraction below 1, such as a momentum
Steps = NonNegativeInt | Annotated[float, Range(0, 1, above=True, below=True)]  # below 1: fraction of a run
TakenFloat = Annotated[float, Taken()]
TakenInt = Annotated[int, Taken()]
Tag = Annotated[str, TagName()]
Tags = Annotated[tuple[str, ...], TagName()]
TagWords = Annotated[Mapping[str, str], TagName()]  # maps a tag to a value


def is_number(wanted: Any) -> bool:
    """Whether a type annotation allows a number, so that the option can have a schedule."""
    return bool({int, float} & {*marks(wanted, type)})


def is_whole(wanted: Any) -> bool:
    """Whether a numeric type annotation allows only integers."""
    return float not in marks(wanted, type)


def marks(wanted: Any, kind: type | types.UnionType) -> list[Any]:
    """List the instances of `kind` in a type annotation: types and metadata, also in a union's members."""
    if typing.get_origin(wanted) in (Annotated, typing.Union, types.UnionType):
        return [mark for inner in typing.get_args(wanted) for mark in marks(inner, kind)]
    return [wanted] if isinstance(wanted, kind) else []


def bounds_of(wanted: Any) -> list[Range | Ascending]:
    """List the ranges in the metadata of a type annotation, which apply to the value as a whole."""
    _, *metadata = typing.get_args(wanted)
    return [mark for mark in metadata if isinstance(mark, Range | Ascending)]
