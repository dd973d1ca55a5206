"""Binding of names in a configuration to callables with checked options, schedules and random streams."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mmrl.config.loading import ConfigError, UnknownKey
from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, Taken, is_number, is_whole, marks
from mmrl.config.registry import FACTORIES, HOMES, LOADED, MADE, Entry, Needs, find, import_name, leaves_form
from mmrl.config.schema import Kind, Piece, Scheduled, as_piece, convert, each, held_fields
from mmrl.config.staleness import CORRECTION, lacks_correction
from mmrl.core.protocols import Stateful
from mmrl.core.types import Clock

if TYPE_CHECKING:
    from mmrl.core.rng import Stream

T = TypeVar("T")
# Options that the run sets; a configuration must leave them out.
FILLED = ("generator", "recipe", "stream", "train_prompts")
WORKERS = "mmrl.runtime.workers:workers_of"  # a path, because config must not import runtime
CALLED = {"label": str, "timeout": PositiveFloat, "retries": NonNegativeInt}  # `timeout` in seconds
TOOL = {**CALLED, "on_error": Literal["tell", "skip", "raise"]}
# Keys beside a piece's options that configure calls of the piece, such as `timeout`.
CALLED_WITH = {
    "reward": {
        "weight": float,
        **CALLED,
        "on_error": Literal["raise", "skip"],
        "on_absent": Literal["raise", "warn"],
        "where": Mapping[str, Any],  # score only prompts with these column values
        "at": str,  # turns to score: `last` (default), `every`, or turns with a `tag` or `tag=word`
        "workers": Mapping[str, Any],  # settings of the Ray actors that compute the reward
    },
    "compare": {"weight": float},
    **dict.fromkeys(("tool", "environment"), TOOL),  # an environment's `retries` are of its method `reset`
}


@dataclass
class Bound:
    """A function with its options. Options with a schedule get a new value at every step."""

    entry: Entry
    function: Callable
    options: dict[str, Any]
    stream: Stream
    weight: float = 1.0
    label: str = ""
    call: Mapping[str, Any] = field(default_factory=dict)  # call settings, such as `timeout`

    def __call__(self, *arguments: Any) -> Any:
        random = {}
        # Create a new generator per call, to make draws reproducible. Classes use `stream` instead.
        if "generator" in self.entry.options and not inspect.isclass(self.entry.target):
            random["generator"] = self.stream.generator(self.entry.full_name)
        return self.function(*arguments, **self.options, **random)

    @property
    def name(self) -> str:
        """The name in metrics: the label, or else the name of the piece without its package."""
        return self.label or self.entry.name

    @property
    def needs(self) -> Needs:
        """The inputs that the piece needs with its options, including the needs of its inner pieces.

        The forward pass that trains the policy also gives the log-probabilities of `old`, the policy before
        the update, so only other outputs of `old` are listed.
        """
        default = self.entry.options.get("against")
        against = self.options.get("against", default.default if default else "old")
        needed = against != "old" or self.entry.of_others
        own = self.entry.needs | Needs(others={against: self.entry.of_others} if needed else {})
        values = (v if type(v) is tuple else (v,) for v in self.options.values())
        inner = (piece.needs for pieces in values for piece in pieces if type(piece) is Bound)
        return reduce(Needs.__or__, inner, own)


@dataclass(frozen=True)
class Recipe:
    """Everything that another process needs to rebuild an engine."""

    policy: Piece
    engines: tuple[Piece, ...]  # the wrapped engines, innermost first
    seed: int
    stage: int
    remembering: tuple[str, ...]  # names of stateful engines
    clock: Callable[[], Clock]  # returns the inputs of schedules at this step
    max_staleness: int = 0


@dataclass(frozen=True)
class Elsewhere:
    """A reward that runs in Ray actors: everything that an actor needs to rebuild and call it."""

    name: str  # shown in errors
    piece: Piece
    policy: Piece | None  # policy of the run
    stream: Stream
    clock: Callable[[], Clock]

    def __call__(self, *arguments: Any) -> Any:
        """Raise `RuntimeError`, because the actors of the reward were not started."""
        raise RuntimeError(f"the reward '{self.name}' has `workers`, which were not started")


class Pieces:
    """Checks and builds the components ("pieces") of a configuration; lists stateful and scheduled ones."""

    def __init__(self, stream: Stream, policy: Piece | None = None, max_staleness: int = 0) -> None:
        self.stream, self.max_staleness, self.clock = stream, max_staleness, Clock()
        self.policy = policy  # policy of the run, which critics copy by default
        self.made: dict[str, Any] = {}  # built objects, by dotted path
        self.entries: list[Entry] = []  # registry entries of all pieces used
        self.answer_form: Callable[[], str | None] = lambda: None  # infers the answer form from the data
        self.policies: dict[str, Piece] = {}  # policies that were built, by dotted path
        self.engines: dict[str, Piece] = {}  # engines that were built, by dotted path
        self._scheduled: list[tuple[Callable[[str, Any], None], str, _Follows]] = []
        self.scheduled: dict[str, float] = {}  # current values of scheduled options, by dotted path

    def make(self, kind: str, piece: Piece, *wrapped: Any, place: str = "") -> Any:
        """Look up a piece, bind its checked options, and call a class with `wrapped` as first arguments."""
        place = place or kind
        bound = self.name(kind, piece, place)
        if leaves_form(bound.entry, bound.options) and (form := self.answer_form()):
            bound.options["form"], piece = form, replace(piece, options={**piece.options, "form": form})
        entry, options = bound.entry, bound.options
        follows = {name: value for name, value in options.items() if isinstance(value, _Follows)}
        options.update((name, value.first) for name, value in follows.items())
        if "stream" in entry.options:
            options["stream"] = self.stream
        if "recipe" in entry.options:
            options["recipe"] = self._recipe(place, bound.name)
        if "train_prompts" in entry.options:
            options["train_prompts"] = self.made.get("data", ())
        setter = options.__setitem__  # schedules change the options of the next calls
        if "workers" in bound.call:
            own = {name: value for name, value in piece.options.items() if name not in CALLED_WITH[kind]}
            policy = self.policy if entry.copies_policy else None
            parts = Piece(piece.name, own), policy, self.stream, lambda: self.clock
            bound.function, bound.options = Elsewhere(bound.name, *parts), {}
        elif kind in MADE or (inspect.isclass(entry.target) and kind not in FACTORIES):
            thing = self.made[place] = _construct(entry, wrapped, options, place)
            bound.function, bound.options = thing, {}
            setter = partial(setattr, thing)  # schedules change the attributes of an object
        self._scheduled += [(setter, name, value) for name, value in follows.items()]
        self.policies |= {place: piece} if kind == "policy" else {}
        self.engines |= {place: piece} if kind == "engine" else {}
        return bound.function if kind in MADE else bound

    def _recipe(self, place: str, name: str) -> Recipe:
        """Return the recipe to rebuild an engine in another process: its policy, and the engines it wraps."""
        chain = place.rpartition("[")[0]  # `rollout.engine` if `place` is `rollout.engine[1]`
        before = {at: piece for at, piece in self.engines.items() if at.startswith(f"{chain}[")}
        own = self.policies.get(f"{place.rpartition('.')[0]}.policy")  # a judge has its own policy
        if (policy := own or self.policies.get("policy")) is None:
            raise ConfigError(f"{place}: '{name}' makes a policy again, but no configuration made one")
        remembering = tuple(piece.name for at, piece in before.items() if at in self.that_are(Stateful))
        parts = policy, tuple(before.values()), self.stream.seed, self.stream.stage
        return Recipe(*parts, remembering, lambda: self.clock, self.max_staleness)

    def prompts(self, piece: Piece, place: str) -> Sequence[Any]:
        """Read a data set; raises `ConfigError` if it has no prompts."""
        data = self.make("data", piece, place=place)
        if not len(data):
            raise ConfigError(f"{place}: '{piece.name}' has no prompts: {dict(piece.options)}")
        return data

    def number(self, value: Any, wanted: Any, place: str) -> Callable[[Clock], float] | float:
        """Convert a number to the type `wanted` and check its range, or bind a schedule (a mapping)."""
        if not isinstance(value, Mapping):
            return convert(value, wanted, place)
        schedule = self.make("schedule", as_piece(value, place), place=place)
        hints = schedule.entry.hints
        for name, option in value.items():
            # A schedule has no fixed value to check; `_Follows` checks each result.
            if marks(hints.get(name), Taken) and not isinstance(option, Mapping):
                _fit(option, wanted, f"{place}.{name}")
        return _Follows(schedule, wanted, place)

    def that_are(self, protocol: type[T]) -> dict[str, T]:
        """Return the built objects that implement a runtime-checkable protocol, by dotted path."""
        return {place: thing for place, thing in self.made.items() if isinstance(thing, protocol)}

    def notes(self, *kinds: str) -> frozenset[str]:
        """Names of the engine's per-step records (`notes`) that pieces of these kinds read."""
        return frozenset().union(*(e.needs.notes for e in self.entries if e.kind in kinds))

    def tick(self, clock: Clock, values: Mapping[str, float] | None = None) -> None:
        """Set all scheduled options for a step; `values`, keyed by dotted path, replace the schedules."""
        self.clock = clock
        for setter, name, rule in self._scheduled:
            self.scheduled[rule.place] = value = rule(clock) if values is None else values[rule.place]
            setter(name, value)

    def make_field(self, config: Any, place: str, *wrapped: Any) -> Any:
        """Build the pieces in a field of a configuration: one piece, a list or a mapping.

        Args:
            config: A configuration dataclass.
            place: The dotted name of the field: `report.checks`.
            wrapped: The first arguments of every piece in the field, such as the policy for references.
        """
        mark, value = next((mark, value) for mark, value, name in held_fields(config) if name == place)
        built = [self.make(mark.name, piece, *wrapped, place=name) for piece, name in each(value, place)]
        if isinstance(value, Piece):
            return built[0]
        return dict(zip(value, built, strict=True)) if isinstance(value, Mapping) else built

    def check_all(self, config: Any) -> dict[str, Any]:
        """Check every piece in a configuration; pieces of kinds that load nothing are also built.

        Returns the results of `make` or `name` by dotted path: `objective`, `rewards[0]`.
        """
        checked = {}
        for mark, value, field_name in held_fields(config):
            match mark:
                case Scheduled(wanted=wanted):
                    self.number(value, wanted, field_name)
                case Kind(name=kind, on=on):
                    for piece, place in each(value, field_name):
                        bound = (self.name if kind in LOADED else self.make)(kind, piece, place=place)
                        if on and (other := bound.entry.on) not in ("", on):
                            error = f"{place}: the {kind} '{piece.name}' runs on {other}, but those of"
                            raise ConfigError(f"{error} `{field_name}` run on {on}")
                        checked[place] = bound
        return checked

    def check(self, kind: str, piece: Piece, place: str = "") -> Entry:
        """Check a piece and the pieces in its options without building it, and return its entry."""
        return self.name(kind, piece, place).entry

    def name(self, kind: str, piece: Piece, place: str = "") -> Bound:
        """Like `check`, but return the piece with converted options, weight, label and call settings."""
        place, options = place or kind, dict(piece.options)
        call = {
            name: convert(options.pop(name), wanted, f"{place}.{name}")
            for name, wanted in CALLED_WITH.get(kind, {}).items()
            if name in options
        }
        try:
            entry = find(kind, piece.name)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        num_entries = len(self.entries)
        self.entries.append(entry.given(options))
        _check_options(entry, entry.hints, options, place)
        options = {
            name: self._option(name, value, entry.hints.get(name, Any), f"{place}.{name}")
            for name, value in options.items()
            if not left_out(entry, name, value)
        }
        for name, parameter in entry.options.items():
            match parameter.default:
                case Piece() as default if name not in options:
                    options[name] = self.make(name, default, place=f"{place}.{name}")
                case None if name == "policy" and name not in options and self.policy and entry.copies_policy:
                    options[name] = self._inner(name, self.policy, f"{place}.{name}")
        if "workers" in call:
            call["workers"] = import_name(WORKERS)(entry, piece.options, call["workers"], place)
            if call["workers"].runtime_env:  # packages are installed by Ray, not here
                del self.entries[num_entries:]
            self.entries.append(replace(entry, packages={"ray": "ray"}))
        weight, label = call.pop("weight", 1.0), call.pop("label", "")
        bound = Bound(entry, entry.target, options, self.stream, weight, label, call)
        if self.max_staleness and place == "objective" and lacks_correction(entry, options, bound.needs):
            options["step_weight"] = (self._inner("step_weight", CORRECTION, "objective.step_weight[0]"),)
        return bound

    def _option(self, name: str, value: Any, wanted: Any, place: str) -> Any:
        """Convert an option to its type; an option named after a kind, such as `engine`, holds pieces."""
        match value:
            case {"name": _} if name not in HOMES and is_number(wanted):
                return self.number(value, wanted, place)
            case _ if name not in HOMES:
                return convert(value, wanted, place)
            case list() | tuple():
                kinds = inner if type(None) in (inner := typing.get_args(wanted)) else (wanted,)
                if any(typing.get_origin(kind) is Callable for kind in kinds):
                    raise ConfigError(f"{place} takes one {name}, not a list; write it without brackets")
                listed = each([as_piece(item, place) for item in value], place)
                built = tuple(self._inner(name, piece, at) for piece, at in listed)
                _check_names(name, built, place)
                return built
            case None if wanted is Any or type(None) in typing.get_args(wanted):
                return None
        return self._inner(name, as_piece(value, place), place)

    def _inner(self, kind: str, piece: Piece, place: str) -> Any:
        """Build the piece of an option; for kinds that load files, return a function that builds it once.

        So a data set gets a function that reads its inner data set, and a check reads no files.
        """
        if kind not in LOADED:
            return self.make(kind, piece, place=place)
        self.check(kind, piece, place)
        return cache(partial(self.make, kind, piece, place=place))

    def require_packages(self) -> None:
        """Raise if one of the configured pieces needs a package or a program that is not installed."""
        for entry in self.entries:
            for package, extra in entry.packages.items():
                # `find_spec` raises ValueError for a loaded module without spec, as a program can create one.
                loaded = package in sys.modules
                if (sys.modules[package] if loaded else importlib.util.find_spec(package)) is None:
                    raise ConfigError(
                        f"{entry.kind} '{entry.full_name}' needs the package {package}, which is not "
                        f"installed: pip install 'mmrl[{extra}]'"
                    )
            if entry.programs:
                entry.programs()


