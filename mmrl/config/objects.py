"""Objects of a Python program that a configuration names, such as `python:train_dataset`.

A configuration is plain text. What `mmrl.Trainer` gets as an object (a model, a dataset, a function without a
module of its own) is kept here under a name, which stands in the configuration in its place.
"""

from __future__ import annotations

from typing import Any

from mmrl.config.loading import ConfigError

PREFIX = "python:"
_OBJECTS: dict[str, Any] = {}


def put(name: str, thing: Any) -> str:
    """Keep an object under a name, in place of an earlier one; return what a configuration calls it."""
    _OBJECTS[PREFIX + name] = thing
    return PREFIX + name


def is_object(name: str) -> bool:
    """Return whether a configuration means an object by this name."""
    return name.startswith(PREFIX)


def get(name: str) -> Any:
    """Return the object of a name; raises `ConfigError` outside of the program that put it there."""
    if name not in _OBJECTS:
        raise ConfigError(
            f"'{name}' is an object of a Python program, which is not here; run that program again (its "
            "mmrl.Trainer hands the object over), or name a file, a folder or a `module:function` instead"
        )
    return _OBJECTS[name]
