"""Outputs of a language model for every token: log-probability, entropy, hidden states and others."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

OF_LOGITS = frozenset(
    {"entropy", "logp_hot", "logp_cold", "sum_p2", "sum_p3", "top_k_ids", "top_k_logp", "divergence"}
)
OF_STATES = frozenset({"hidden", "hidden_sq_norm", "effective_rank"})


@dataclass(frozen=True)
class InnerOptions:
    """Options of the per-token outputs; the policy `vision.tokens` documents them."""

    hot_temperature: float = 1.2
    cold_temperature: float = 0.8
    top_k: int = 20
    rank_stride: int = 40


USUAL = InnerOptions()


def of_logits(
    logits: Tensor,
    ids: Tensor,
    extra: Set[str],
    options: InnerOptions = USUAL,
) -> dict[str, Tensor]:
    """Compute "logp" (M,) of M tokens from logits (M, V), and the outputs of `OF_LOGITS` in `extra`.

    The logits are already divided by the sampling temperature. "logp" and "entropy" have gradients, the
    others are constants. `divergence.py` computes the output "divergence".

    - entropy: -sum p log p over the whole vocabulary, in nats;
    - logp_hot, logp_cold: log-probability at `hot_temperature` or `cold_temperature` times the sampling
      temperature;
    - sum_p2, sum_p3: sums of p^2 and of p^3 over the vocabulary;
    - top_k_ids, top_k_logp: (M, k), the most likely tokens and their log-probabilities, best first.
    """
    norm = logits.logsumexp(-1)
    values = {"logp": logits.gather(-1, ids[:, None])[:, 0] - norm}
    if "entropy" in extra:  # H = -sum p log p = norm - sum p logit
        values["entropy"] = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)
    return values | _constants(logits.detach(), norm.detach(), ids, extra, options)


@torch.no_grad()
def _constants(
    logits: Tensor, norm: Tensor, ids: Tensor, extra: Set[str], options: InnerOptions
) -> dict[str, Tensor]:
    values = {}
    times = {"logp_hot": options.hot_temperature, "logp_cold": options.cold_temperature}
    for name in extra & times.keys():
        tempered = logits / times[name]
        values[name] = tempered.gather(-1, ids[:, None])[:, 0] - tempered.logsumexp(-1)
    for name, power in (("sum_p2", 2), ("sum_p3", 3)):
        if name in extra:
            values[name] = (power * (logits - norm[:, None])).exp().sum(-1)
    if extra & {"top_k_ids", "top_k_logp"}:
        best = logits.topk(min(options.top_k, logits.shape[-1]))
        both = {"top_k_ids": best.indices, "top_k_logp": best.values - norm[:, None]}
        values |= {name: both[name] for name in extra & both.keys()}
    return values


def of_states(
    hidden: Tensor, length: Tensor, extra: Set[str], options: InnerOptions = USUAL
) -> dict[str, Tensor]:
    """Compute the outputs of `OF_STATES` in `extra` from hidden states (N, T, W) of rows of `length` (N,).

    - hidden: (N, T, W), the hidden states that predict each token, with gradients;
    - hidden_sq_norm: (N, T), their squared norms, constant;
    - effective_rank: (N, T), the effective rank of all states up to a step, constant (`effective_ranks`).
    """
    values: dict[str, Tensor] = {"hidden": hidden} if "hidden" in extra else {}
    exact = torch.promote_types(hidden.dtype, torch.float32)
    with torch.no_grad():
        if "hidden_sq_norm" in extra:
            values["hidden_sq_norm"] = hidden.to(exact).square().sum(-1)
        if "effective_rank" in extra:
            ranks = hidden.new_full(hidden.shape[:2], torch.nan, dtype=exact)
            for row, size in enumerate(length.tolist()):
                ranks[row, :size] = effective_ranks(hidden[row, :size], options.rank_stride).to(exact)
            values["effective_rank"] = ranks
    return values


def effective_ranks(states: Tensor, stride: int) -> Tensor:
    """Compute the effective rank of the first t states, for t from 1 to T, from states (T, W).

    Returns (T,) float64: exp(-sum p log p), where p are the singular values of the centred states divided by
    their sum (arXiv 2509.23808); 0 for one state. A value is costly (eigenvalues of a Gram matrix), so only
    every `stride`-th one is computed, and the last one unless the one before it was. Other entries are NaN.
    """
    ranks = torch.full((len(states),), torch.nan, dtype=torch.float64, device=states.device)
    ends = list(range(stride, len(states) + 1, stride))
    if len(states) and (not ends or ends[-1] < len(states) - 1):
        ends.append(len(states))
    states = states.double()
    gram = states @ states.T
    for end in ends:
        part = gram[:end, :end]
        mean = part.mean(0)
        # Centred Gram matrix: (x_i - m)(x_j - m) = x_i x_j - x_i m - m x_j + m m
        squared = torch.linalg.eigvalsh(part - mean - mean[:, None] + mean.mean())
        squared = squared * (squared > end * torch.finfo(squared.dtype).eps * part.diagonal().amax())
        values = squared.sqrt()  # eigenvalues below the rounding error are now 0
        share = values / (values.sum() + 1e-8)
        entropy = -(share * (share + 1e-8).log()).sum()
        ranks[end - 1] = entropy.exp() if end > 1 else 0.0
    return ranks