@dataclass
class _Follows:
    """An option's schedule, as a function of the clock that rounds for integers and checks the range."""

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


def _check_names(kind: str, built: Sequence[Any], place: str) -> None:
    """Raise `ConfigError` if two pieces in a list have the same name; the option `label` would rename one."""
    names = [piece.name for piece in built if isinstance(piece, Bound)]
    twice = [name for name in names if names.count(name) > 1]
    if twice and "label" in CALLED_WITH.get(kind, ()):
        raise ConfigError(f"{place}: two {kind}s are called '{twice[0]}'; give one of them a `label`")


def left_out(entry: Entry, name: str, value: Any) -> bool:
    """Whether `value` is None where the option's type does not allow None, so that it means the default."""
    wanted = entry.hints.get(name, Any)
    excludes_none = wanted is not Any and type(None) not in marks(wanted, type)
    return value is None and excludes_none and entry.options[name].default is not inspect.Parameter.empty


def _fit(value: Any, wanted: Any, place: str) -> float:
    """Convert the value of a schedule to the type of an option, rounded for integers."""
    value = convert(value, float, place)
    return convert(round(value) if is_whole(wanted) else value, wanted, place)


def _construct(entry: Entry, wrapped: Sequence[Any], options: Mapping[str, Any], place: str) -> Any:
    """Instantiate a piece that is a class; errors about its options name its dotted path."""
    try:  # bind first: a TypeError of the constructor itself is a bug
        inspect.signature(entry.target).bind(*wrapped, **options)
    except TypeError as error:
        raise ConfigError(f"{place}: '{entry.full_name}' is no {entry.kind}: {error}") from error
    try:
        return entry.target(*wrapped, **options)
    except ConfigError:
        raise
    except ValueError as error:
        if entry.kind in LOADED:  # may raise errors about data or weights
            raise
        raise ConfigError(f"{place}: {error}") from error


