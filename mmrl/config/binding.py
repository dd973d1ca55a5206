"""Binding: names in a configuration become callables with checked options, schedules and random streams."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, Taken, is_number, is_whole, marks
from mmrl.config.registry import HOMES, LOADED, MADE, Entry, Needs, check_options, find
from mmrl.config.schema import ConfigError, Piece, Scheduled, as_piece, convert, each, held_fields
from mmrl.core.protocols import Observer
from mmrl.core.rng import Stream
from mmrl.core.types import Clock

T = TypeVar("T")
FILLED = ("generator", "stream")  # options that the run fills, never a configuration

# Keys of a piece that are settings of its caller and no options of the piece itself.
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
class Bound:
    """A function with its options; those that follow a schedule change at every tick of the clock."""

    entry: Entry
    function: Callable
    options: dict[str, Any]
    stream: Stream
    weight: float = 1.0
    label: str = ""
    call: Mapping[str, Any] = field(default_factory=dict)  # settings of its caller: time-outs, error policies

    def __call__(self, *arguments: Any) -> Any:
        random = {}
        if "generator" in self.entry.options and not inspect.isclass(self.entry.target):
            random["generator"] = self.stream.generator(self.entry.full_name)
        return self.function(*arguments, **self.options, **random)

    @property
    def name(self) -> str:
        """The name in metrics: the label, or else the name without its package."""
        return self.label or self.entry.name

    @property
    def needs(self) -> Needs:
        """What the piece reads with its options.

        Log-probabilities of `old` are those of the current pass, so they are no need; further outputs are.
        """
        default = self.entry.options.get("against")
        against = self.options.get("against", default.default if default else "old")
        needed = against != "old" or self.entry.of_others
        return self.entry.needs | Needs(others={against: self.entry.of_others} if needed else {})


class Pieces:
    """Checks and makes pieces, and records which of them have state or follow a schedule."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.made: dict[str, Any] = {}  # objects that may have state, by place: the same name in every run
        self.entries: list[Entry] = []  # of all pieces that were looked up
        self._scheduled: list[tuple[Callable[[str, Any], None], str, _Follows]] = []

    def make(self, kind: str, piece: Piece, *wrapped: Any, place: str = "") -> Any:
        """Find a piece, check its options and bind it; objects are made, around what they wrap."""
        place = place or kind
        entry, options, call = self._resolve(kind, piece, place)
        follows = {name: value for name, value in options.items() if isinstance(value, _Follows)}
        options = {name: value.first if name in follows else value for name, value in options.items()}
        if "stream" in entry.options:
            options["stream"] = self.stream
        if kind in MADE:
            target = self.made[place] = _construct(entry, wrapped, options, place)
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
        """Read a data set; one without prompts is an error."""
        data = self.make("data", piece, place=place)
        if not len(data):
            raise ConfigError(f"{place}: '{piece.name}' has no prompts: {dict(piece.options)}")
        return data

    def number(self, value: Any, wanted: Any, place: str) -> Callable[[Clock], float] | float:
        """Convert a number to a type with a range, or bind the schedule that gives it."""
        if not isinstance(value, Mapping):
            return convert(value, wanted, place)
        schedule = self.make("schedule", as_piece(value, place), place=place)
        hints = _hints(schedule.entry)
        for name, option in value.items():
            if marks(hints.get(name), Taken) and not isinstance(option, Mapping):
                _fit(option, wanted, f"{place}.{name}")
        return _Follows(schedule, wanted, place)

    @property
    def observers(self) -> dict[str, Observer]:
        """List the pieces with a memory, by the place that made them."""
        return self.that_are(Observer)

    def that_are(self, protocol: type[T]) -> dict[str, T]:
        """List the pieces that follow a runtime-checkable protocol, by the place that made them."""
        return {place: thing for place, thing in self.made.items() if isinstance(thing, protocol)}

    def tick(self, clock: Clock) -> None:
        """Set every option that follows a schedule to its value at a step."""
        for setter, name, follows in self._scheduled:
            setter(name, follows(clock))

    def make_field(self, config: Any, place: str, *wrapped: Any) -> Any:
        """Make what a field of a configuration names: a piece, a list of pieces or a mapping.

        Args:
            config: A configuration dataclass.
            place: The dotted name of the field: `report.checks`.
            wrapped: What every piece of the field takes first, such as the policy for references.
        """
        mark, value = next((mark, value) for mark, value, name in held_fields(config) if name == place)
        made = {name: self.make(mark.name, piece, *wrapped, place=name) for piece, name in each(value, place)}
        if isinstance(value, Piece):
            return made[place]
        if isinstance(value, Mapping):
            return dict(zip(value, made.values(), strict=True))
        return list(made.values())

    def check_all(self, config: Any) -> dict[str, Any]:
        """Check every piece that a configuration names; those that load nothing are made.

        Returns what `make` or `name` return, by the places of the pieces: `objective`, `rewards[0]`.
        """
        checked = {}
        for mark, value, field_name in held_fields(config):
            if isinstance(mark, Scheduled):
                self.number(value, mark.wanted, field_name)
                continue
            for piece, place in each(value, field_name):
                make = self.name if mark.name in LOADED else self.make
                checked[place] = make(mark.name, piece, place=place)
                if mark.on and checked[place].entry.on not in ("", mark.on):
                    raise ConfigError(
                        f"{place}: the {mark.name} '{piece.name}' runs on {checked[place].entry.on}, "
                        f"but those of `{field_name}` run on {mark.on}"
                    )
        return checked

    def check(self, kind: str, piece: Piece, place: str = "") -> Entry:
        """Check a piece and everything inside it without making it."""
        return self.name(kind, piece, place).entry

    def name(self, kind: str, piece: Piece, place: str = "") -> Bound:
        """Check a piece like `check`; the result has its name, weight and caller's settings."""
        entry, options, call = self._resolve(kind, piece, place or kind)
        return Bound(entry, entry.target, options, self.stream, **call)

    def require_packages(self) -> None:
        """Raise if a piece that was looked up needs a package that is not installed."""
        for entry in self.entries:
            for package, extra in entry.packages.items():
                if not _installed(package):
                    raise ConfigError(
                        f"{entry.kind} '{entry.full_name}' needs the package {package}, which is not "
                        f"installed: pip install 'mmrl[{extra}]'"
                    )

    def _resolve(self, kind: str, piece: Piece, place: str) -> tuple[Entry, dict[str, Any], dict[str, Any]]:
        """Look up a piece; returns its entry, its converted options and the arguments of its `Bound`."""
        options = dict(piece.options)
        call = {
            name: convert(options.pop(name), wanted, f"{place}.{name}")
            for name, wanted in CALLED_WITH.get(kind, {}).items()
            if name in options
        }
        try:
            entry = find(kind, piece.name)
            check_options(entry, options)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error
        self.entries.append(entry)
        hints = _hints(entry)
        _check_order(entry, hints, options, place)
        converted = {
            name: self._option(name, value, hints.get(name, Any), f"{place}.{name}")
            for name, value in options.items()
        }
        for name, parameter in entry.options.items():
            if isinstance(parameter.default, Piece) and name not in converted:
                converted[name] = self.make(name, parameter.default, place=f"{place}.{name}")
        own = {key: call.pop(key) for key in ("weight", "label") if key in call}
        return entry, converted, {**own, "call": call} if call else own

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


