"""The registry: maps names in a configuration to decorated functions and classes ("pieces").

Every kind of piece has a home folder and a decorator; one line at the end of this file defines both. The
piece `name` lives in `mmrl/<home>`, `vision.name` in `vision/<home>`, and `package.module:function` anywhere.
The first lookup of a kind imports all modules in its home, which must not import heavy packages. A name
without a home is searched in `mmrl/papers`; only the file that defines it is imported.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import typing
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast, overload

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.config.papers import import_papers, snake_case
from mmrl.core.reward_inputs import RewardInputs
from mmrl.core.types import Unit

SCOPES = {
    "": "mmrl",
    "vision": "mmrl.vision",
    "diffusion": "mmrl.diffusion",
    "compression": "mmrl.compression",
}
# Packages that are searched for home folders, besides those in `SCOPES`.
WINGS = ("mmrl", "mmrl.diagnostics", "mmrl.reporting")

HOMES: dict[str, str] = {}  # maps a kind of piece to the name of its home folder
MADE: set[str] = set()  # kinds whose pieces a run builds once, as objects; other pieces are functions
FACTORIES: set[str] = set()  # kinds whose classes are instantiated at every call, not once
LOADED: set[str] = set()  # kinds whose constructors may read files or load a model
PIECES: dict[tuple[str, str], Entry] = {}
_IMPORTED: set[str] = set()
NOTHING: frozenset[str] = frozenset()
# Import paths of functions in higher layers: checks of tools and environments, wrapper of TRL rewards.
CHECKS = {
    "tool": "mmrl.vision.tools.declarations:check_tool",
    "environment": "mmrl.vision.tools.declarations:check_environment",
}
FROM_TRL = "mmrl.rewards.adapters:from_trl"
FORM_PACKAGE = "form=math:math_verify"  # entry of `Entry.packages`: `form: math` needs math_verify


@dataclass(frozen=True)
class Needs:
    """The inputs of a piece besides the log-probabilities of the trained policy."""

    unit: Unit = Unit.STEP  # smallest part of a batch on which the piece can be computed
    outputs: frozenset[str] = frozenset()  # outputs of the trained policy besides `logp`
    # Maps the name of another policy to the outputs that the piece reads from it.
    others: Mapping[str, frozenset[str]] = field(default_factory=dict)
    notes: frozenset[str] = frozenset()  # values per step that the engine records
    tags: frozenset[str] = frozenset()  # tags of outcomes that the piece reads
    turns: bool = False  # reads single turns; other pieces get a conversation as one answer
    every_turn: bool = False  # needs an outcome per turn, not only for the last

    def __or__(self, other: Needs) -> Needs:
        # Sort the names, because all processes must gather sharded weights in the same order.
        names = sorted({*self.others, *other.others})
        others = {name: self.others.get(name, NOTHING) | other.others.get(name, NOTHING) for name in names}
        outputs, notes = self.outputs | other.outputs, self.notes | other.notes
        tags = self.tags | other.tags
        turns, every_turn = self.turns or other.turns, self.every_turn or other.every_turn
        return Needs(max(self.unit, other.unit), outputs, others, notes, tags, turns, every_turn)


@dataclass(frozen=True)
class Entry:
    """A registered piece: kind, name, function or class, and the declarations of its decorator."""

    kind: str
    scope: str
    name: str
    target: Callable
    needs: Needs = Needs()
    of_others: frozenset[str] = frozenset()  # outputs read from the model that the option `against` names
    takes: tuple[str, ...] | None = None  # names of options; None: all keyword-only parameters
    # Maps a package to the pip extra that has it; "form=math:math_verify" applies only with `form: math`.
    packages: Mapping[str, str] = field(default_factory=dict)
    on: str = ""  # stage at which the piece runs, for kinds with `stages`
    copies_policy: bool = False  # whether the option `policy` defaults to a copy of the run's policy
    programs: Callable[..., Any] | None = None  # raises, given the options, if a program is missing

    @property
    def full_name(self) -> str:
        """The name in a configuration: scope and name."""
        return f"{self.scope}.{self.name}" if self.scope else self.name

    @cached_property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """The options by name: keyword-only parameters of the signature."""
        parameters = inspect.signature(self.target).parameters
        return {
            name: p
            for name, p in parameters.items()
            if p.kind is inspect.Parameter.KEYWORD_ONLY and (self.takes is None or name in self.takes)
        }

    @cached_property
    def hints(self) -> Mapping[str, Any]:
        """The type annotations of the options, by name."""
        target = self.target
        if inspect.isclass(target) and "__dataclass_fields__" not in vars(target):
            target = target.__init__
        try:
            return typing.get_type_hints(target, include_extras=True)
        except (NameError, TypeError):  # foreign functions may have unresolvable annotations
            return {}

    def given(self, options: Mapping[str, Any]) -> Entry:
        """Copy the entry, with the `packages` and the `programs` that the piece needs with these options."""
        needed = [(*name.rpartition(":")[::2], extra) for name, extra in self.packages.items()]
        named = {f"{option}={value}" for option, value in options.items()}
        packages = {name: extra for only, name, extra in needed if only in {"", *named}}
        return replace(self, packages=packages, programs=self.programs and partial(self.programs, **options))

    @property
    def sets_tags(self) -> frozenset[str]:
        """The tags that the piece sets on outcomes or prompts, from its decorator or a class attribute."""
        return frozenset(getattr(self.target, "sets_tags", NOTHING))

    @property
    def own_answer(self) -> Callable[..., Any] | None:
        """The declared function (prompt, options) that returns a correct answer; None if undeclared."""
        return getattr(self.target, "own_answer", None)

    def inputs(self, options: Mapping[str, Any]) -> RewardInputs | None:
        """Return the declared inputs of a reward with these options; None if it declares none."""
        declared = getattr(self.target, "reward_inputs", None)
        if declared is None or isinstance(declared, RewardInputs):
            return declared
        values = {name: parameter.default for name, parameter in self.options.items()} | dict(options)
        return declared(**{name: values[name] for name in inspect.signature(declared).parameters})

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, as one line."""
        return " ".join((inspect.getdoc(self.target) or "").split("\n\n")[0].split())


