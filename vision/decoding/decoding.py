"""Reading prompts and the answers that grow behind them, a token of every row at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.core.types import Prompt, Rollouts
from mmrl.vision.decoding.prefill import MakeCache, prefill
from mmrl.vision.decoding.token_steps import FORBIDDEN, TokenPolicy, distinct_prompts
from mmrl.vision.models.processor import EncodedPrompt


@dataclass
class GenerationRequest:
    """A prompt to be answered, and which of its answers this one is. `uniform` is (T,): one number in [0, 1)
    a token."""

    prompt: Prompt
    index: int
    encoded: EncodedPrompt
    uniform: Tensor


class LogitsReader(Protocol):
    """Reads the answers of `n` rows."""

    def read(self, token: Tensor | None) -> Tensor:
        """Read the next token of every row (n,), and give the logits of the one behind it: (n, V) float32.
        None: of the first."""

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the rows, (k,), alone."""


class CachedReader:
    """Reads rows behind their prompts, as the model sees them, with one cache for all. Distinct prompts are
    computed once."""

    def __init__(
        self, policy: TokenPolicy, prompts: Sequence[EncodedPrompt], make_cache: MakeCache | None = None
    ) -> None:
        self.core, self.head = policy.core, policy.model.get_output_embeddings()
        device = self.core.get_input_embeddings().weight.device
        distinct, which = distinct_prompts(prompts)
        prefix = prefill(self.core, distinct, make_cache, share_prefix=policy.share_prefix)
        self.prefix = prefix.select(which.to(device))
        self.forbidden = torch.tensor(policy.prompt_encoder.placeholders, device=device)
        self.length = 0  # tokens read behind the prompts

    def read(self, token: Tensor | None) -> Tensor:
        """Read one token more. Before the first stands the one that the prefix holds back."""
        first, behind = self.prefix.positions[..., :1], self.prefix.positions[..., 1:]
        hidden = self.prefix.read(
            self.core,
            (self.prefix.last if token is None else token)[:, None],
            first if token is None else behind + (self.length - 1),
        )[:, -1]
        self.length += 1
        return self.head(hidden).float().index_fill(-1, self.forbidden, FORBIDDEN)

    def keep(self, rows: Tensor) -> None:
        """Drop the other rows from the cache."""
        self.prefix = self.prefix.select(rows)


class TokenEngine(Protocol):
    """What a wrapper needs of an engine whose logits it changes."""

    policy: TokenPolicy
    rollout_policy: TokenPolicy  # what answers: the policy, or it made cheaper
    cache: MakeCache | None

    def reader(self, rows: Sequence[GenerationRequest]) -> LogitsReader:
        """Begin to read rows as the engine does."""

    def decode(
        self, prompts: Sequence[Prompt], begin: Callable[[Sequence[GenerationRequest]], LogitsReader]
    ) -> Rollouts:
        """Answer every entry, in order, with the logits of a reader that `begin` makes."""


class PartialReader:
    """A branch for some rows of a batch; the others have zeros for logits."""

    def __init__(self, rows: Tensor, begin: Callable[[list[int]], CachedReader]) -> None:
        self.rows = rows  # (n,) bool
        self.branch = begin(rows.nonzero()[:, 0].tolist()) if rows.any() else None

    def read(self, token: Tensor | None) -> Tensor | float:
        """Read a token of the rows that are here: (n, V), or 0 where none is."""
        if self.branch is None:
            return 0.0
        logits = self.branch.read(token if token is None else token[self.rows])
        if self.rows.all():
            return logits
        return logits.new_zeros(len(self.rows), logits.shape[1]).index_put((self.rows,), logits)

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows of the batch."""
        inside = (self.rows.cumsum(0) - 1)[rows][self.rows[rows]]
        self.rows = self.rows[rows]
        if self.branch is not None and len(inside):
            self.branch.keep(inside)
        elif not len(inside):
            self.branch = None


class ForcedPrefixReader:
    """Makes rows begin with given tokens: until these are over, nothing else can be drawn."""

    def __init__(self, reader: LogitsReader, given: Sequence[Tensor], device: torch.device) -> None:
        self.reader = reader
        self.given = pad_sequence(list(given), batch_first=True, padding_value=-1).to(device)  # (n, T)
        self.length = 0

    def read(self, token: Tensor | None) -> Tensor:
        """Read a token, and leave only the next given one, where there is one."""
        logits = self.reader.read(token)
        if self.length < self.given.shape[1]:
            wanted = self.given[:, self.length, None]
            only = torch.full_like(logits, FORBIDDEN).scatter(1, wanted.clamp(min=0), 0.0)
            logits = torch.where(wanted >= 0, only, logits)
        self.length += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows."""
        self.reader.keep(rows)
        self.given = self.given[rows]
