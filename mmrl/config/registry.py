"""The registry: names in a configuration to decorated functions and classes ("pieces").

Every kind of piece has a home folder and a decorator, made by one line at the end of this file. A name
without a dot lives in `mmrl/<home>`, `vision.temporal_iou` in `vision/<home>`, `package.module:function`
anywhere. The first look-up of a kind imports the modules of its home: they import nothing heavy. A name that
no home has is looked for in `mmrl/papers`, of which only the file that defines it is imported.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import typing
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast, overload

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.config.papers import import_papers, snake_case
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
FACTORIES: set[str] = set()  # kinds whose pieces are classes of objects that are made when they are called
LOADED: set[str] = set()  # kinds whose pieces may read files or load a model when they are made
PIECES: dict[tuple[str, str], Entry] = {}
_IMPORTED: set[str] = set()
NOTHING: frozenset[str] = frozenset()
# Functions of wings above this one, by name: they check what a model may call, and wrap rewards of TRL.
CHECKS = {
    "tool": "mmrl.vision.tools.declarations:check_tool",
    "environment": "mmrl.vision.tools.declarations:check_environment",
}
FROM_TRL = "mmrl.rewards.adapters:from_trl"
FORM_PACKAGE = "form=math:math_verify"  # of rewards that compare answers with targets


@dataclass(frozen=True)
class Needs:
    """What a piece reads besides the log-probabilities of the policy that learns."""

    unit: Unit = Unit.STEP  # the smallest part of a batch that it can be computed on
    outputs: frozenset[str] = frozenset()  # further outputs of the policy that learns
    others: Mapping[str, frozenset[str]] = field(default_factory=dict)  # outputs of other policies, by name
    notes: frozenset[str] = frozenset()  # values per step that the engine records
    tags: frozenset[str] = frozenset()  # tags of outcomes
    turns: bool = False  # the turns of a conversation, which others see as one answer
    every_turn: bool = False  # an outcome of every turn: with one of the last turn alone it does nothing

    def __or__(self, other: Needs) -> Needs:
        # Sorted, because every process has to ask for sharded weights in the same order.
        names = sorted({*self.others, *other.others})
        others = {name: self.others.get(name, NOTHING) | other.others.get(name, NOTHING) for name in names}
        outputs, notes = self.outputs | other.outputs, self.notes | other.notes
        tags = self.tags | other.tags
        turns, every_turn = self.turns or other.turns, self.every_turn or other.every_turn
        return Needs(max(self.unit, other.unit), outputs, others, notes, tags, turns, every_turn)


@dataclass(frozen=True)
class Entry:
    """A registered piece: its kind, its name, the function or class, and what it declared."""

    kind: str
    scope: str
    name: str
    target: Callable
    needs: Needs = Needs()
    of_others: frozenset[str] = (
        frozenset()
    )  # outputs that the piece reads of the policy named by its option `against`
    takes: tuple[str, ...] | None = None  # its options, where the signature does not list them
    # Imported package to its extra; "form=math:math_verify" is needed with that option alone.
    packages: Mapping[str, str] = field(default_factory=dict)
    on: str = ""  # when it runs, for kinds with stages
    copies_policy: bool = False  # whether its option `policy`, left out, is a model like the run's

    @property
    def full_name(self) -> str:
        """The name in a configuration, with its scope."""
        return f"{self.scope}.{self.name}" if self.scope else self.name

    @cached_property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """The keyword-only parameters by name."""
        parameters = inspect.signature(self.target).parameters
        return {
            name: p
            for name, p in parameters.items()
            if p.kind is inspect.Parameter.KEYWORD_ONLY and (self.takes is None or name in self.takes)
        }

    @cached_property
    def hints(self) -> Mapping[str, Any]:
        """The type annotations of the options."""
        target = self.target
        if inspect.isclass(target) and "__dataclass_fields__" not in vars(target):
            target = target.__init__
        try:
            return typing.get_type_hints(target, include_extras=True)
        except (NameError, TypeError):  # a function of another package may name types that are not imported
            return {}

    def given(self, options: Mapping[str, Any]) -> Entry:
        """Return the piece with the packages that it needs with these options."""
        needed = [(*name.rpartition(":")[::2], extra) for name, extra in self.packages.items()]
        named = {f"{option}={value}" for option, value in options.items()}
        return replace(self, packages={name: extra for only, name, extra in needed if only in {"", *named}})

    @property
    def sets_tags(self) -> frozenset[str]:
        """The tags that it sets on outcomes or prompts, declared by the decorator or a class attribute."""
        return frozenset(getattr(self.target, "sets_tags", NOTHING))

    @property
    def own_answer(self) -> Callable[..., Any] | None:
        """From a prompt and options of the reward by name to the answer that its target asks for."""
        return getattr(self.target, "own_answer", None)

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring in one line."""
        return " ".join((inspect.getdoc(self.target) or "").split("\n\n")[0].split())