# ---- registering

Target = TypeVar("Target", bound=Callable)


class Decorator(Protocol):
    """Decorator of a kind, with or without declarations: `@advantage` or `@advantage(turns=True)`.

    Pieces in `mmrl/papers` declare the prefix of their name: `@engine(scope="vision")`.
    """

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
    """Declare a kind of piece and return the decorator that registers its pieces.

    Args:
        name: Name of the kind in configurations and in `mmrl list`.
        home: Name of the folder, in every package, that has the modules of this kind.
        made: Whether a run builds a piece once, as an object around the piece that it wraps.
        loads: Whether the constructor may read files or load a model; a check then does not call it.
        factory: Whether a class is instantiated at every call, instead of once.
        stages: Allowed values of the declaration `on`, which is the stage at which a piece runs.
    """
    HOMES[name] = home
    for names, belongs in ((MADE, made), (LOADED, loads), (FACTORIES, factory)):
        names.update([name] if belongs else [])

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
        programs: Callable[..., Any] | None = None,
        own_answer: Callable[..., Any] | None = None,
        inputs: RewardInputs | Callable[..., RewardInputs] | None = None,
        trains: bool | None = None,
        reads_rewards: bool | None = None,
        scope: str = "",
    ) -> Callable:
        of = dict.fromkeys(others, frozenset(of_others))
        read = frozenset(extra), of, frozenset(notes), frozenset(tags), turns or every_turn, every_turn
        _check_one_of(f"a {name} declares `on`", on, stages)
        _check_one_of(f"a {name} declares `scope`", scope, SCOPES)

        def enter(target: Callable) -> Callable:
            own = {"own_answer": own_answer, "trains": trains, "reads_rewards": reads_rewards}
            _set_declared(target, sets_tags=frozenset(sets_tags) or None, reward_inputs=inputs, **own)
            declared = Needs(unit, *read), frozenset(of_others), None, packages, on, copies_policy, programs
            return _register(name, target, scope, *declared)

        return enter if target is None else enter(target)

    return cast(Decorator, decorate)


