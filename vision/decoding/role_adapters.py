"""LoRA adapters of several roles over one base model; the tag `role` of a row selects its adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.core.types import Trajectory
from mmrl.vision.decoding.token_steps import TokenSteps
from mmrl.vision.models import loading
from mmrl.vision.models.trained_part import ReadSteps, TrainedPart

ROLE = "role"  # tag of outcomes and prompts that names their role


@dataclass(frozen=True, eq=False)
class RoleSteps(TokenSteps):
    """Token steps with the index of each row's adapter: `role` (N,)."""

    role: Tensor = field(kw_only=True)

    @staticmethod
    def of(steps: TokenSteps, role: Tensor) -> RoleSteps:
        """Add the role indices (N,) of the rows to steps."""
        return RoleSteps(
            **{place.name: getattr(steps, place.name) for place in fields(TokenSteps)}, role=role
        )

    def __getitem__(self, cut: tuple[Tensor, slice]) -> RoleSteps:
        return RoleSteps.of(super().__getitem__(cut), self.role[cut[0]])


def check_roles(names: Sequence[str], *, new: bool) -> None:
    """Raise ConfigError for equal names, or if the policy's options do not create new adapters (`new`)."""
    if not new or len(set(names)) < len(names):
        raise ConfigError(
            "`roles` of vision.tokens are different names, each of which gets a new adapter, not "
            f"{list(names)}; set `lora_rank`, and leave out `adapter` and `transform`"
        )


class RoleAdapters(TrainedPart):
    """LoRA adapters of several roles. All of them are trained; one is active at a time.

    Args:
        adapted: The peft model, with one adapter per role; an adapter has the name of its role.
        names: Names of the roles.
    """

    name = "adapters of several roles"
    cannot_merge = "adapters of several roles cannot be merged into one model; use them with peft"

    def __init__(self, adapted: nn.Module, names: Sequence[str]) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.adapted, self.names = adapted, tuple(names)
        self.layers = [layer for layer in adapted.modules() if isinstance(layer, BaseTunerLayer)]
        self.weights: dict[str, list[nn.Parameter]] = {name: [] for name in names}
        for key, weight in adapted.named_parameters():
            for name in names:
                if f".{name}." in key and "lora_" in key:
                    # All roles are trained, but peft sets `requires_grad` only for the active adapter.
                    self.weights[name].append(weight.requires_grad_(True))
        self._activate(self.names[0])

    def of(self, tags: Mapping[str, str], uid: str) -> int:
        """Return the index of the role that the tag `role` names; raise ValueError for an unknown role."""
        if tags.get(ROLE) not in self.names:
            raise ValueError(
                f"the policy has adapters of the roles {', '.join(self.names)}, but the tag `role` of prompt "
                f"'{uid}' is {tags.get(ROLE)!r}; name its role in `roles`, or let the engine or the sampler "
                "tag its rows"
            )
        return self.names.index(tags[ROLE])

    def of_rows(self, rollouts: Sequence[Trajectory]) -> Tensor:
        """Return the role index (N,) of every row."""
        tags = [{**row.prompt.tags, **row.outcomes[-1].tags} for row in rollouts]
        return torch.tensor([self.of(t, row.prompt.uid) for t, row in zip(tags, rollouts, strict=True)])

    @contextmanager
    def acting(self, number: int) -> Iterator[None]:
        """Activate the adapter of a role inside the context."""
        self._activate(self.names[number])
        try:
            yield
        finally:
            self._activate(self.names[0])

    def _activate(self, name: str) -> None:
        # peft's `set_adapter` would also change `requires_grad`.
        for layer in self.layers:
            layer._active_adapter = [name]

    def collate(self, steps: TokenSteps, rollouts: Sequence[Trajectory]) -> RoleSteps:
        """Add the role index of every row to the steps."""
        return RoleSteps.of(steps, self.of_rows(rollouts))

    def save(self, folder: Path) -> None:
        """Write every adapter to its own subfolder."""
        loading.save_adapter(self.adapted, folder)

    def load(self, folder: Path) -> None:
        """Load the adapters that `save` wrote, bit for bit."""
        for name in self.names:
            loading.load_adapter_weights(self.adapted, folder / name, name)

    def read(
        self, read: ReadSteps, steps: RoleSteps, outputs: Set[str], teacher: object
    ) -> dict[str, Tensor]:
        """Compute the outputs of all rows, each with the adapter of its role."""
        joined: dict[str, Tensor] = {}
        for number in sorted(set(steps.role.tolist())):
            rows = (steps.role == number).nonzero()[:, 0]
            with self.acting(number):
                values = read(steps[rows, slice(None)], outputs, None)
            for name, value in values.items():
                shape = (len(steps.role), steps.longest, *value.shape[2:])
                whole = joined.setdefault(name, value.new_zeros(shape))
                at = rows.to(value.device)[:, None], torch.arange(value.shape[1], device=value.device)[None]
                joined[name] = whole.index_put(at, value)
        if torch.is_grad_enabled():
            # Add 0 times every adapter: every process needs gradients of all, even of roles without rows.
            absent = [w for name in self.names for w in self.weights[name]]
            joined["logp"] = joined["logp"] + 0.0 * sum(weight.sum() for weight in absent)
        return joined
