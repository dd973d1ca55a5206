"""Step-by-step decoding of a batch of answers: readers turn the next tokens of all rows into logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mmrl.core.types import Prompt
from mmrl.runtime.output_head import OutputHead
from mmrl.vision.decoding.prefill import MakeCache, prefill
from mmrl.vision.decoding.token_steps import FORBIDDEN, distinct_prompts
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt

COMPACT = 8  # finished rows leave the batch once they are one in this many


def draw_tokens(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row from (n, V) logits by the inverse CDF, with the options of `vision.generate`.

    A row's token depends on its own logits and `uniform` number in [0, 1) alone, (n,). Returns tokens,
    log-probabilities and entropies, (n,) each: log-probabilities of the distribution that was drawn from,
    entropies of the one before truncation.
    """
    logp = (logits / (temperature or 1.0)).log_softmax(-1)  # greedy: the distribution at temperature 1
    probability = logp.exp()
    entropy = -(probability * logp.clamp(min=-1e4)).sum(-1)  # a forbidden token counts as 0, not as NaN
    if temperature == 0:
        token = logits.argmax(-1)
        return token, logp.gather(1, token[:, None])[:, 0], entropy
    cuts = []  # tokens that a rule removes, (n, V) bool; no rule removes the most likely one
    if 0 < top_k < logp.shape[-1]:
        cuts.append(logp < logp.topk(top_k).values[:, -1:])  # ties with the k-th token stay
    if min_p > 0:
        cuts.append(probability < min_p * probability.max(-1, keepdim=True).values)
    if top_p < 1:
        ordered, order = probability.sort(-1, descending=True)
        removed = ordered.cumsum(-1) - ordered >= top_p  # the likelier tokens already reach top_p
        cuts.append(torch.zeros_like(removed).scatter(1, order, removed))
    if cuts:
        # Each rule looks at the distribution before truncation; what is left is normalised once.
        logp = logp.masked_fill(torch.stack(cuts).any(0), -torch.inf).log_softmax(-1)
        probability = logp.exp()
    token = inverse_cdf(probability, uniform)
    return token, logp.gather(1, token[:, None])[:, 0], entropy


def inverse_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """Find the token whose interval of the CDF contains the number; never one of probability 0."""
    edges = probability.cumsum(-1)
    total = edges[:, -1:]  # 1 but for rounding
    # Below the last edge, even where the product rounds up to it.
    place = torch.minimum(uniform[:, None].to(edges) * total, torch.nextafter(total, torch.zeros_like(total)))
    # `right` skips the empty intervals of tokens with probability 0.
    return torch.searchsorted(edges, place, right=True)[:, 0].clamp(max=probability.shape[-1] - 1)


@dataclass
class GenerationRequest:
    """A prompt to answer.

    Args:
        prompt: The prompt.
        index: The number of this answer to it.
        encoded: What the model reads.
        uniform: A number (T,) in [0, 1) for every token that may be drawn.
        on_stop: Called with the tokens (t,) of the answer as soon as its end is drawn, while others of the
            batch are still generated; never for an answer that ends at its limit.
    """

    prompt: Prompt
    index: int
    encoded: EncodedPrompt
    uniform: Tensor
    on_stop: Callable[[Tensor], None] | None = None


class LogitsReader(Protocol):
    """Gives next-token logits of `n` growing rows."""

    def read(self, token: Tensor | None) -> Tensor:
        """Append a token to every row (n,), and return the next logits (n, V) float32; None: the first."""

    def keep(self, rows: Tensor) -> None:
        """Continue with the rows of these indices (k,) only."""


BeginReading = Callable[[Sequence[GenerationRequest]], LogitsReader]


class CachedReader:
    """Runs rows through a model with a KV cache; every distinct prompt is prefilled once."""

    def __init__(
        self, policy: TokenPolicy, prompts: Sequence[EncodedPrompt], make_cache: MakeCache | None = None
    ) -> None:
        distinct, which = distinct_prompts(prompts)
        prefix = prefill(policy.core, distinct, make_cache, share_prefix=policy.share_prefix)
        self.prefix = prefix.select(which.to(prefix.last.device))
        self.head = OutputHead(policy.model)
        placeholders = policy.prompt_encoder.placeholders  # none of a language model: dtype is not inferred
        self.forbidden = torch.tensor(placeholders, dtype=torch.int64, device=prefix.last.device)

    def read(self, token: Tensor | None) -> Tensor:
        """Run one token per row; the first is the last token of the prompt, which is not in the prefix."""
        return self.logits(self.prefix.read((self.prefix.last if token is None else token)[:, None])[:, -1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the next logits (n, V) float32 from states (n, width)."""
        return self.head(hidden).float().index_fill(-1, self.forbidden, FORBIDDEN)

    def keep(self, rows: Tensor) -> None:
        """Remove the other rows from the cache."""
        self.prefix = self.prefix.select(rows)
