"""From names in a config to pieces that can be called: options are checked, schedules followed, random
streams handed out."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, Taken, is_number, is_whole, marks
from mmrl.config.registry import HOMES, Entry, Needs, check_options, find
from mmrl.config.schema import ConfigError, Piece, as_piece, convert
from mmrl.core.protocols import Observer
from mmrl.core.rng import Stream
from mmrl.core.types import Clock

# Pieces of these kinds are made once, from what they wrap; all others are functions that are called again and
# again.
MADE = {
    "policy", "data", "sampler", "engine", "reference", "objective", "builder", "likelihood", "family",
    "tracker",
}  # fmt: skip
LOADED = MADE - {"objective", "likelihood", "family"} | {"reward"}  # their errors may be of files and models
T = TypeVar("T")
FILLED = ("generator", "stream")  # options that the run fills, never a config


@dataclass
class Bound:
    """A function with its options. An option that follows a schedule changes when the clock ticks."""

    entry: Entry
    function: Callable
    options: dict[str, Any]
    stream: Stream
    weight: float = 1.0
    label: str = ""
    call: Mapping[str, Any] = field(
        default_factory=dict
    )  # settings of whoever calls it: time-outs, error policies

    def __call__(self, *given: Any) -> Any:
        drawn = {}
        if "generator" in self.entry.options and not inspect.isclass(self.entry.target):
            drawn["generator"] = self.stream.generator(self.entry.full_name)
        return self.function(*given, **self.options, **drawn)

    @property
    def name(self) -> str:
        """Name the piece in metrics: its label, or its name without its package."""
        return self.label or self.entry.name

    @property
    def needs(self) -> Needs:
        """Tell what the piece reads, given its options. The current pass can answer for `against: old`,
        unless more than log-probabilities is asked of it."""
        default = self.entry.options.get("against")
        against = self.options.get("against", default.default if default else "old")
        asked = against != "old" or self.entry.of_others
        named = {against: self.entry.of_others} if asked else {}
        return self.entry.needs | Needs(others=named)


class Pieces:
    """Makes pieces, and remembers which of them follow a schedule or have a memory."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.made: dict[str, Any] = {}  # what may have a memory, by a name that is the same in every run
        self.entries: list[Entry] = []  # all pieces that were looked up
        self._scheduled: list[tuple[Callable[[str, Any], None], str, _Follows]] = []

    def make(self, kind: str, piece: Piece, *given: Any, place: str = "") -> Any:
        """Find a piece, check its options and bind it; pieces that wrap something are made at once."""
        place = place or kind
        entry, options, call = self._resolve(kind, piece, place)
        follows = {name: value for name, value in options.items() if isinstance(value, _Follows)}
        options = {name: value.first if name in follows else value for name, value in options.items()}
        if "stream" in entry.options:
            options["stream"] = self.stream
        if kind in MADE:
            target = self.made[place] = _construct(entry, given, options, place)
            setter = lambda name, value: setattr(target, name, value)
        elif inspect.isclass(entry.target):
            function = self.made[place] = _construct(entry, (), options, place)
            target = Bound(entry, function, {}, self.stream, **call)
            setter = lambda name, value: setattr(function, name, value)
        else:
            target = Bound(entry, entry.target, options, self.stream, **call)
            setter = options.__setitem__
        self._scheduled += [(setter, name, value) for name, value in follows.items()]
        return target

    def prompts(self, piece: Piece, place: str) -> Sequence[Any]:
        """Read a data set, which must hold a prompt."""
        data = self.make("data", piece, place=place)
        if not len(data):
            raise ConfigError(f"{place}: '{piece.name}' has no prompts: {dict(piece.options)}")
        return data

    def number(self, value: Any, wanted: Any, place: str) -> Callable[[Clock], float] | float:
        """Read a number in the range of a type, or the schedule it follows."""
        if not isinstance(value, Mapping):
            return convert(value, wanted, place)
        schedule = self.make("schedule", as_piece(value, place), place=place)
        hints = _hints(schedule.entry)
        for name, given in value.items():
            if marks(hints.get(name), Taken) and not isinstance(given, Mapping):
                _fit(given, wanted, f"{place}.{name}")
        return _Follows(schedule, wanted, place)

    @property
    def observers(self) -> dict[str, Observer]:
        """List the pieces with a memory, by the place that made them."""
        return self.that_are(Observer)

    def that_are(self, protocol: type[T]) -> dict[str, T]:
        """List the pieces that follow a runtime-checkable protocol, by the place that made them."""
        return {place: thing for place, thing in self.made.items() if isinstance(thing, protocol)}

    def tick(self, clock: Clock) -> None:
        """Let every option that follows a schedule take its value."""
        for setter, name, follows in self._scheduled:
            setter(name, follows(clock))

    def check(self, kind: str, piece: Piece, place: str = "") -> Entry:
        """Check a piece and everything inside it without making anything."""
        return self._resolve(kind, piece, place or kind)[0]

    def require_packages(self) -> None:
        """Refuse pieces whose packages are not installed, before anything is loaded or measured."""
        for entry in self.entries:
            for package, extra in entry.packages.items():
                if not _installed(package):
                    raise ConfigError(
                        f"{entry.kind} '{entry.full_name}' needs the package {package}, which is not "
                        f"installed: pip install 'mmrl[{extra}]'"
                    )

    def name(self, kind: str, piece: Piece, place: str = "") -> Bound:
        """Check a piece that is called, and give it under its name and weight; a class is not made, so
        nothing is loaded."""
        entry, options, call = self._resolve(kind, piece, place or kind)
        return Bound(entry, entry.target, options, self.stream, **call)

    def _resolve(self, kind: str, piece: Piece, place: str) -> tuple[Entry, dict[str, Any], dict[str, Any]]:
        options = dict(piece.options)
        call = {}
        if kind in CALLED_WITH:
            call = {
                name: convert(options.pop(name), wanted, f"{place}.{name}")
                for name, wanted in CALLED_WITH[kind].items()
                if name in options
            }
        try:
            entry = find(kind, piece.name)
            check_options(entry, options)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error
        self.entries.append(entry)
        hints = _hints(entry)
        _refuse_reversed(entry, hints, options, place)
        filled = {
            name: self._option(name, value, hints.get(name, Any), f"{place}.{name}")
            for name, value in options.items()
        }
        for name, parameter in entry.options.items():
            if isinstance(parameter.default, Piece) and name not in filled:
                filled[name] = self.make(name, parameter.default, place=f"{place}.{name}")
        own = {key: call.pop(key) for key in ("weight", "label") if key in call}
        return entry, filled, {**own, "call": call} if call else own

    def _option(self, name: str, value: Any, wanted: Any, place: str) -> Any:
        if name in FILLED:
            raise ConfigError(f"'{place}' is filled by the run; leave it out")
        if name in HOMES:
            if isinstance(value, Sequence) and not isinstance(value, str):
                return tuple(
                    self.make(name, as_piece(item, place), place=f"{place}[{i}]")
                    for i, item in enumerate(value)
                )
            optional = wanted is Any or type(None) in typing.get_args(wanted)
            if value is None and optional:
                return None
            return self.make(name, as_piece(value, place), place=place)
        if isinstance(value, Mapping) and "name" in value and is_number(wanted):
            return self.number(value, wanted, place)
        return convert(value, wanted, place)


