"""TRL's keyword names of training arguments as changes of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from mmrl.config.loading import ConfigError, merge, nearest

PLACES: dict[str, Sequence[str]] = {
    "num_generations": ("rollout", "num_generations"),
    "learning_rate": ("learn", "learning_rate"),
    "max_completion_length": ("rollout", "engine", "0", "max_completion_length"),
}


def translate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Turn keyword names of TRL's `GRPOConfig` into a nested change of a configuration."""
    changes: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in PLACES:
            raise ConfigError(f"there is no argument '{name}'; {nearest(name, PLACES)}")
        changes = merge(changes, reduce(lambda inner, key: {key: inner}, reversed(PLACES[name]), value))
    return changes


def arguments_of(config: Any) -> dict[str, Any]:
    """List the fields of a `GRPOConfig` or another dataclass that differ from their defaults."""
    plain = type(config)()
    return {name: value for name, value in vars(config).items() if value != vars(plain).get(name)}
