"""What a doctor looks at: one small collection of a run, and questions that can be asked of it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.binding import Bound
from mmrl.config.registry import Needs
from mmrl.config.schema import Config, as_piece
from mmrl.core.protocols import Engine, Policy
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Batch
from mmrl.core.tensor import pad_to
from mmrl.core.types import Prompt, Rollouts, Unit

ADAPTER = ("lora_", "adapter")  # in the names of the parameters of adapters


@dataclass(frozen=True)
class Finding:
    """The result of a check: what is wrong, what to do about it, and where it is (file and row of data).

    A finding that is not `grave` is information.
    """

    what: str
    advice: str = ""
    place: str = ""
    grave: bool = True

    @property
    def text(self) -> str:
        """The finding in one line."""
        return f"{self.what}; {self.advice}" if self.advice else self.what


@dataclass(frozen=True)
class Examined:
    """A collection of a run under examination.

    In a glance, which costs nothing, there is no `batch`, no `plan` and nothing to ask again. `untouched`
    names trained parameters that no gradient reached; `idle` those that look like an adapter's and are not
    trained. `plan` is bytes by what takes them, `room` the bytes of the machine (0: unknown).
    """

    config: Config
    policy: Policy
    engine: Engine
    rewards: Sequence[Bound]
    needs: Needs
    rollouts: Rollouts
    table: RewardTable
    batch: Batch | None = None
    micro_batch_steps: int = 1
    untouched: Sequence[str] = ()
    idle: Sequence[str] = ()
    plan: Mapping[str, float] = field(default_factory=dict)
    room: float = 0.0
    again: Callable[..., Examined | None] = lambda **options: None  # with other options of the policy

    @property
    def prompts(self) -> list[Prompt]:
        """List the prompts, each once."""
        return list({row.prompt.uid: row.prompt for row in self.rollouts}.values())

    def replay(self, batch: Batch | None = None, *, one_by_one: bool = False) -> Tensor:
        """Ask the policy about every step, in the micro-batches that it learns with or row by row: (N, T)."""
        batch = self.batch if batch is None else batch
        cuts = batch.cuts(self.micro_batch_steps, max(self.needs.unit, Unit.ROW))
        if one_by_one:
            cuts = [(torch.tensor([row]), slice(None)) for row in range(len(batch))]
        out = torch.zeros(batch.mask.shape, dtype=torch.float64)
        with torch.no_grad():
            for rows, columns in cuts:
                said = self.policy(batch.select(rows, columns), frozenset()).logp.double().cpu()
                out[rows, columns] = pad_to(said, out[:, columns].shape[1], 1)
        return out

    def ask(self, rollouts: Rollouts) -> Tensor:
        """Ask the policy about other rows: (N, T), 0 where there is no step."""
        batch = self.policy.collate(rollouts)
        return self.replay(batch) * batch.mask.cpu()


def frozen_adapters(module: nn.Module) -> list[str]:
    """Name parameters that look like an adapter's and are not trained."""
    return [
        name
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and any(mark in name for mark in ADAPTER)
    ]


def cheapened(config: Config) -> list[str]:
    """Name the caches and transforms that the engines of rollouts have to themselves."""
    engines = config.rollout.engine if config is not None else ()
    return [
        f"{kind} {as_piece(one, kind).name}"
        for engine in engines
        for kind in ("transform", "cache")
        for one in listed(engine.options.get(kind))
    ]


def listed(given: Any) -> Sequence[Any]:
    """Read nothing, one thing or several."""
    return given if isinstance(given, list | tuple) else [given] if given else []


def spelled(names: Sequence[str], limit: int = 3) -> str:
    """List some names, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