def _check_options(entry: Entry, hints: Mapping[str, Any], options: Mapping[str, Any], place: str) -> None:
    """Raise `ConfigError` for unknown or missing options, and for two bounds in the wrong order."""
    own, piece = entry.options, f"{entry.kind} '{entry.full_name}'"
    for name in options:
        if name not in own:
            takes = ", ".join(option for option in own if option not in FILLED) or "none"
            what = f"{place}: {piece} has no option '{name}'; it takes {takes}"
            raise UnknownKey(what, f"{place}.{name}", own, f"`mmrl list {entry.kind} {entry.full_name}`")
        if name in FILLED:
            raise ConfigError(f"'{place}.{name}' is filled by the run; leave it out")
    values = {**{name: p.default for name, p in own.items()}, **options}
    missing = [n for n, v in values.items() if v is inspect.Parameter.empty and n not in FILLED]
    if missing:
        raise ConfigError(f"{place}: {piece} needs the option{'s'[: len(missing) > 1]} {', '.join(missing)}")
    for name in own:
        for mark in marks(hints.get(name), AtMost):
            match values[name], values[mark.option]:  # None and schedules are not compared
                case int() | float() as low, int() | float() as high if low > high:
                    raise ConfigError(
                        f"'{place}.{name}' must be at most '{mark.option}', {high!r}, not {low!r}"
                    )
