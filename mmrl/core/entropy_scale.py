"""HAPO's scale of entropies, which temperatures, clip ranges and advantages follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EntropyScale:
    """HAPO's scale of entropies: the distance of log H to a quantile, over the largest on its side.

    Args:
        middle: The quantile of log H.
        spread: Root mean square distance to it.
        high: Largest distance above it, in units of `spread`.
        low: Largest distance below it, above 0.
    """

    middle: float
    spread: float
    high: float
    low: float

    @staticmethod
    def of(entropy: Tensor, pivot: float) -> EntropyScale:
        """Measure the scale of the entropies (M,) of a collection, one at least."""
        ordered = entropy.double().clamp(min=1e-8).log().sort().values
        away = ordered - ordered[round(pivot * (len(ordered) - 1))]
        spread = away.square().mean().clamp(min=1e-8).sqrt()
        ends = (float(away[-1] / spread), float(-away[0] / spread))
        return EntropyScale(float(ordered[0] - away[0]), float(spread), *(max(end, 1e-8) for end in ends))

    def __call__(self, entropy: Tensor) -> Tensor:
        """Place entropies on the scale; those of the collection that it is of are from -1 to 1."""
        h = (entropy.clamp(min=1e-8).log() - self.middle) / self.spread
        return torch.where(h > 0, h / self.high, h / self.low)
