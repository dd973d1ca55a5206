"""Losses of critics: regress values or success probabilities on targets from advantage functions."""

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
    """Half the squared error between a critic's values and their targets (PPO's value loss).

    The critic's advantage functions compute the targets, usually `lambda_returns`. The metrics are the means
    of values, targets and squared errors.

    Args:
        cliprange_value: Clip range for the change of a value since the rollout. The loss is the larger error
            of the clipped and the unclipped value (arXiv 1707.06347, OpenAI's code; TRL's name). None: no
            clipping.
        aggregation: Function that returns the weight of every step in the loss.
    """

    cliprange_value: PositiveFloat | None = None
    aggregation: Callable = Piece("step_mean")

    @property
    def needs(self) -> Needs:
        """The needed outputs: current values and, with clipping, the values at the time of the rollout."""
        old = {} if self.cliprange_value is None else {"old": frozenset({"value"})}
        return Needs(outputs=frozenset({"value"}), others=old) | self.aggregation.needs

    def weigh(self, batch: Batch) -> Tensor:
        """Return the weight (N, T) of every step; the loss is the weighted sum of the losses of all steps."""
        return self.aggregation(batch)

    def __call__(self, new: StepOutput, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the contributions of a micro-batch to the loss and the metrics of the update."""
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
    """Cross-entropy between a critic's success probabilities and their targets.

    Use it for `vision.critic` with `probability: true`. The critic's advantage functions compute the targets:
    rewards from 0 to 1 or their means, such as from `value_targets`. This loss trains the verifier of PAV
    (arXiv 2410.08146) and V_0 (arXiv 2602.03584; without its ranking loss over prompts). The metrics are the
    means of probabilities, targets, squared errors (Brier score) and cross-entropy.

    Args:
        aggregation: Function that returns the weight of every step in the loss.
    """

    aggregation: Callable = Piece("step_mean")

    @property
    def needs(self) -> Needs:
        """The needed output: the current logits of the critic."""
        return Needs(outputs=frozenset({"value_logit"})) | self.aggregation.needs

    def weigh(self, batch: Batch) -> Tensor:
        """Return the weight (N, T) of every step; raises `ValueError` for targets outside of [0, 1]."""
        targets = batch.advantage[batch.mask > 0]
        if len(targets) and not (targets.min() >= 0 and targets.max() <= 1):
            raise ValueError(
                "`value_cross_entropy` learns rewards from 0 to 1, but they go from "
                f"{targets.min().item():g} to {targets.max().item():g}; use `value_regression` for others"
            )
        return self.aggregation(batch)

    def __call__(self, new: StepOutput, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the contributions of a micro-batch to the loss and the metrics of the update."""
        logit, target = new.extra["value_logit"], batch.advantage
        # - t log s(z) - (1 - t) log(1 - s(z)) = log(1 + e^z) - t z
        loss = softplus(logit) - target * logit
        value, steps = logit.sigmoid(), batch.totals.steps or 1.0
        numbers = {"value/mean": value, "return/mean": target, "cross_entropy": loss}
        numbers["squared_error"] = (value - target).square()
        metrics = {name: (n.detach() * batch.mask).sum() / steps for name, n in numbers.items()}
        return (loss * batch.weight).sum(), metrics
