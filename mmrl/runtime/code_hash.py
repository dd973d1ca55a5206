"""Hashes of functions and classes, from their bytecode and the constants that they read.

Comments, docstrings, line numbers, and variables that the code itself changes (a counter, a list that it
appends to) do not change the hash. Called functions are included if they are in modules of the user, not in
installed packages.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

INSTALLED = ("site-packages", "dist-packages")
PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, PurePath, re.Pattern)
CONTAINERS = (list, dict, set)
DEEPEST = 6  # levels of nested objects that are hashed
MUTATING = {
    "append", "extend", "insert", "pop", "remove", "clear", "add", "update", "discard", "setdefault",
    "popitem", "sort", "reverse", "appendleft",
}  # fmt: skip
LOADS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_NAME")
STORES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR")


def of_code(target: Callable) -> str:
    """Hash a function, class or callable to 16 hexadecimal digits; other Python versions hash differently."""
    while _root(target) == "mmrl" and hasattr(target, "__wrapped__"):
        target = target.__wrapped__  # undo decorators of mmrl such as `per_outcome`
    walk = _Walk(home=getattr(target, "__module__", "") or "")
    code = walk.of(target)
    values = [
        [name, value]
        for name, value, plain in walk.values
        if name not in walk.assigned and (plain or name not in walk.filled)
    ]
    return hashlib.sha256(json.dumps([code, values]).encode()).hexdigest()[:16]


def _root(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


@dataclass
class _Walk:
    """Traversal that converts code to a JSON description; each function and class is visited once."""

    home: str  # module of the hashed object
    # Variables and attributes that the code reads: (name, description, whether it has a plain type).
    values: list[tuple[str, Any, bool]] = field(default_factory=list)
    assigned: set[str] = field(default_factory=set)  # names that the code assigns to
    filled: set[str] = field(default_factory=set)  # names of containers that the code may change
    seen: dict[int, int] = field(default_factory=dict)  # maps the id of a visited object to its number
    kept: list[Any] = field(default_factory=list)  # keeps the seen objects alive, so that no id is reused

    def of(self, thing: Any, depth: int = 0) -> Any:
        """Describe any object that code refers to, as nested lists and strings."""
        if isinstance(thing, PLAIN):
            return repr(thing)
        if isinstance(thing, ModuleType):
            return thing.__name__
        if id(thing) in self.seen:
            return ["again", self.seen[id(thing)]]
        self.seen[id(thing)] = len(self.seen)
        self.kept.append(thing)
        match thing:
            case FunctionType() | type():
                if not self._own(thing.__module__):
                    return f"{thing.__module__}.{thing.__qualname__}"
                return self._class(thing) if isinstance(thing, type) else self._function(thing)
            case MethodType():
                return [self.of(thing.__func__, depth), self.of(thing.__self__, depth + 1)]
            case functools.partial(func=inner, args=given, keywords=named):
                return [self.of(inner, depth), self.of(given, depth + 1), self.of(named, depth + 1)]
            case object(__wrapped__=inner):  # a function wrapped by `functools.cache`
                return self.of(inner, depth)
        return self._object(thing, depth)

    def _object(self, thing: Any, depth: int) -> Any:
        """Describe a container by its items, or an object by its class (and attributes, if user-defined)."""
        match thing:
            case list() | tuple() | set() | frozenset() if depth < DEEPEST:
                parts = [self.of(part, depth + 1) for part in thing]
                return parts if isinstance(thing, list | tuple) else sorted(map(json.dumps, parts))
            case dict() if depth < DEEPEST:
                return [[self.of(key, depth + 1), self.of(value, depth + 1)] for key, value in thing.items()]
        kind = type(thing)
        if depth < DEEPEST and self._own(kind.__module__):
            for name, value in sorted(getattr(thing, "__dict__", {}).items()):
                self.values.append((name, self.of(value, depth + 1), isinstance(value, PLAIN)))
        return self.of(kind, depth + 1)

    def _own(self, module: str | None) -> bool:
        """Whether to hash a module's code: true for the hashed object's own module and for user modules."""
        module = module or ""
        root, file = module.partition(".")[0], getattr(sys.modules.get(module), "__file__", None) or ""
        return module == self.home or not (
            root in ("mmrl", "builtins")
            or root in sys.stdlib_module_names
            or any(place in file for place in INSTALLED)
        )

    def _function(self, function: FunctionType) -> Any:
        code, namespace, held = function.__code__, function.__globals__, dict[str, Any]()
        codes = list(_codes(code))
        for one in codes:
            self._changes(one)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                held[name] = cell.cell_contents
            except ValueError:  # the closure variable has no value yet
                continue
        names = {name for one in codes for name in one.co_names}
        held |= {name: namespace[name] for name in sorted(names & namespace.keys() - held.keys())}
        held |= {module.__name__: module for one in codes for module in _imported(one, namespace)}
        for name, value in [*held.items()]:
            if isinstance(value, ModuleType) and self._own(value.__name__):
                held |= {f"{name}.{one}": vars(value)[one] for one in sorted(names & vars(value).keys())}
        described = [self.of(function.__defaults__, 1), self.of(function.__kwdefaults__, 1)]
        for name, value in held.items():
            if isinstance(value, FunctionType | type | MethodType | functools.partial | ModuleType):
                described.append([name, self.of(value, 1)])
            else:
                self.values.append((name, self.of(value, 1), isinstance(value, PLAIN)))
        return [_steps(code).described, described]

    def _changes(self, code: CodeType) -> None:
        """Record the outer variables and attributes that a code object assigns to or may change in place."""
        if code.co_name not in ("__init__", "__post_init__"):
            self.assigned |= _steps(code).assigned
            self.filled |= _steps(code).filled

    def _class(self, kind: type) -> Any:
        described: list[Any] = []
        for name, value in sorted(vars(kind).items()):
            inner = getattr(value, "__func__", value)  # unwrap a staticmethod or classmethod
            for one in (inner.fget, inner.fset) if isinstance(inner, property) else (inner,):
                if isinstance(one, FunctionType | type | functools.partial):
                    described.append([name, self.of(one, 1)])
                elif isinstance(one, (*PLAIN, *CONTAINERS, tuple)) and not name.startswith("__"):
                    self.values.append((name, self.of(one, 1), isinstance(one, PLAIN)))
        return [kind.__qualname__, [self.of(base, 1) for base in kind.__bases__], described]


def _imported(code: CodeType, namespace: Mapping[str, Any]) -> Iterator[ModuleType]:
    """Import and yield the user's modules that a function imports in its body."""
    for name in _steps(code).imports:
        with suppress(Exception):  # the import may be in a branch that never runs
            name = importlib.util.resolve_name(name, namespace.get("__package__"))
            root = name.partition(".")[0]
            spec = None if root in ("mmrl", *sys.stdlib_module_names) else importlib.util.find_spec(root)
            places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else INSTALLED
            if not any(place in file for place in INSTALLED for file in places):
                yield importlib.import_module(name)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and the code objects of its inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class _Steps(NamedTuple):
    """What the instructions of a code object say, whatever the values of its variables."""

    described: list[Any]  # the instructions, without docstring, file name and line numbers
    assigned: frozenset[str]  # outer variables and attributes that it assigns to
    filled: frozenset[str]  # those that it may change in place
    imports: tuple[str, ...]  # modules that it imports, with their dots


@functools.cache  # runs hash the same functions many times, and to disassemble them takes most of the time
def _steps(code: CodeType) -> _Steps:
    steps = list(dis.get_instructions(code))
    stores_items = any(step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for step in steps)
    described, assigned, filled, imports = list[Any](), set[str](), set[str](), list[str]()
    for at, (step, after) in enumerate(zip(steps, [*steps[1:], None], strict=True)):
        value = step.argval
        if step.opname in STORES and (step.opname != "STORE_DEREF" or value in code.co_freevars):
            assigned.add(value)
        elif step.opname in LOADS and (stores_items or (after and after.argval in MUTATING)):
            filled.add(value)
        elif step.opname == "IMPORT_NAME":
            level = steps[at - 2].argval  # the number of dots before the name
            imports.append("." * (level if isinstance(level, int) else 0) + value)
        if isinstance(value, CodeType):
            value = _steps(value).described
        elif isinstance(value, frozenset):
            value = sorted(map(repr, value))
        described.append([step.opname, value if isinstance(value, list) else repr(value)])
    signature = [code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_flags]
    return _Steps([described, *signature], frozenset(assigned), frozenset(filled), tuple(imports))
