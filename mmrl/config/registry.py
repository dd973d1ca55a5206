"""Names to pieces. A piece is a decorated function or class; a kind is a folder and a signature.

A name without a dot lives in `mmrl/<home>`, `vision.temporal_iou` in `vision/<home>`,
`package.module:function` anywhere. The first look-up of a kind imports the modules of its folder, which is
why they import nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

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
HOMES = {
    "policy": "policies",
    "data": "datasets",
    "sampler": "samplers",
    "engine": "engines",
    "reward": "rewards",
    "group_filter": "filters",
    "advantage": "advantages",
    "objective": "objectives",
    "ratio": "objectives",
    "surrogate": "objectives",
    "aggregation": "objectives",
    "step_weight": "objectives",
    "penalty": "objectives",
    "implicit_reward": "objectives",
    "compare": "objectives",
    "schedule": "schedules",
    "metric": "metrics",
    "reference": "references",
    "transform": "transforms",
    "cache": "caches",
    "optimizer": "optimizers",
    "builder": "builders",
    "visualization": "visualizations",
    "likelihood": "likelihoods",
    "solver": "solvers",
    "family": "model_families",
    "alarm": "checks",
    "data_check": "checks",
    "checkup": "checks",
    "estimate": "memory_estimates",
    "meter": "costs",
    "tracker": "trackers",
}


@dataclass(frozen=True)
class Needs:
    """What a piece reads: the cut it allows, `extra` of the learner, `others` (and what of them), `notes` of
    the engine."""

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
    """A registered piece."""

    kind: str
    scope: str
    name: str
    target: Callable
    needs: Needs = Needs()
    of_others: frozenset[str] = frozenset()  # what it reads of the policy that its option `against` names
    takes: tuple[str, ...] | None = None  # its options, where the signature does not tell
    packages: Mapping[str, str] = field(default_factory=dict)  # what it imports, and the extra that brings it

    @property
    def full_name(self) -> str:
        """Name the piece as a config does."""
        return f"{self.scope}.{self.name}" if self.scope else self.name

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """List the keyword-only parameters."""
        parameters = inspect.signature(self.target).parameters
        return {
            name: p
            for name, p in parameters.items()
            if p.kind is inspect.Parameter.KEYWORD_ONLY and (self.takes is None or name in self.takes)
        }

    @property
    def summary(self) -> str:
        """Quote the first sentence of the docstring, which may run over two lines."""
        return " ".join((inspect.getdoc(self.target) or "").split("\n\n")[0].split())


PIECES: dict[tuple[str, str], Entry] = {}
_IMPORTED: set[str] = set()


def _scope_of(module: str) -> str:
    inside = [scope for scope, package in SCOPES.items() if scope and module.startswith(package + ".")]
    return inside[0] if inside else "" if module.partition(".")[0] == "mmrl" else module


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def register(
    kind: str,
    target: Callable,
    needs: Needs,
    of_others: frozenset[str],
    packages: Mapping[str, str] = MappingProxyType({}),
) -> Callable:
    """Enter a piece under its own name; two of one name are an error that names both files."""
    scope, name = _scope_of(target.__module__), _snake(target.__name__)
    entry = Entry(kind, scope, name, target, needs, of_others, packages=packages)
    known = PIECES.get((kind, entry.full_name), entry)
    # A reward that was wrapped by `per_outcome` stands in the file of what is wrapped.
    files = [inspect.getsourcefile(inspect.unwrap(one)) for one in (known.target, target)]
    if files[0] != files[1]:
        raise ValueError(
            f"two pieces of kind '{kind}' are called '{entry.full_name}': {files[0]} and {files[1]}"
        )
    PIECES[kind, entry.full_name] = entry
    return target


def _decorator(kind: str) -> Callable:
    def decorate(
        target: Callable | None = None,
        *,
        unit: Unit = Unit.STEP,
        extra: set[str] = frozenset(),
        others: set[str] = frozenset(),
        of_others: set[str] = frozenset(),
        notes: set[str] = frozenset(),
        packages: Mapping[str, str] = MappingProxyType({}),
    ):
        needs = Needs(
            unit, frozenset(extra), {name: frozenset(of_others) for name in others}, frozenset(notes)
        )
        if target is None:
            return lambda target: register(kind, target, needs, frozenset(of_others), packages)
        return register(kind, target, needs, frozenset(of_others), packages)

    decorate.__name__ = kind
    decorate.__doc__ = f"Register a piece of kind '{kind}' (home: {HOMES[kind]}/), with what it reads."
    return decorate


policy, data, sampler, engine = (_decorator(kind) for kind in ("policy", "data", "sampler", "engine"))
reward, group_filter, advantage, objective = (
    _decorator(kind) for kind in ("reward", "group_filter", "advantage", "objective")
)
ratio, surrogate, aggregation, step_weight = (
    _decorator(kind) for kind in ("ratio", "surrogate", "aggregation", "step_weight")
)
penalty, implicit_reward, compare, schedule = (
    _decorator(kind) for kind in ("penalty", "implicit_reward", "compare", "schedule")
)
metric, reference, transform, cache = (
    _decorator(kind) for kind in ("metric", "reference", "transform", "cache")
)
optimizer, builder, visualization = (_decorator(kind) for kind in ("optimizer", "builder", "visualization"))
likelihood, solver, family = (_decorator(kind) for kind in ("likelihood", "solver", "family"))
alarm, data_check = _decorator("alarm"), _decorator("data_check")
checkup, estimate, meter, tracker = (_decorator(kind) for kind in ("checkup", "estimate", "meter", "tracker"))


def load_kind(kind: str) -> None:
    """Import every module in the homes of a kind."""
    for package in (*WINGS, *(package for scope, package in SCOPES.items() if scope)):
        home = f"{package}.{HOMES[kind]}"
        if (
            home in _IMPORTED
            or importlib.util.find_spec(package) is None
            or importlib.util.find_spec(home) is None
        ):
            continue
        module = importlib.import_module(home)
        for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
            importlib.import_module(f"{home}.{found.name}")
        _IMPORTED.add(home)


def pieces(kind: str) -> list[Entry]:
    """List the pieces of a kind by name."""
    load_kind(kind)
    return sorted((entry for (k, _), entry in PIECES.items() if k == kind), key=lambda entry: entry.full_name)


def find(kind: str, name: str) -> Entry:
    """Look a piece up, or say what it may have been meant to be."""
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
    """Find a function of somebody else's module: `package.module:function`."""
    module, _, attribute = name.partition(":")
    try:
        target = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever somebody else's module raises when it is loaded
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
    """Refuse options that the piece does not take, and name required ones that are missing."""
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