CALLED_WITH = {
    "reward": {
        "weight": float,
        "label": str,
        "timeout": PositiveFloat,  # seconds
        "on_error": Literal["raise", "skip"],
        "retries": NonNegativeInt,
        "on_absent": Literal["raise", "warn"],
    },
    "compare": {"weight": float},
}


@dataclass
class _Follows:
    """An option that follows a schedule, rounded where it takes whole numbers only. Every value is checked
    against the range of the option."""

    schedule: Bound
    wanted: Any
    place: str
    first: float = field(init=False)

    def __post_init__(self) -> None:
        self.first = self(Clock())

    def __call__(self, clock: Clock) -> float:
        try:
            return _fit(self.schedule(clock), self.wanted, self.place)
        except (ValueError, ArithmeticError) as error:
            name = self.schedule.entry.full_name
            raise ConfigError(f"{self.place}: schedule '{name}' at step {clock.step}: {error}") from error


def _installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _hints(entry: Entry) -> Mapping[str, Any]:
    """Read the types of a piece's options."""
    target = entry.target
    if inspect.isclass(target) and "__dataclass_fields__" not in vars(target):
        target = target.__init__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError):  # somebody else's function may name types that are not imported
        return {}


def _fit(value: Any, wanted: Any, place: str) -> float:
    """Bring what a schedule gives into the type and the range of an option."""
    value = convert(value, float, place)
    return convert(round(value) if is_whole(wanted) else value, wanted, place)


def _construct(entry: Entry, given: Sequence[Any], options: Mapping[str, Any], place: str) -> Any:
    """Make a piece that is a class. What it says about its options is said with its place."""
    try:
        inspect.signature(entry.target).bind(*given, **options)
    except TypeError as error:
        raise ConfigError(f"{place}: '{entry.full_name}' is no {entry.kind}: {error}") from error
    try:
        return entry.target(*given, **options)
    except ConfigError:
        raise
    except ValueError as error:
        if entry.kind in LOADED:
            raise
        raise ConfigError(f"{place}: {error}") from error


def _refuse_reversed(entry: Entry, hints: Mapping[str, Any], options: Mapping[str, Any], place: str) -> None:
    """Refuse a lower bound above its upper bound: options that are marked with `AtMost`."""
    values = {name: p.default for name, p in entry.options.items()} | options
    for name in entry.options:
        for mark in marks(hints.get(name), AtMost):
            low, high = values[name], values[mark.option]
            if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
                raise ConfigError(f"'{place}.{name}' must be at most '{mark.option}', {high!r}, not {low!r}")
