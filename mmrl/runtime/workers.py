"""Settings of Ray actors, and checks that a piece can be rebuilt in another process."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt
from mmrl.config.registry import Entry
from mmrl.config.schema import convert
from mmrl.core.protocols import Stateful


@dataclass(frozen=True)
class Workers:
    """Settings of the Ray actors that run a piece: number, resources, environment and cluster."""

    num: PositiveInt = 1  # number of actors per process of the run
    num_cpus: NonNegativeFloat = 1.0  # CPU cores per actor; whole numbers also set its threads
    num_gpus: NonNegativeFloat = 0.0  # GPUs per actor; may be a fraction
    resources: Mapping[str, NonNegativeFloat] | None = None  # custom Ray resources per actor
    runtime_env: Mapping[str, Any] | None = None  # Ray runtime environment of the actors
    address: str = ""  # cluster address; empty: `RAY_ADDRESS`, or a new cluster on this machine
    max_restarts: NonNegativeInt = 3  # how often Ray restarts an actor before the run ends

    def __post_init__(self) -> None:
        processes = int(os.environ.get("WORLD_SIZE") or 1)
        if processes > 1 and self.num_gpus and not (self.address or os.environ.get("RAY_ADDRESS")):
            raise ConfigError(
                f"`num_gpus: {self.num_gpus:g}` in a run of {processes} processes, each of which would start "
                "a cluster of its own with all GPUs of the machine; start one with `ray start --head`, and "
                "name its `address` or set RAY_ADDRESS"
            )


def workers_of(entry: Entry, options: Mapping[str, Any], given: Mapping[str, Any], place: str) -> Workers:
    """Parse the setting `workers` of a reward.

    Raises `ConfigError` for a reward that actors cannot rebuild, or whose values would differ between actors.
    """
    workers = convert(given, Workers, f"{place}.workers")
    named = f"{place}: '{entry.full_name}'"
    if found := object_in({"name": f"{entry.scope}:{entry.name}", **options}):
        raise ConfigError(
            f"{named} has `workers`, which make it again in other processes, where '{found}' of this program "
            "is not; write it into a module and name that as `module:function`"
        )
    if inspect.isclass(entry.target) and issubclass(entry.target, Stateful):
        raise ConfigError(
            f"{named} remembers earlier answers, and each of its `workers` would remember others"
        )
    if "train_prompts" in entry.options:
        raise ConfigError(f"{named} reads the training data, which its `workers` do not have")
    if workers.num > 1 and "generator" in entry.options:
        raise ConfigError(
            f"{named} draws random numbers for all answers in turn, which several actors cannot; set "
            "`workers.num: 1`, or write a class that takes `stream` and draws by prompt"
        )
    return workers


def object_in(value: Any) -> str:
    """Find a name in a configuration value that refers to an in-memory Python object; "" without any."""
    match value:
        case str() if objects.is_object(value):
            return value
        case Mapping():
            return next(filter(None, map(object_in, value.values())), "")
        case list() | tuple():
            return next(filter(None, map(object_in, value)), "")
    return ""