# ---- registering

Target = TypeVar("Target", bound=Callable)


class Decorator(Protocol):
    """The decorator of a kind, which can be used with and without what `kind` lets a piece declare."""

    @overload
    def __call__(self, target: Target, /) -> Target: ...

    @overload
    def __call__(self, **declared: Any) -> Callable[[Target], Target]: ...


def kind(
    name: str,
    home: str,
    *,
    made: bool = False,
    loads: bool = False,
    factory: bool = False,
    stages: tuple[str, ...] = ("",),
) -> Decorator:
    """Declare a kind of piece and return the decorator that registers a piece of it.

    Args:
        name: The kind, as fields of a configuration and `mmrl list` name it.
        home: The folder of its modules in every package.
        made: Whether a piece is an object that is made once, around what it wraps.
        loads: Whether making a piece may read files or load a model, so that checking must not make it.
        factory: Whether a piece that is a class is called for new objects, instead of being made once.
        stages: When pieces may run; a piece declares one of these as `on`.

    A piece of `mmrl/papers` whose name begins with a package declares it: `@engine(scope="vision")`.
    """
    HOMES[name] = home
    MADE.update([name] if made else [])
    LOADED.update([name] if loads else [])
    FACTORIES.update([name] if factory else [])

    def decorate(
        target: Callable | None = None,
        *,
        unit: Unit = Unit.STEP,
        extra: Set[str] = NOTHING,
        others: Set[str] = NOTHING,
        of_others: Set[str] = NOTHING,
        notes: Set[str] = NOTHING,
        tags: Set[str] = NOTHING,
        sets_tags: Set[str] = NOTHING,
        turns: bool = False,
        every_turn: bool = False,
        packages: Mapping[str, str] = MappingProxyType({}),
        on: str = "",
        copies_policy: bool = False,
        own_answer: Callable[..., Any] | None = None,
        scope: str = "",
    ) -> Callable:
        of = {name: frozenset(of_others) for name in others}
        sets = frozenset(extra), of, frozenset(notes), frozenset(tags)
        needs = Needs(unit, *sets, turns or every_turn, every_turn)
        for option, value, allowed in (("on", on, stages), ("scope", scope, SCOPES)):
            if value not in allowed:
                known = ", ".join(filter(None, allowed)) or "none"
                raise ValueError(f"a {name} declares `{option}`, one of {known}, not '{value}'")

        def enter(target: Callable) -> Callable:
            module = target.__module__
            package = next((s for s, home in SCOPES.items() if s and module.startswith(f"{home}.")), scope)
            within = package if module.partition(".")[0] == "mmrl" else module
            _set_declared(target, sets_tags=frozenset(sets_tags), own_answer=own_answer)
            declared = needs, frozenset(of_others), None, packages, on, copies_policy
            entry = Entry(name, within, snake_case(target.__name__), target, *declared)
            known = PIECES.setdefault((name, entry.full_name), entry)
            # A reward that is wrapped by `per_outcome` belongs to the file of the function inside.
            files = [inspect.getsourcefile(inspect.unwrap(piece.target)) for piece in (known, entry)]
            if files[0] != files[1]:
                raise ValueError(
                    f"two pieces of kind '{name}' are called '{entry.full_name}': {files[0]} and {files[1]}"
                )
            PIECES[name, entry.full_name] = entry
            return target

        return enter if target is None else enter(target)

    return cast(Decorator, decorate)


