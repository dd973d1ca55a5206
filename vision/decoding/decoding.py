"""Token sampling, and readers that compute the next logits of a batch of growing answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.core.types import Outcome, Prompt, Trajectory
from mmrl.runtime.output_head import OutputHead
from mmrl.vision.decoding.prefill import MakeCache, prefill
from mmrl.vision.decoding.token_steps import FORBIDDEN, TokenRow, distinct_prompts
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder

COMPACT = 8  # finished rows are removed as soon as they are 1 / COMPACT of the batch


def draw_tokens(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row from logits (n, V) with the inverse CDF.

    `uniform` (n,) holds random numbers in [0, 1). The token of a row depends only on the logits and the
    random number of this row. The engine `vision.generate` documents the options.

    Returns:
        Tokens (n,), their log-probabilities (n,) under the truncated distribution, and entropies (n,) of the
        distribution before truncation.
    """
    logp = (logits / (temperature or 1.0)).log_softmax(-1)  # 0 (greedy) counts as 1 here
    probability = logp.exp()
    entropy = -(probability * logp.clamp(min=-1e4)).sum(-1)  # a forbidden token adds 0, not NaN
    if temperature == 0:
        token = logits.argmax(-1)
        return token, logp.gather(1, token[:, None])[:, 0], entropy
    cuts = []  # (n, V) bool masks of removed tokens; no rule removes the most likely token
    if 0 < top_k < logp.shape[-1]:
        cuts.append(logp < logp.topk(top_k).values[:, -1:])  # ties with the k-th token stay
    if min_p > 0:
        cuts.append(probability < min_p * probability.max(-1, keepdim=True).values)
    if top_p < 1:
        ordered, order = probability.sort(-1, descending=True)
        removed = ordered.cumsum(-1) - ordered >= top_p  # more likely tokens already reach top_p
        cuts.append(torch.zeros_like(removed).scatter(1, order, removed))
    if cuts:
        # Every rule applies to the untruncated distribution; the remaining tokens are normalised once.
        logp = logp.masked_fill(torch.stack(cuts).any(0), -torch.inf).log_softmax(-1)
        probability = logp.exp()
    token = inverse_cdf(probability, uniform)
    return token, logp.gather(1, token[:, None])[:, 0], entropy


def inverse_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """Sample tokens (n,) by inverse CDF of `probability` (n, V); never pick a token of probability 0."""
    edges = probability.cumsum(-1)
    total = edges[:, -1:]  # 1, up to rounding errors
    # Clamp below the last edge, in case the product rounds up to it.
    place = torch.minimum(uniform[:, None].to(edges) * total, torch.nextafter(total, torch.zeros_like(total)))
    # `right` skips the empty intervals of tokens with probability 0.
    return torch.searchsorted(edges, place, right=True)[:, 0].clamp(max=probability.shape[-1] - 1)


@dataclass
class GenerationRequest:
    """One answer to generate.

    Args:
        prompt: The prompt.
        index: Index of this answer among all answers to the prompt.
        encoded: The prompt as model inputs.
        uniform: Random numbers (T,) in [0, 1), one per token; T is the maximum length of the answer.
        on_stop: Called with the tokens (t,) of the answer as soon as its end is sampled, while other rows of
            the batch continue; not called for an answer that reaches the maximum length.
    """

    prompt: Prompt
    index: int
    encoded: EncodedPrompt
    uniform: Tensor
    on_stop: Callable[[Tensor], None] | None = None


class LogitsReader(Protocol):
    """Interface of readers, which compute the next-token logits of n growing answers (rows)."""

    def read(self, token: Tensor | None) -> Tensor:
        """Append one token per row (n,), None in the first call; return the next logits (n, V), float32."""

    def keep(self, rows: Tensor) -> None:
        """Keep only the answers (rows) with these indices (k,) in the batch."""


BeginReading = Callable[[Sequence[GenerationRequest]], LogitsReader]


def answer_row(
    encoder: PromptEncoder,
    temperature: float,
    prompt: Prompt,
    encoded: EncodedPrompt,
    notes: dict[str, Tensor],
    stopped: bool,
    chosen: Tensor | None = None,
    recorded: Mapping[str, float] = MappingProxyType({}),
) -> Trajectory:
    """Build the training row of a sampled answer.

    Args:
        encoder: Encoder of the policy, which decodes the tokens.
        temperature: Sampling temperature; 0: greedy.
        prompt: The prompt.
        encoded: The encoded prompt.
        notes: Maps names to values (T,), one per token; `token` holds the token ids.
        stopped: Whether an end token or a stop string ended the answer, not the length limit.
        chosen: (T,) bool, False for tokens that were not sampled; None: all were sampled.
        recorded: Maps names to scalars that are stored with the outcome.
    """
    ids = notes["token"]
    text, finish = encoder.text(ids), "stop" if stopped else "length"
    outcome = Outcome(text=text, end=len(ids), tags={"finish": finish}, recorded=recorded)
    # Greedy answers are trained on at temperature 1, at which their `logp` was computed.
    temperature = temperature or 1.0
    # In float64, so that a replayed row has the same temperature.
    notes = {**notes, "temperature": torch.full((len(ids),), temperature, dtype=torch.float64)}
    steps = TokenRow(encoded, ids, temperature, chosen)
    return Trajectory(prompt, prompt.uid, (outcome,), steps, len(ids), notes)


def first_tokens(tokenizer: Any, words: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return, for each list of words, the token ids of the words that are a single token.

    Raises `ConfigError` if a list has no such word, or if two lists have a token in common.
    """
    ids = [[tokenizer(word, add_special_tokens=False)["input_ids"] for word in listed] for listed in words]
    tokens = [sorted({word[0] for word in listed if len(word) == 1}) for listed in ids]
    if not all(tokens) or len({t for listed in tokens for t in listed}) < sum(map(len, tokens)):
        raise ConfigError(
            f"one of each of {[list(w) for w in words]} must be a token of its own, so that the first "
            "token of an answer tells them apart"
        )
    return tokens


class CachedReader:
    """Computes logits with a KV cache; every distinct prompt is prefilled once for all its rows."""

    def __init__(
        self, policy: TokenPolicy, prompts: Sequence[EncodedPrompt], make_cache: MakeCache | None = None
    ) -> None:
        distinct, which = distinct_prompts(prompts)
        prefix = prefill(policy.core, distinct, make_cache, share_prefix=policy.share_prefix)
        self.prefix = prefix.select(which.to(prefix.last.device))
        self.head = OutputHead(policy.model)
        placeholders = policy.prompt_encoder.placeholders  # int64 even if empty
        self.forbidden = torch.tensor(placeholders, dtype=torch.int64, device=prefix.last.device)

    def read(self, token: Tensor | None) -> Tensor:
        """Run one token per row and return logits (n, V); the first call runs the last token of prompts."""
        return self.logits(self.prefix.read((self.prefix.last if token is None else token)[:, None])[:, -1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the next logits (n, V) float32 from hidden states (n, width)."""
        return self.head(hidden).float().index_fill(-1, self.forbidden, FORBIDDEN)

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows with these indices (k,) in the cache."""
        self.prefix = self.prefix.select(rows)
