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


# ---- environments

RESERVED = ("reset", "get_reward")  # methods of an environment that no model calls


def tool_names(environment: type) -> list[str]:
    """List the methods of an environment that a model may call: the public ones, but for the reserved."""
    methods = inspect.getmembers(environment, inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in RESERVED]


def check_environment(target: Callable, name: str) -> None:
    """Raise ConfigError for a class that is no environment in TRL's form; what a function makes is not known.

    It has `reset`, its public methods are tools, and its `__init__` takes nothing but keyword-only options.
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
    unmade = target.__new__(target)  # methods of an object take no `self`
    for method in tool_names(target):
        check_tool(getattr(unmade, method), f"{name}.{method}")