def _set_declared(target: Callable, **declared: Any) -> None:
    """Set what a piece declares as attributes, so that classes that derive from it have them."""
    for name, value in declared.items():
        if value:
            setattr(target, name, value)


# ---- looking up


def pieces(kind: str, on: str = "") -> list[Entry]:
    """List the pieces of a kind by name, those of papers too; with `on` only those that run then."""
    _import_homes(kind)
    import_papers(kind)
    entries = [entry for (k, _), entry in PIECES.items() if k == kind and on in ("", entry.on)]
    return sorted(entries, key=lambda entry: entry.full_name)


def _import_homes(kind: str) -> None:
    """Import every module in the homes of a kind, once."""
    for package in dict.fromkeys((*WINGS, *SCOPES.values())):
        home = f"{package}.{HOMES[kind]}"
        # The package first: `find_spec` of what is inside a missing one raises.
        if home in _IMPORTED or not importlib.util.find_spec(package):
            continue
        if spec := importlib.util.find_spec(home):
            importlib.import_module(home)
            folders = spec.submodule_search_locations or []  # none where the home is a single file
            for inside in pkgutil.iter_modules(folders):
                importlib.import_module(f"{home}.{inside.name}")
        _IMPORTED.add(home)


def leaves_form(entry: Entry, options: Mapping[str, Any]) -> bool:
    """Return whether a reward leaves the form in which answers are compared (`form: null`) to the data."""
    form = entry.options.get("form") if FORM_PACKAGE in entry.packages else None
    return form is not None and form.default is None and options.get("form") is None


def is_trl(function: Callable) -> bool:
    """Whether a reward function has TRL's form: it takes `completions` or `environments`."""
    return not {"completions", "environments"}.isdisjoint(inspect.signature(function).parameters)


def import_name(name: str) -> Any:
    """Import what `package.module:attribute` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def find(kind: str, name: str) -> Entry:
    """Look up a piece by its name; an unknown name is an error that suggests the nearest.

    `package.module:function` is imported; such a piece needs no decorator.
    """
    _import_homes(kind)
    if (kind, name) not in PIECES and ":" not in name:
        import_papers(kind, name)
    if known := PIECES.get((kind, name)):
        return known
    module, colon, attribute = name.partition(":")
    if not colon:
        entries = {entry.full_name: entry for entry in pieces(kind)}
        near = difflib.get_close_matches(name, entries, 1) or [n for n in entries if n.split(".")[-1] == name]
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(entries) or 'none'}"
        raise ConfigError(f"no {kind} is called '{name}'; {hint}")
    try:
        there = objects.is_object(name)
        target = objects.get(name) if there else import_name(name)
        if callable(target):
            inspect.signature(target)  # of some types that are built in Python knows none
    except Exception as error:  # whatever that module raises when it is imported
        raise ConfigError(f"cannot import the {kind} '{name}': {type(error).__name__}: {error}") from error
    if not callable(target):
        raise ConfigError(f"the {kind} '{name}' must be a function or a class, not {type(target).__name__}")
    for (of_kind, _), entry in PIECES.items():  # the import may have registered it
        if of_kind == kind and entry.target is target:
            return entry
    if kind == "reward" and is_trl(target):
        # TRL's own keyword arguments come from the data, so none of them is an option.
        return Entry(kind, module, attribute, import_name(FROM_TRL)(target), takes=())
    if kind in CHECKS:
        import_name(CHECKS[kind])(target, name)
    return Entry(kind, module, attribute, target)


# ---- the kinds

policy = kind("policy", "policies", made=True, loads=True)
data = kind("data", "datasets", made=True, loads=True)
sampler = kind("sampler", "samplers", made=True, loads=True)
experience_update = kind("experience_update", "samplers")
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
stop_rule = kind("stop_rule", "stop_rules", made=True)
tracker = kind("tracker", "trackers", made=True, loads=True)
tool = kind("tool", "tools")
environment = kind("environment", "environments", factory=True)
game = kind("game", "games", made=True)
