"""Given arguments of TRL's configuration classes, completed by TRL's defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.config.plain import as_list, as_mapping, lookup
from mmrl.trl.names import DPO_ONLY, NAMES, SFT_ONLY

Change = dict[str, Any]  # maps dotted keys of a configuration to values
BATCHES = tuple(name for name, row in NAMES.items() if row.rule == "batches")
GRPO_LOSSES = {  # maps GRPO losses of TRL to (surrogate, aggregation)
    "grpo": ("clip", "sequence_mean"),
    "bnpo": ("clip", "step_mean"),
    "dapo": ("clip", "step_mean"),
    "dr_grpo": ("clip", "fixed_length"),
    "cispo": ("cispo", "step_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "luspo": ("clip", "length_weighted"),
    "vespo": ("gamma_weight", "step_mean"),
}
DPO_LOSSES = {  # maps DPO losses of TRL to mmrl's objectives for pairs
    **{name: name for name in ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair")},
    **{name: name for name in ("sppo_hard", "apo_zero", "apo_down", "discopop")},
    "sigmoid_norm": "sigmoid",
}
ABSENT_LOSSES = ("aot", "aot_unpaired", "sft")
SFT_LOSSES = ("nll", "chunked_nll", "dft")  # "chunked_nll" is "nll" with less memory
CONVERSING = ("vision.with_tools", "vision.with_environments")  # engines that call tools
STEP_MEANS = ("dapo", "bnpo", "cispo", "vespo")


def default_of(name: str, kind: str) -> Any:
    """Return TRL's default of an argument in the configuration class of a kind: grpo, dpo or sft."""
    row = NAMES[name]
    own = {"dpo": row.dpo, "sft": row.sft}.get(kind, ...)
    return row.default if own is ... else own


def kind_of_run(values: Mapping[str, Any], onto: Mapping[str, Any]) -> str:
    """Return "grpo", "dpo" or "sft", inferred from the loss, argument names or configuration."""
    match lookup(onto, "objective.name"), values.get("loss_type"):
        case str(objective), None:
            chain = [as_mapping(piece)["name"] for piece in as_list(lookup(onto, "advantage"))]
            return "dpo" if objective == "comparison" else "sft" if chain == ["constant"] else "grpo"
        case _, None:
            for kind, names in (("sft", SFT_ONLY), ("dpo", DPO_ONLY)):
                if any(values.get(name) is not None for name in names):
                    return kind
            return "grpo"
        case _, str(loss):
            return "sft" if loss in SFT_LOSSES else "dpo" if loss in {*DPO_LOSSES, *ABSENT_LOSSES} else "grpo"
    return "dpo"  # only DPO takes a list of losses


@dataclass(frozen=True)
class Given:
    """Arguments of TRL with TRL's defaults, and the configuration that they change.

    Args:
        values: Argument values by name.
        onto: The configuration to change.
        kind: The configuration class of the arguments: grpo, dpo or sft.
        whole: Whether `values` includes TRL's defaults, so that the resulting run trains as TRL would.
        nulls: The names of arguments that were given as None.
    """

    values: Mapping[str, Any]
    onto: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "grpo"
    whole: bool = False
    nulls: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Any:
        """Return the value of an argument, or TRL's default if it was not given."""
        value = self.values.get(name)
        return default_of(name, self.kind) if value is None else value

    def __contains__(self, name: str) -> bool:
        """Whether an argument has a value other than None."""
        return self.values.get(name) is not None

    @property
    def pairs(self) -> bool:
        """Whether the arguments belong to DPOConfig."""
        return self.kind == "dpo"

    def has(self, *names: str) -> bool:
        """Whether at least one of several arguments has a value."""
        return any(name in self for name in names)

    @property
    def losses(self) -> list[str]:
        """Return the names of the losses: one loss, or several losses that DPO sums."""
        return as_list(self.values.get("loss_type") or default_of("loss_type", self.kind))

    def at(self, key: str) -> Any:
        """Return the value of a dotted key in the configuration `onto`; None if the key is missing."""
        return lookup(self.onto, key)

    @property
    def conversing(self) -> str:
        """Return the key of the engine that calls tools, such as `rollout.engine.1`; "" without one."""
        names = [as_mapping(engine).get("name") for engine in as_list(self.at("rollout.engine"))]
        return next((f"rollout.engine.{i}" for i, name in enumerate(names) if name in CONVERSING), "")

    @property
    def processes(self) -> int:
        """Return the number of processes: the argument `num_processes`, or else the launcher's WORLD_SIZE."""
        return self.values.get("num_processes") or int(os.environ.get("WORLD_SIZE") or 1)

    @property
    def completions(self) -> int:
        """Return the number of completions per optimizer step, over all processes."""
        return self["per_device_train_batch_size"] * self["gradient_accumulation_steps"] * self.processes

    @property
    def generated(self) -> int:
        """Return the number of completions that are sampled together, for one or more optimizer steps."""
        per_pass = self["per_device_train_batch_size"] * self.processes
        batch_size, steps = self["generation_batch_size"], self["steps_per_generation"]
        if batch_size and steps and batch_size != per_pass * steps:
            raise ConfigError(
                f"generation_batch_size is {batch_size}, but {per_pass} completions in each of {steps} steps "
                f"(steps_per_generation) are {per_pass * steps}; give one of the two"
            )
        size = batch_size or per_pass * (steps or self["gradient_accumulation_steps"])
        whole = max(size, self.completions)
        if whole % min(size, self.completions) or size % per_pass:
            raise ConfigError(
                f"{size} completions of a generation cannot be parted into optimizer steps of "
                f"{self.completions} (per_device_train_batch_size x gradient_accumulation_steps x processes)"
            )
        return whole

    @property
    def updates(self) -> int:
        """Return the number of optimizer steps on the completions that are sampled together."""
        parts = self.at("learn.minibatches") or 1
        if self.has(*BATCHES):
            parts = 1 if self.kind != "grpo" else self.generated // self.completions
        return parts * (self.values.get("num_iterations") or self.at("learn.num_iterations") or 1)
