"""Sampling tokens from logits by the inverse CDF, so that a draw depends on the row's own stream only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSampler:
    """Temperature and truncation of token sampling; nothing is inherited from a checkpoint.

    Args:
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Nucleus sampling: the most likely tokens of this total probability, in (0, 1].
        top_k: The most likely k tokens; 0: all.
        min_p: Tokens of at least this share of the highest probability, in [0, 1).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, valid, wanted in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
        ):
            if not valid:
                raise ValueError(f"`{name}` must be {wanted}, not {getattr(self, name)}")

    def draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one token per row from (n, V) logits, by (n,) uniform numbers in [0, 1).

        Returns tokens, log-probabilities and entropies, (n,) each. Log-probabilities are those of the
        distribution that was drawn from; entropies are of the distribution before truncation.
        """
        logp = (logits / (self.temperature or 1.0)).log_softmax(-1)
        probability = logp.exp()
        entropy = -(probability * logp.clamp(min=-1e4)).sum(-1)
        if self.temperature == 0:
            token = logits.argmax(-1)
            return token, logp.gather(1, token[:, None])[:, 0], entropy
        cuts = self._truncated(logp, probability)
        if cuts:
            logp = logp.masked_fill(torch.stack(cuts).any(0), -torch.inf).log_softmax(-1)
            probability = logp.exp()
        token = inverse_cdf(probability, uniform)
        return token, logp.gather(1, token[:, None])[:, 0], entropy

    def _truncated(self, logp: Tensor, probability: Tensor) -> list[Tensor]:
        """Find the tokens that each rule removes, (n, V) bool. None removes the most likely token."""
        cuts = []
        if 0 < self.top_k < logp.shape[-1]:
            cuts.append(logp < logp.topk(self.top_k).values[:, -1:])
        if self.min_p > 0:
            cuts.append(probability < self.min_p * probability.max(-1, keepdim=True).values)
        if self.top_p < 1:
            ordered, order = probability.sort(-1, descending=True)
            removed = ordered.cumsum(-1) - ordered >= self.top_p
            cuts.append(torch.zeros_like(removed).scatter(1, order, removed))
        return cuts


def inverse_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """Find the token whose interval of the CDF contains the number; never one of probability 0."""
    edges = probability.cumsum(-1)
    total = edges[:, -1:]  # 1 but for rounding
    place = torch.minimum(uniform[:, None].to(edges) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(edges, place, right=True)[:, 0].clamp(max=probability.shape[-1] - 1)
