"""Input of checks (the rollouts of a few prompts) and their output (findings)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.plain import as_list
from mmrl.config.registry import Needs
from mmrl.config.schema import Config, as_piece
from mmrl.core.protocols import Engine, Policy, ScoresAnswers
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Batch
from mmrl.core.tensor import pad_to
from mmrl.core.types import Prompt, Rollouts, Unit


@dataclass(frozen=True)
class Finding:
    """Result of a check: the fault, advice, and the location (file and row) for a fault in data.

    `grave=False` marks mere information.
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
    """Input of startup checks: the rollouts of a few prompts, and the pieces of the run.

    During the first training step, `batch` and `memory` are empty, and `again` and `ask` return nothing.

    Args:
        batch: The training batch of the rollouts.
        credit: The advantages.
        taught: Whether the objective learns from another model than the policy, such as a teacher.
        micro_batch_steps: Steps per micro-batch.
        untouched: Names of trained parameters without a gradient.
        memory: Estimated bytes by component.
        again: Function that samples the rollouts again with other options of the policy; returns None if the
            policy does not have these options.
        ask: Function that samples one rollout per prompt, with the random streams of the step.
    """

    config: Config
    policy: Policy
    engine: Engine
    rewards: Sequence[Bound]
    needs: Needs
    rollouts: Rollouts
    table: RewardTable
    batch: Batch | None = None
    credit: RewardTable | None = None
    taught: bool = False
    micro_batch_steps: int = 1
    untouched: Sequence[str] = ()
    memory: Mapping[str, float] = field(default_factory=dict)
    again: Callable[..., Examined | None] = lambda **options: None
    ask: Callable[[Sequence[Prompt]], Rollouts] = lambda prompts: ()

    @property
    def rows(self) -> Batch:
        """The training batch; raises ValueError if there is none."""
        if self.batch is None:
            raise ValueError("the first step of a run has no batch to examine; `mmrl doctor` makes one")
        return self.batch

    @property
    def prompts(self) -> list[Prompt]:
        """The distinct prompts of the examined rollouts."""
        return list({row.prompt.uid: row.prompt for row in self.rollouts}.values())

    def replay(self, batch: Batch | None = None, *, row_by_row: bool = False) -> Tensor:
        """Compute the policy's log-probabilities (rows, steps), in micro-batches or row by row."""
        batch = self.rows if batch is None else batch
        cuts = batch.cuts(self.micro_batch_steps, max(self.needs.unit, Unit.ROW))
        if row_by_row:
            cuts = [(torch.tensor([row]), slice(None)) for row in range(len(batch))]
        out = torch.zeros(batch.mask.shape, dtype=torch.float64)
        with torch.no_grad():
            for rows, columns in cuts:
                logp = answer_scores(self.policy, batch.select(rows, columns), self.needs).double().cpu()
                out[rows, columns] = pad_to(logp, out[:, columns].shape[1], 1)
        return out

    def log_probabilities(self, rollouts: Rollouts) -> Tensor:
        """Compute the policy's log-probabilities of any rollouts: (rows, steps), 0 after the last step."""
        batch = self.policy.collate(rollouts)
        return self.replay(batch) * batch.mask.cpu()


def answer_scores(policy: Policy, batch: Batch, needs: Needs) -> Tensor:
    """Compute log-probabilities (N, T); for a reward model, whose are all 0, the sum of its scores."""
    if not isinstance(policy, ScoresAnswers):
        return policy(batch, frozenset()).logp
    found = policy(batch, needs.outputs)
    return sum(found.extra.values(), found.logp)


LOSSY = "video_pruning_rate"  # option of engines that drop video tokens


def lossy_pieces(config: Config) -> list[str]:
    """List the caches, transforms and options that make the rollout engine less exact than the policy."""
    named = [
        f"{kind} {as_piece(piece, kind).name}"
        for engine in config.rollout.engine
        for kind in ("transform", "cache")
        for piece in as_list(engine.options.get(kind) or [])
    ]
    rates = [engine.options.get(LOSSY) for engine in config.rollout.engine]
    return named + [f"{LOSSY} {rate}" for rate in rates if rate]


def spelled(names: Sequence[str], limit: int = 3) -> str:
    """Format the first `limit` names in quotes, with the number of the remaining names."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
