"""Example values for the required options of any registered piece, derived from its signature."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from mmrl.config.binding import FILLED
from mmrl.config.ranges import Range, marks
from mmrl.config.registry import HOMES, Entry

# A small piece of each kind that other pieces take as an option.
INNER = {
    "advantage": "group_center",
    "aggregation": "step_mean",
    "compare": "sigmoid",
    "engine": {"name": "tests.support.judging:Scripted"},
    "implicit_reward": "log_ratio",
    "objective": {"name": "comparison", "implicit_reward": "log_ratio", "compare": "sigmoid"},
    "surrogate": "clip",
}


def in_range(wanted: Any, value: float) -> float:
    """Return `value`, or the closest bound of the option's range."""
    for span in marks(wanted, Range):
        value = min(max(value, span.low), span.high)
    return value


def example(name: str, wanted: Any, label: str) -> Any:
    """Return a value of the annotated type. Strings become `label`: most name a reward, a tag or a column."""
    plain = typing.get_args(wanted)[0] if typing.get_origin(wanted) is typing.Annotated else wanted
    origin, inner = typing.get_origin(plain) or plain, typing.get_args(plain)
    if name in HOMES:
        return [INNER[name]] if origin is tuple else INNER[name]
    if origin is typing.Literal:
        return inner[0]
    if origin is tuple:
        return (example("", inner[0], label),)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {label: example("", inner[1], label)}
    by_type = {str: label, int: in_range(wanted, 2), float: in_range(wanted, 0.2), bool: True}
    if plain not in by_type:
        raise NotImplementedError(
            f"no example for the option '{name}' of the type {wanted}; add its type here"
        )
    return by_type[plain]


def required_options(entry: Entry, label: str) -> dict[str, Any]:
    """Return an example value of every option without a default."""
    empty = inspect.Parameter.empty
    names = [name for name, parameter in entry.options.items() if parameter.default is empty]
    return {name: example(name, entry.hints[name], label) for name in names if name not in FILLED}


def paper_options(entry: Entry) -> Mapping[str, Any]:
    """Read `CONTRACT_OPTIONS[name]` of the paper's own test, where the derived examples show nothing."""
    _, _, paper = entry.target.__module__.rpartition("mmrl.papers.")
    test = f"tests.papers.test_{paper}"
    if not paper or "." in paper or importlib.util.find_spec(test) is None:
        return {}
    return getattr(importlib.import_module(test), "CONTRACT_OPTIONS", {}).get(entry.full_name, {})
