"""Checks and JSON schemas of tools and environments, from their signatures and docstrings."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmrl.config.loading import ConfigError

GIVEN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
SHOWN = "image of the conversation"  # marks an argument type as an image, like PIL's image type


def parameters_of(tool: Callable) -> dict[str, inspect.Parameter]:
    """Return the arguments that the model provides: all except keyword-only arguments (the options)."""
    parameters = inspect.signature(tool).parameters
    return {name: p for name, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY}


def check_tool(tool: Callable, name: str) -> None:
    """Raise ConfigError unless every argument has a type and a line under `Args:` of the docstring."""
    doc, parameters = inspect.getdoc(tool) or "", parameters_of(tool)
    if not doc:
        raise ConfigError(
            f"the tool '{name}' has no docstring, which tells the model what it is for; write one"
        )
    for argument, parameter in parameters.items():
        if parameter.kind not in GIVEN:
            raise ConfigError(
                f"the tool '{name}' takes `{parameter}`; name each argument of a tool by itself"
            )
        if parameter.annotation is inspect.Parameter.empty:
            raise ConfigError(f"the argument '{argument}' of the tool '{name}' has no type; annotate it")
        described = doc.partition("Args:")[2].splitlines()
        if not any(line.strip().startswith((f"{argument}:", f"{argument} (")) for line in described):
            raise ConfigError(
                f"the docstring of the tool '{name}' says nothing of '{argument}'; describe it under "
                "`Args:`, for the model to read"
            )
    schema_of(tool, name, argument_types(tool, name)[0])


def schema_of(tool: Callable, name: str, hints: Mapping[str, Any]) -> Mapping[str, Any]:
    """Create the JSON schema of a tool, for the arguments that the model provides, with transformers.

    Raises ConfigError, which names the argument, for a type that transformers cannot describe.
    """
    for argument, hint in hints.items():
        parameter = inspect.Parameter(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hint)
        alone = f"A type.\n\nArgs:\n    {argument}: It."
        _described(f"the argument '{argument}' of the tool '{name}'", name, alone, [parameter])
    given = [p.replace(annotation=hints[key]) for key, p in parameters_of(tool).items()]
    return _described(f"the tool '{name}'", name, inspect.getdoc(tool) or "", given)


def _described(what: str, name: str, doc: str, parameters: Sequence[inspect.Parameter]) -> Mapping[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    def described() -> None: ...

    described.__name__, described.__doc__ = name, doc
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    described.__signature__ = inspect.Signature(parameters)  # pyright: ignore
    try:
        return get_json_schema(described)
    # transformers raises various exceptions for types and docstrings that it cannot parse.
    except Exception as error:
        raise ConfigError(f"cannot describe {what} to a model: {error}") from error


def argument_types(tool: Callable, name: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the type that a model sends for each argument, and the names of the image arguments.

    The type of an image argument is int, the index of the image, or int | None. Raises ConfigError for types
    that cannot be resolved, and for an argument that combines images with other types.
    """
    try:
        hints = typing.get_type_hints(tool, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"cannot read the types of the tool '{name}': {error}; import it where the module is imported, "
            "or take images as `mmrl.vision.tools.functions.ShownImage`"
        ) from error
    hint_of, images = {argument: hints[argument] for argument in parameters_of(tool)}, set()
    for argument, hint in hint_of.items():
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        members = typing.get_args(hint) if union else (hint,)
        shown = [member for member in members if _is_image(member)]
        if shown and all(member in (*shown, types.NoneType) for member in members):
            images.add(argument)
            hint_of[argument] = int | None if types.NoneType in members else int
        elif any(map(_is_image, _parts(hint))):
            raise ConfigError(
                f"the argument '{argument}' of the tool '{name}' must be one image, or an image or None, not "
                f"{hint}; take several images as arguments of their own"
            )
    return hint_of, frozenset(images)


def _is_image(hint: Any) -> bool:
    from PIL.Image import Image

    return hint is Image or SHOWN in getattr(hint, "__metadata__", ())


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type and all types nested in it."""
    yield hint
    for inner in typing.get_args(hint):
        yield from _parts(inner)


# ---- environments

RESERVED = ("reset", "get_reward", "get_turn_reward")  # methods of an environment that the model cannot call


def tool_names(environment: type) -> list[str]:
    """Return the names of methods that a model may call: all public methods except `RESERVED`."""
    methods = inspect.getmembers(environment, inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in RESERVED]


def check_environment(target: Callable, name: str) -> None:
    """Raise ConfigError if a class lacks the interface of TRL's environments; do not check functions.

    A class needs `reset`, an `__init__` without required positional arguments, and tools as public methods.
    """
    if not inspect.isclass(target):
        return
    if not callable(getattr(target, "reset", None)):
        raise ConfigError(
            f"the environment '{name}' has no method `reset(self, **columns)`, which begins an episode and "
            "returns what the model sees first, or None; write one"
        )
    for parameter in parameters_of(target).values():
        if parameter.default is inspect.Parameter.empty and parameter.kind in GIVEN:
            raise ConfigError(
                f"the environment '{name}' cannot be made without `{parameter}`; give it a default, or make "
                "it a keyword-only option of the run"
            )
    unmade = target.__new__(target)  # uninitialised object: only for signatures without `self`
    for method in tool_names(target):
        check_tool(getattr(unmade, method), f"{name}.{method}")
