"""Step-by-step decoding of a batch of answers: readers turn the next tokens of all rows into logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.core.types import Prompt
from mmrl.vision.decoding.prefill import MakeCache, prefill
from mmrl.vision.decoding.token_steps import FORBIDDEN, distinct_prompts
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt

# ---- sampling tokens from logits by the inverse cdf, so that a draw depends on the row's own st


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


@dataclass
class GenerationRequest:
    """A prompt to answer, the number of this answer to it, and `uniform` (T,) numbers in [0, 1)."""

    prompt: Prompt
    index: int
    encoded: EncodedPrompt
    uniform: Tensor


def split_in_halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], dict[str, int]]:
    """Split the entries of every prompt: the first half (rounded up), and the size of the second by id."""
    distinct = {prompt.uid: prompt for prompt in prompts}
    counts = Counter(prompt.uid for prompt in prompts)
    first = [prompt for uid, prompt in distinct.items() for _ in range(counts[uid] - counts[uid] // 2)]
    return first, {uid: count // 2 for uid, count in counts.items()}


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
        self.core, self.head = policy.core, policy.model.get_output_embeddings()
        device = self.core.get_input_embeddings().weight.device
        distinct, which = distinct_prompts(prompts)
        prefix = prefill(self.core, distinct, make_cache, share_prefix=policy.share_prefix)
        self.prefix = prefix.select(which.to(device))
        self.forbidden = torch.tensor(policy.prompt_encoder.placeholders, device=device)
        self.length = 0  # forward passes after the prefill

    def read(self, token: Tensor | None) -> Tensor:
        """Run one token per row; the first is the last token of the prompt, which is not in the prefix."""
        last, first = self.prefix.positions[..., :1], self.prefix.positions[..., 1:]
        hidden = self.prefix.read(
            self.core,
            (self.prefix.last if token is None else token)[:, None],
            last if token is None else first + (self.length - 1),
        )[:, -1]
        self.length += 1
        return self.head(hidden).float().index_fill(-1, self.forbidden, FORBIDDEN)

    def keep(self, rows: Tensor) -> None:
        """Remove the other rows from the cache."""
        self.prefix = self.prefix.select(rows)


class PartialReader:
    """Reads only the rows of a batch that need it; the others get logits of 0."""

    def __init__(self, rows: Tensor, begin: Callable[[list[int]], LogitsReader]) -> None:
        self.rows = rows  # (n,) bool
        self.reader = begin(rows.nonzero()[:, 0].tolist()) if rows.any() else None

    def read(self, token: Tensor | None) -> Tensor | float:
        """Read a token of the rows that need it: (n, V), or the number 0 if no row does."""
        if self.reader is None:
            return 0.0
        logits = self.reader.read(token if token is None else token[self.rows])
        if self.rows.all():
            return logits
        return logits.new_zeros(len(self.rows), logits.shape[1]).index_put((self.rows,), logits)

    def keep(self, rows: Tensor) -> None:
        """Continue with some rows of the batch."""
        # The wrapped reader numbers its own rows: those that need it, in order.
        inside = (self.rows.cumsum(0) - 1)[rows][self.rows[rows]]
        self.rows = self.rows[rows]
        if not len(inside):
            self.reader = None
        elif self.reader is not None:
            self.reader.keep(inside)


class ForcedPrefixReader:
    """Forces rows to start with given tokens: until those end, every other token has probability 0."""

    def __init__(self, reader: LogitsReader, forced: Sequence[Tensor], device: torch.device) -> None:
        self.reader = reader
        self.forced = pad_sequence(list(forced), batch_first=True, padding_value=-1).to(device)  # (n, T)
        self.length = 0

    def read(self, token: Tensor | None) -> Tensor:
        """Read a token, and mask all logits but that of the next forced token of a row."""
        logits = self.reader.read(token)
        if self.length < self.forced.shape[1]:
            wanted = self.forced[:, self.length, None]
            only = torch.full_like(logits, FORBIDDEN).scatter(1, wanted.clamp(min=0), 0.0)
            logits = torch.where(wanted >= 0, only, logits)
        self.length += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Continue with some rows."""
        self.reader.keep(rows)
        self.forced = self.forced[rows]