def _check_one_of(what: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{what}, one of {', '.join(filter(None, allowed)) or 'none'}, not '{value}'")


def _register(kind: str, target: Callable, scope: str, *declared: Any) -> Callable:
    """Add a piece to `PIECES` and return it; raises `ValueError` if another file defines its name."""
    module = target.__module__
    package = next((s for s, home in SCOPES.items() if s and module.startswith(f"{home}.")), scope)
    scope = package if module.partition(".")[0] == "mmrl" else module
    entry = Entry(kind, scope, snake_case(target.__name__), target, *declared)
    earlier = PIECES.setdefault((kind, entry.full_name), entry)
    # Unwrap functions that `per_outcome` wraps, to get the file that defines them.
    files = [inspect.getsourcefile(inspect.unwrap(piece.target)) for piece in (earlier, entry)]
    if files[0] != files[1]:
        raise ValueError(
            f"two pieces of kind '{kind}' are called '{entry.full_name}': {files[0]} and {files[1]}"
        )
    PIECES[kind, entry.full_name] = entry
    return target


def _set_declared(target: Callable, **declared: Any) -> None:
    """Set declarations as attributes of a piece, so that subclasses inherit them."""
    for name, value in declared.items():
        if value is not None:
            setattr(target, name, value)


# ---- looking up


def pieces(kind: str, on: str = "") -> list[Entry]:
    """List the pieces of a kind in order of name, papers included; with `on`, only pieces of this stage."""
    _import_homes(kind)
    import_papers(kind)
    entries = [entry for (k, _), entry in PIECES.items() if k == kind and on in ("", entry.on)]
    return sorted(entries, key=lambda entry: entry.full_name)


def _import_homes(kind: str) -> None:
    """Import all modules in the home folders of a kind; a second call does nothing."""
    for package in dict.fromkeys((*WINGS, *SCOPES.values())):
        home = f"{package}.{HOMES[kind]}"
        # Check the package first, because `find_spec` raises for a module inside a missing package.
        if home in _IMPORTED or not importlib.util.find_spec(package):
            continue
        if spec := importlib.util.find_spec(home):
            importlib.import_module(home)
            folders = spec.submodule_search_locations or []  # None if the home is a single file
            for inside in pkgutil.iter_modules(folders):
                importlib.import_module(f"{home}.{inside.name}")
        _IMPORTED.add(home)


def leaves_form(entry: Entry, options: Mapping[str, Any]) -> bool:
    """Whether a reward's option `form` is unset, so that the answer form is inferred from the data set."""
    form = entry.options.get("form") if FORM_PACKAGE in entry.packages else None
    return form is not None and form.default is None and options.get("form") is None


def is_trl(function: Callable) -> bool:
    """Whether a reward function has TRL's signature: it takes `completions` or `environments`."""
    return not {"completions", "environments"}.isdisjoint(inspect.signature(function).parameters)


def import_name(name: str) -> Any:
    """Import and return the object with a name of the form `package.module:attribute`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def find(kind: str, name: str) -> Entry:
    """Look up a piece by name; raises `ConfigError` with the most similar name if there is none.

    A name of the form `package.module:function` is imported; such a piece needs no decorator.
    """
    _import_homes(kind)
    if (kind, name) not in PIECES and ":" not in name:
        import_papers(kind, name)
    if entry := PIECES.get((kind, name)):
        return entry
    module, colon, attribute = name.partition(":")
    if not colon:
        entries = {entry.full_name: entry for entry in pieces(kind)}
        near = difflib.get_close_matches(name, entries, 1) or [n for n in entries if n.split(".")[-1] == name]
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(entries) or 'none'}"
        raise ConfigError(f"no {kind} is called '{name}'; {hint}")
    try:
        target = objects.get(name) if objects.is_object(name) else import_name(name)
        if callable(target):
            inspect.signature(target)  # raises for built-in types that have no signature
    except Exception as error:  # an import can raise any error
        raise ConfigError(f"cannot import the {kind} '{name}': {type(error).__name__}: {error}") from error
    if not callable(target):
        raise ConfigError(f"the {kind} '{name}' must be a function or a class, not {type(target).__name__}")
    for (of_kind, _), entry in PIECES.items():  # importing may have registered it
        if of_kind == kind and entry.target is target:
            return entry
    if kind == "reward" and is_trl(target):
        # The keyword arguments of a TRL reward come from the data, so none of them is an option.
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
