"""An adapter for every role over one base model: rows are read and written with that of their tag."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.core.types import Trajectory
from mmrl.vision.decoding.token_steps import TokenSteps

ROLE = "role"  # tag of outcomes and of prompts
Read = Callable[[TokenSteps, Set[str], object], dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class RoleSteps(TokenSteps):
    """Steps whose rows belong to roles: `role` (N,) is the number of the adapter that reads each."""

    role: Tensor = field(kw_only=True)

    @staticmethod
    def of(steps: TokenSteps, role: Tensor) -> RoleSteps:
        """Give steps their roles (N,)."""
        return RoleSteps(
            **{place.name: getattr(steps, place.name) for place in fields(TokenSteps)}, role=role
        )

    def __getitem__(self, cut: tuple[Tensor, slice]) -> RoleSteps:
        return RoleSteps.of(super().__getitem__(cut), self.role[cut[0]])


def check_roles(names: Sequence[str], *, new: bool) -> None:
    """Raise ConfigError for roles of one name, and without `new` adapters for them."""
    if not new or len(set(names)) < len(names):
        raise ConfigError(
            "`roles` of vision.tokens are different names, each of which gets a new adapter, not "
            f"{list(names)}; set `lora_rank`, and leave out `adapter` and `transform`"
        )


class RoleAdapters:
    """Switches a model between the LoRA adapters of its roles, all of which learn.

    Args:
        adapted: The model of peft, with an adapter of every role's name.
        names: The roles.
    """

    def __init__(self, adapted: nn.Module, names: Sequence[str]) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.names = tuple(names)
        self.layers = [layer for layer in adapted.modules() if isinstance(layer, BaseTunerLayer)]
        self.weights: dict[str, list[nn.Parameter]] = {name: [] for name in names}
        for key, weight in adapted.named_parameters():
            for name in names:
                if f".{name}." in key and "lora_" in key:
                    # peft lets only the adapter that it switched on learn.
                    self.weights[name].append(weight.requires_grad_(True))
        self._activate(self.names[0])

    def of(self, tags: Mapping[str, str], uid: str) -> int:
        """Return the number of the role that tags name; raises ValueError for none of the roles."""
        if tags.get(ROLE) not in self.names:
            raise ValueError(
                f"the policy has adapters of the roles {', '.join(self.names)}, but the tag `role` of prompt "
                f"'{uid}' is {tags.get(ROLE)!r}; name its role in `roles`, or let the engine or the sampler "
                "tag its rows"
            )
        return self.names.index(tags[ROLE])

    def of_rows(self, rollouts: Sequence[Trajectory]) -> Tensor:
        """Return the number of the role of every row (N,)."""
        tags = [{**row.prompt.tags, **row.outcomes[-1].tags} for row in rollouts]
        return torch.tensor([self.of(t, row.prompt.uid) for t, row in zip(tags, rollouts, strict=True)])

    @contextmanager
    def acting(self, number: int) -> Iterator[None]:
        """Read and write with the adapter of a role inside the block."""
        self._activate(self.names[number])
        try:
            yield
        finally:
            self._activate(self.names[0])

    def _activate(self, name: str) -> None:
        # Not by peft's `set_adapter`, which also decides what learns.
        for layer in self.layers:
            layer._active_adapter = [name]

    def read(self, read: Read, steps: RoleSteps, extra: Set[str]) -> dict[str, Tensor]:
        """Read the rows of every role with its adapter; outputs are those of all rows, in order."""
        outputs: dict[str, Tensor] = {}
        for number in sorted(set(steps.role.tolist())):
            rows = (steps.role == number).nonzero()[:, 0]
            with self.acting(number):
                values = read(steps[rows, slice(None)], extra, None)
            for name, value in values.items():
                shape = (len(steps.role), steps.longest, *value.shape[2:])
                whole = outputs.setdefault(name, value.new_zeros(shape))
                at = rows.to(value.device)[:, None], torch.arange(value.shape[1], device=value.device)[None]
                outputs[name] = whole.index_put(at, value)
        if torch.is_grad_enabled():
            # Every process must have a gradient for every parameter, those of absent roles too.
            absent = [w for name in self.names for w in self.weights[name]]
            outputs["logp"] = outputs["logp"] + 0.0 * sum(weight.sum() for weight in absent)
        return outputs
