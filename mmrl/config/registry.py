"""The registry: names in a configuration to decorated functions and classes ("pieces").

Every kind of piece has a home folder and a decorator, made by one line at the end of this file. A name
without a dot lives in `mmrl/<home>`, `vision.temporal_iou` in `vision/<home>`, `package.module:function`
anywhere. The first look-up of a kind imports the modules of its home: they import nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast, overload

from mmrl.config.reward_adapters import from_trl, is_trl
from mmrl.core.types import Unit

SCOPES = {
    "": "mmrl",
    "vision": "mmrl.vision",
    "diffusion": "mmrl.diffusion",
    "compression": "mmrl.compression",
}
# Wings of the core that hold homes besides the package itself.
WINGS = ("mmrl", "mmrl.diagnostics", "mmrl.reporting")

HOMES: dict[str, str] = {}  # kind to home folder
MADE: set[str] = set()  # kinds whose pieces are objects, made once; all others are functions
LOADED: set[str] = set()  # kinds whose pieces may read files or load a model when they are made
PIECES: dict[tuple[str, str], Entry] = {}
_IMPORTED: set[str] = set()


@dataclass(frozen=True)
class Needs:
    """What a piece reads besides the log-probabilities of the policy that learns.

    Args:
        unit: The smallest part of a batch that the piece can be computed on.
        extra: Further outputs of the policy that learns.
        others: Further outputs of other policies, by the name of the policy.
        notes: Values per step that the engine records.
    """

    unit: Unit = Unit.STEP
    extra: frozenset[str] = frozenset()
    others: Mapping[str, frozenset[str]] = field(default_factory=dict)
    notes: frozenset[str] = frozenset()

    def __or__(self, other: Needs) -> Needs:
        # Sorted, because every process has to ask for sharded weights in the same order.
        names = sorted({*self.others, *other.others})
        others = {
            name: self.others.get(name, frozenset()) | other.others.get(name, frozenset()) for name in names
        }
        return Needs(max(self.unit, other.unit), self.extra | other.extra, others, self.notes | other.notes)


@dataclass(frozen=True)
class Entry:
    """A registered piece: its kind, its name, the function or class, and what it declared."""

    kind: str
    scope: str
    name: str
    target: Callable
    needs: Needs = Needs()
    of_others: frozenset[str] = frozenset()  # what it reads of the policy that its option `against` names
    takes: tuple[str, ...] | None = None  # its options, where the signature does not list them
    packages: Mapping[str, str] = field(default_factory=dict)  # imported package to its extra
    on: str = ""  # when it runs, for kinds with stages

    @property
    def full_name(self) -> str:
        """The name in a configuration, with its scope."""
        return f"{self.scope}.{self.name}" if self.scope else self.name

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters by name."""
        parameters = inspect.signature(self.target).parameters
        return {
            name: p
            for name, p in parameters.items()
            if p.kind is inspect.Parameter.KEYWORD_ONLY and (self.takes is None or name in self.takes)
        }

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring in one line."""
        return " ".join((inspect.getdoc(self.target) or "").split("\n\n")[0].split())


# ---- registering

Target = TypeVar("Target", bound=Callable)
NOTHING: frozenset[str] = frozenset()


class Decorator(Protocol):
    """The decorator of a kind, which can be used with and without arguments."""

    @overload
    def __call__(self, target: Target, /) -> Target: ...

    @overload
    def __call__(
        self,
        *,
        unit: Unit = ...,
        extra: Set[str] = ...,
        others: Set[str] = ...,
        of_others: Set[str] = ...,
        notes: Set[str] = ...,
        packages: Mapping[str, str] = ...,
        on: str = ...,
    ) -> Callable[[Target], Target]: ...


def kind(
    name: str, home: str, *, made: bool = False, loads: bool = False, stages: tuple[str, ...] = ("",)
) -> Decorator:
    """Declare a kind of piece and return the decorator that registers a piece of it.

    Args:
        name: The kind, as fields of a configuration and `mmrl list` name it.
        home: The folder of its modules in every package.
        made: Whether a piece is an object that is made once, around what it wraps.
        loads: Whether making a piece may read files or load a model, so that checking must not make it.
        stages: When pieces may run; a piece declares one of these as `on`.
    """
    HOMES[name] = home
    MADE.update([name] if made else [])
    LOADED.update([name] if loads else [])

    def decorate(
        target: Callable | None = None,
        *,
        unit: Unit = Unit.STEP,
        extra: Set[str] = NOTHING,
        others: Set[str] = NOTHING,
        of_others: Set[str] = NOTHING,
        notes: Set[str] = NOTHING,
        packages: Mapping[str, str] | None = None,
        on: str = "",
    ) -> Callable:
        needs = Needs(unit, frozenset(extra), {n: frozenset(of_others) for n in others}, frozenset(notes))

        def enter(target: Callable) -> Callable:
            module = target.__module__
            package = next((s for s, home in SCOPES.items() if s and module.startswith(f"{home}.")), "")
            scope = package if module.partition(".")[0] == "mmrl" else module
            snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", target.__name__).lower()
            _enter(
                Entry(name, scope, snake_case, target, needs, frozenset(of_others), None, packages or {}, on)
            )
            return target

        if on not in stages:
            raise ValueError(
                f"a {name} declares `on`, one of {', '.join(filter(None, stages)) or 'none'}, not '{on}'"
            )
        return enter if target is None else enter(target)

    return cast(Decorator, decorate)


def _enter(entry: Entry) -> None:
    """Add an entry; a second piece of the same name from another file is an error that names both files."""
    known = PIECES.get((entry.kind, entry.full_name), entry)
    # A reward that is wrapped by `per_outcome` belongs to the file of the function inside.
    files = [inspect.getsourcefile(inspect.unwrap(piece.target)) for piece in (known, entry)]
    if files[0] != files[1]:
        raise ValueError(
            f"two pieces of kind '{entry.kind}' are called '{entry.full_name}': {files[0]} and {files[1]}"
        )
    PIECES[entry.kind, entry.full_name] = entry


# ---- looking up


def load_kind(kind: str) -> None:
    """Import every module in the homes of a kind."""
    for package in dict.fromkeys((*WINGS, *SCOPES.values())):
        home = f"{package}.{HOMES[kind]}"
        if home not in _IMPORTED and importlib.util.find_spec(package) and importlib.util.find_spec(home):
            module = importlib.import_module(home)
            for inside in pkgutil.iter_modules(getattr(module, "__path__", [])):
                importlib.import_module(f"{home}.{inside.name}")
            _IMPORTED.add(home)


def pieces(kind: str, on: str = "") -> list[Entry]:
    """List the pieces of a kind by name; with `on` only those that run then."""
    load_kind(kind)
    entries = [entry for (k, _), entry in PIECES.items() if k == kind and on in ("", entry.on)]
    return sorted(entries, key=lambda entry: entry.full_name)


def find(kind: str, name: str) -> Entry:
    """Look up a piece by its name; an unknown name is an error that suggests the nearest."""
    load_kind(kind)
    if ":" in name:
        return _foreign(kind, name)
    if (kind, name) in PIECES:
        return PIECES[kind, name]
    names = [entry.full_name for entry in pieces(kind)]
    near = difflib.get_close_matches(name, names, 1) or [n for n in names if n.split(".")[-1] == name][:1]
    hint = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(names) or 'none'}"
    raise ValueError(f"no {kind} is called '{name}'{hint}")


def _foreign(kind: str, name: str) -> Entry:
    """Import a function or class of another package: `package.module:function`."""
    module, _, attribute = name.partition(":")
    try:
        target = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever that module raises when it is imported
        raise ValueError(f"cannot import the {kind} '{name}': {type(error).__name__}: {error}") from error
    if not callable(target):
        raise ValueError(f"the {kind} '{name}' must be a function or a class, not {type(target).__name__}")
    known = [entry for (k, _), entry in PIECES.items() if k == kind and entry.target is target]
    if known:
        return known[0]
    if kind == "reward" and is_trl(target):
        # TRL's own keyword arguments come from the data, so none of them is an option.
        return Entry(kind, module, attribute, from_trl(target), takes=())
    return Entry(kind, module, attribute, target)


def check_options(entry: Entry, options: Mapping[str, Any]) -> None:
    """Raise unless the piece takes every option and no required one is missing."""
    known = entry.options
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"{entry.kind} '{entry.full_name}' has no option '{name}'; "
                f"it takes {', '.join(known) or 'none'}{hint}"
            )
    given = {*options, "generator", "stream"}
    missing = [
        name for name, p in known.items() if p.default is inspect.Parameter.empty and name not in given
    ]
    if missing:
        raise ValueError(
            f"{entry.kind} '{entry.full_name}' needs the option{'s'[: len(missing) > 1]} {', '.join(missing)}"
        )


# ---- the kinds

policy = kind("policy", "policies", made=True, loads=True)
data = kind("data", "datasets", made=True, loads=True)
sampler = kind("sampler", "samplers", made=True, loads=True)
engine = kind("engine", "engines", made=True, loads=True)
reward = kind("reward", "rewards", loads=True)
group_filter = kind("group_filter", "filters")
advantage = kind("advantage", "advantages")
objective = kind("objective", "objectives", made=True)
ratio = kind("ratio", "objectives")
surrogate = kind("surrogate", "objectives")
aggregation = kind("aggregation", "objectives")
step_weight = kind("step_weight", "objectives")
penalty = kind("penalty", "objectives")
implicit_reward = kind("implicit_reward", "objectives")
compare = kind("compare", "objectives")
schedule = kind("schedule", "schedules")
metric = kind("metric", "metrics")
reference = kind("reference", "references", made=True, loads=True)
transform = kind("transform", "transforms")
cache = kind("cache", "caches")
optimizer = kind("optimizer", "optimizers")
builder = kind("builder", "builders", made=True, loads=True)
visualization = kind("visualization", "visualizations")
likelihood = kind("likelihood", "likelihoods", made=True)
solver = kind("solver", "solvers")
family = kind("family", "model_families", made=True)
check = kind("check", "checks", stages=("data", "start", "training"))
memory_estimate = kind("memory_estimate", "memory_estimates")
cost = kind("cost", "costs")
tracker = kind("tracker", "trackers", made=True, loads=True)
