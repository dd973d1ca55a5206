"""Objectives of critics: regression of values, or of probabilities, on what the chain gives every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.config.ranges import PositiveFloat
from mmrl.config.registry import Needs, objective
from mmrl.config.schema import Piece
from mmrl.core.step_table import Batch, StepOutput


@objective
@dataclass(frozen=True, kw_only=True)
class ValueRegression:
    """Minimise half the squared distance of a critic's values to what its chain gives (PPO's value loss).

    The targets are usually those of `lambda_returns`. The metrics are the means of values, of targets and of
    squared distances.

    Args:
        cliprange_value: A value that moves further than this from that of the rollout costs at least as much
            as if it had not (arXiv 1707.06347, as OpenAI's code has it; TRL's name); None: no limit.
        aggregation: Weights of steps, division included.
    """

    cliprange_value: PositiveFloat | None = None
    aggregation: Callable = Piece("step_mean")

    @property
    def needs(self) -> Needs:
        """The values of now and, with a limit, those of the rollout."""
        old = {} if self.cliprange_value is None else {"old": frozenset({"value"})}
        return Needs(outputs=frozenset({"value"}), others=old) | self.aggregation.needs

    def weigh(self, batch: Batch) -> Tensor:
        """Weigh every step: (N, T), division included."""
        return self.aggregation(batch)

    def __call__(self, new: StepOutput, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss of a micro-batch and its metrics, both as shares of the whole update."""
        value, target = new.extra["value"], batch.advantage
        error = (value - target).square()
        if self.cliprange_value is not None:
            old = batch.by("old", new).extra["value"]
            near = old + (value - old).clamp(-self.cliprange_value, self.cliprange_value)
            error = torch.maximum(error, (near - target).square())
        steps = batch.totals.steps or 1.0
        numbers = {"value/mean": value, "return/mean": target, "squared_error": (value - target).square()}
        metrics = {name: (n.detach() * batch.mask).sum() / steps for name, n in numbers.items()}
        return (0.5 * error * batch.weight).sum(), metrics


@objective
@dataclass(frozen=True, kw_only=True)
class ValueCrossEntropy:
    """Minimise the cross-entropy between a critic's probabilities of success and what its chain gives.

    For `vision.critic` with `probability: true`. A target is a reward from 0 to 1, or a mean of such, as
    `value_targets` gives them: PAV's verifier (arXiv 2410.08146), V_0 (arXiv 2602.03584; without its ranking
    loss, which compares prompts of a batch). The metrics are the means of probabilities, of targets, of their
    squared distances (the Brier score) and of the cross-entropy.

    Args:
        aggregation: Weights of steps, division included.
    """

    aggregation: Callable = Piece("step_mean")

    @property
    def needs(self) -> Needs:
        """The logits of now."""
        return Needs(outputs=frozenset({"value_logit"})) | self.aggregation.needs

    def weigh(self, batch: Batch) -> Tensor:
        """Weigh every step: (N, T), division included. Raises `ValueError` for targets outside 0 to 1."""
        targets = batch.advantage[batch.mask > 0]
        if len(targets) and not (targets.min() >= 0 and targets.max() <= 1):
            raise ValueError(
                "`value_cross_entropy` learns rewards from 0 to 1, but they go from "
                f"{targets.min().item():g} to {targets.max().item():g}; use `value_regression` for others"
            )
        return self.aggregation(batch)

    def __call__(self, new: StepOutput, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss of a micro-batch and its metrics, both as shares of the whole update."""
        logit, target = new.extra["value_logit"], batch.advantage
        # - t log s(z) - (1 - t) log(1 - s(z)) = log(1 + e^z) - t z
        loss = softplus(logit) - target * logit
        value, steps = logit.sigmoid(), batch.totals.steps or 1.0
        numbers = {"value/mean": value, "return/mean": target, "cross_entropy": loss}
        numbers["squared_error"] = (value - target).square()
        metrics = {name: (n.detach() * batch.mask).sum() / steps for name, n in numbers.items()}
        return (loss * batch.weight).sum(), metrics
