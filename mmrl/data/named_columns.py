"""Detection of the columns that a run reads by name, from the options and the code of its pieces."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.config.registry import PIECES, find, import_name, is_trl
from mmrl.config.schema import Config, EvaluateConfig, Kind, as_plain, each, held_fields
from mmrl.data.row_fields import ASKING, NamedColumns

WORD = re.compile(r"[^\W\d]\w*")
IMPORTED = re.compile(r"\w[\w.]*:\w[\w.]*")  # `package.module:function`
SCORING = ("reward", "metric", "group_filter")  # kinds whose code reads columns of prompts


def named_columns(config: Config | EvaluateConfig) -> NamedColumns:
    """Find the columns that rewards, engines, filters and other pieces of a run read by name.

    These columns are the parameters of functions in TRL's form and of an environment's `reset`, the string
    constants in the code of other rewards, and the words in options. A function with `**columns` takes all.
    """
    words, taken, every = set[str](), set[str](), False
    for mark, value, place in held_fields(config):
        if not isinstance(mark, Kind) or mark.name == "data":
            continue
        for piece, _ in each(value, place):
            entry, options = find(mark.name, piece.name), as_plain(piece.options)
            defaults = [parameter.default for parameter in entry.options.values()]
            words.update(word for text in _texts([options, defaults]) for word in WORD.findall(text))
            for kind, target in ((mark.name, entry.target), *_nested(options)):
                target = inspect.unwrap(target)
                parameters = _taken(target)
                every |= parameters is None
                taken.update(parameters or ())
                if kind in SCORING:
                    words.update(_in_code(target, set()))
    return NamedColumns(frozenset((words - set(ASKING)) | taken), every)


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for key, inner in value.items():
                yield str(key)
                yield from _texts(inner)
        case list() | tuple():
            for inner in value:
                yield from _texts(inner)


def _nested(options: Any) -> Iterator[tuple[str, Any]]:
    """Yield (kind, target) of the pieces, functions and classes that are named in options."""
    for text in _texts(options):
        yield from ((kind, entry.target) for (kind, name), entry in PIECES.items() if name == text)
        if objects.is_object(text) or IMPORTED.fullmatch(text):
            try:
                yield SCORING[0], objects.get(text) if objects.is_object(text) else import_name(text)
            except (ConfigError, ImportError, AttributeError):  # not every text names an object
                continue


def _taken(target: Any) -> list[str] | None:
    """List the columns in the signature of a reward in TRL's form or an environment's `reset`; None: all."""
    if getattr(target, "takes_columns", False):
        return None
    trl = isinstance(target, FunctionType) and is_trl(target)
    called = target if trl else getattr(target, "reset", None)
    parameters = inspect.signature(called).parameters if callable(called) else {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return list(parameters)


def _in_code(target: Any, seen: set[Any]) -> Iterator[str]:
    """List the string constants in a function or class, and in functions of its module that it calls."""
    for function in _functions(target):
        if function in seen:
            continue
        seen.add(function)
        for code in _codes(function.__code__):
            yield from (text for text in _texts(list(code.co_consts)) if WORD.fullmatch(text))
            for name in code.co_names:
                used = function.__globals__.get(name)
                if isinstance(used, FunctionType) and used.__module__ == function.__module__:
                    yield from _in_code(used, seen)
                elif isinstance(used, str | tuple | list):
                    yield from _texts(used)


def _functions(target: Any) -> list[FunctionType]:
    if isinstance(target, FunctionType):
        return [target]
    kinds = (target if inspect.isclass(target) else type(target)).__mro__
    methods = (method for kind in kinds if kind is not object for method in vars(kind).values())
    return [method for method in map(inspect.unwrap, methods) if isinstance(method, FunctionType)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
