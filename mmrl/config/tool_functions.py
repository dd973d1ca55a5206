"""What a tool has to be: a function whose signature and docstring say what a model needs to call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from mmrl.config.loading import ConfigError

GIVEN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters_of(tool: Callable) -> dict[str, inspect.Parameter]:
    """List the arguments that a model gives: all but the keyword-only ones, which are options."""
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
