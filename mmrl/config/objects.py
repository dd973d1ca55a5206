"""Objects of a Python program that a configuration names, such as `python:train_dataset`.

A configuration is plain text. The objects that `mmrl.Trainer` gets as arguments (a model, a dataset, a
function that cannot be imported) are stored here, and the configuration contains their names.
"""

from __future__ import annotations

from typing import Any

from mmrl.config.loading import ConfigError

PREFIX = "python:"
_OBJECTS: dict[str, Any] = {}


def put(name: str, thing: Any) -> str:
    """Store an object and replace an earlier object of that name; return its name for a configuration."""
    _OBJECTS[PREFIX + name] = thing
    return PREFIX + name


def is_object(name: str) -> bool:
    """Whether a name in a configuration refers to an object of a Python program."""
    return name.startswith(PREFIX)


def get(name: str) -> Any:
    """Return the object with a name; raises `ConfigError` if this program did not store it."""
    if name not in _OBJECTS:
        raise ConfigError(
            f"'{name}' is an object of a Python program, which is not here; run that program again (its "
            "mmrl.Trainer hands the object over), or name a file, a folder or a `module:function` instead"
        )
    return _OBJECTS[name]