@dataclass
class _Follows:
    """An option that follows a schedule: rounded where it is a whole number, checked against its range."""

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
    """The type annotations of the options of a piece."""
    target = entry.target
    if inspect.isclass(target) and "__dataclass_fields__" not in vars(target):
        target = target.__init__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError):  # a function of another package may name types that are not imported
        return {}


def _fit(value: Any, wanted: Any, place: str) -> float:
    """Convert a value of a schedule to the type of an option."""
    value = convert(value, float, place)
    return convert(round(value) if is_whole(wanted) else value, wanted, place)


def _construct(entry: Entry, wrapped: Sequence[Any], options: Mapping[str, Any], place: str) -> Any:
    """Make a piece that is a class; an error about its options names its place."""
    try:
        inspect.signature(entry.target).bind(*wrapped, **options)
    except TypeError as error:
        raise ConfigError(f"{place}: '{entry.full_name}' is no {entry.kind}: {error}") from error
    try:
        return entry.target(*wrapped, **options)
    except ConfigError:
        raise
    except ValueError as error:
        if entry.kind in LOADED:
            raise
        raise ConfigError(f"{place}: {error}") from error


def _check_order(entry: Entry, hints: Mapping[str, Any], options: Mapping[str, Any], place: str) -> None:
    """Raise if an option is above the option that its mark `AtMost` names."""
    values = {**{name: p.default for name, p in entry.options.items()}, **options}
    for name in entry.options:
        for mark in marks(hints.get(name), AtMost):
            low, high = values[name], values[mark.option]
            if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
                raise ConfigError(f"'{place}.{name}' must be at most '{mark.option}', {high!r}, not {low!r}")
