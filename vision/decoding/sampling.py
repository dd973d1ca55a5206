"""From logits to tokens: one uniform number a token, so that a draw depends on its row alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSampler:
    """Settings of sampling, built from zero: nothing is inherited from a checkpoint. Temperature 0 takes the
    likeliest token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
        ):
            if not good:
                raise ValueError(f"`{name}` must be {wanted}, not {getattr(self, name)}")

    def draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a token for every row: (n, V) logits and (n,) numbers in [0, 1) to tokens, log-probabilities,
        entropies, (n,) each.

        Log-probabilities are those of the distribution that was drawn from; entropies are of the one before
        it was cut.
        """
        logp = (logits / (self.temperature or 1.0)).log_softmax(-1)
        probability = logp.exp()
        entropy = -(probability * logp.clamp(min=-1e4)).sum(-1)
        if self.temperature == 0:
            token = logits.argmax(-1)
            return token, logp.gather(1, token[:, None])[:, 0], entropy
        cut = self._cut(logp, probability)
        if cut is not None:
            logp = logp.masked_fill(cut, -torch.inf).log_softmax(-1)
            probability = logp.exp()
        token = inverse_cdf(probability, uniform)
        return token, logp.gather(1, token[:, None])[:, 0], entropy

    def _cut(self, logp: Tensor, probability: Tensor) -> Tensor | None:
        """Find the tokens that are out: (n, V) bool, or None where every token is in. The likeliest is always
        in."""
        cuts = []
        if 0 < self.top_k < logp.shape[-1]:
            cuts.append(logp < logp.topk(self.top_k).values[:, -1:])
        if self.min_p > 0:
            cuts.append(probability < self.min_p * probability.max(-1, keepdim=True).values)
        if self.top_p < 1:
            ordered, order = probability.sort(-1, descending=True)
            out = ordered.cumsum(-1) - ordered >= self.top_p
            cuts.append(torch.zeros_like(out).scatter(1, order, out))
        return torch.stack(cuts).any(0) if cuts else None


def inverse_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """Find the token in whose share of [0, 1) the number falls; a token of probability 0 is never found."""
    edges = probability.cumsum(-1)
    total = edges[:, -1:]
    place = torch.minimum(uniform[:, None].to(edges) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(edges, place, right=True)[:, 0].clamp(max=probability.shape[-1] - 1)
