"""Decoding of answers that part from each other: what they share is computed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmrl.vision.decoding.decoding import COMPACT, LogitsReader, draw_tokens
from mmrl.vision.models.processor import EncodedPrompt

NO_TOKENS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Branch:
    """A row that has the first `start` tokens of an earlier branch, reads `forced` tokens, and samples.

    `forced` is (F,). `uniform` (L,) has a number in [0, 1) for every token that may be sampled. Without a
    `parent`, the number of that earlier branch, it starts from its prompt.
    """

    encoded: EncodedPrompt
    uniform: Tensor
    forced: Tensor = NO_TOKENS
    parent: int | None = None
    start: int = 0

    @property
    def given(self) -> int:
        """Tokens before the first one that is sampled."""
        return self.start + len(self.forced)

    @property
    def limit(self) -> int:
        """The most tokens that it can have."""
        return self.given + len(self.uniform)


@dataclass(frozen=True, eq=False)
class Grown:
    """The tokens (T,) of a branch from the prompt on, their log-probabilities and entropies."""

    ids: Tensor
    logp: Tensor
    entropy: Tensor
    stopped: bool  # by an end token


def families(branches: Sequence[Branch], size: int) -> Iterator[list[int]]:
    """Split branches into batches of at most `size` (0: all), with all that part from each other together."""
    root: list[int] = []
    for i, branch in enumerate(branches):
        root.append(i if branch.parent is None else root[branch.parent])
    members: dict[int, list[int]] = defaultdict(list)
    for i, first in enumerate(root):
        members[first].append(i)
    batch: list[int] = []
    for family in members.values():
        if batch and size and len(batch) + len(family) > size:
            yield batch
            batch = []
        batch = batch + family
    if batch:
        yield batch


def renumbered(branches: Sequence[Branch], batch: Sequence[int]) -> list[Branch]:
    """Take a batch of branches, whose parents are numbered in it."""
    place = {number: i for i, number in enumerate(batch)}
    chosen = [branches[i] for i in batch]
    return [b if b.parent is None else replace(b, parent=place[b.parent]) for b in chosen]


def grow(
    reader: LogitsReader, branches: Sequence[Branch], ends: Tensor, *, temperature: float, **options: float
) -> list[Grown | None]:
    """Grow branches, a token of all of them at a time; a branch joins the batch where it parts.

    So a prefix is computed once for all that share it, with any cache. `reader` has one row for every branch
    without a parent, in order, `ends` (E,) are the tokens that end an answer, and `options` are those of
    `draw_tokens`. Returns None for a branch whose parent ended before it parts.
    """
    device, width = ends.device, max(branch.limit for branch in branches)
    shape = (len(branches), width)
    ids, forced = (torch.full(shape, fill, dtype=torch.int64, device=device) for fill in (0, -1))
    uniform, logp, entropy = (torch.zeros(shape, device=device) for _ in range(3))
    joining: dict[int, list[int]] = defaultdict(list)
    for i, branch in enumerate(branches):
        forced[i, branch.start : branch.given] = branch.forced.to(device)
        uniform[i, branch.given : branch.limit] = branch.uniform.to(device)
        if branch.parent is not None:
            joining[branch.start].append(i)
    limit = torch.tensor([branch.limit for branch in branches], device=device)
    parent = [branch.parent for branch in branches]
    length = torch.zeros_like(limit)
    ended, grown = (torch.zeros(len(branches), dtype=torch.bool, device=device) for _ in range(2))
    batch = torch.tensor([i for i, p in enumerate(parent) if p is None], device=device)
    grown[batch], token = True, None
    for t in range(width):
        logits = reader.read(token)
        stay = (~ended[batch] & (limit[batch] > t)).nonzero()[:, 0]
        place = {row: i for i, row in enumerate(batch.tolist())} if joining[t] else {}
        fresh = [i for i in joining[t] if parent[i] in place and not ended[parent[i]]]
        if not fresh and not len(stay):
            break
        # Rows that ended stay until leaving pays off, because it copies the cache, and so does joining.
        if fresh or (len(batch) - len(stay)) * COMPACT >= len(batch):
            index = torch.cat([stay, stay.new_tensor([place[parent[i]] for i in fresh])])
            old, new = (torch.tensor(rows, device=device) for rows in ([parent[i] for i in fresh], fresh))
            if fresh:
                for column in (ids, logp, entropy):
                    column[new, :t] = column[old, :t]
                grown[new] = True
            if not torch.equal(index, torch.arange(len(batch), device=device)):
                reader.keep(index)
                logits = logits[index]
            batch = torch.cat([batch[stay], new.to(batch)])
        token, chosen, spread = draw_tokens(logits, uniform[batch, t], temperature=temperature, **options)
        wanted = forced[batch, t]
        given = wanted >= 0
        if given.any():
            whole = (logits[given] / (temperature or 1.0)).log_softmax(-1)
            token, chosen = token.clone(), chosen.clone()
            token[given] = wanted[given]
            chosen[given] = whole.gather(1, wanted[given][:, None])[:, 0]
        alive = ~ended[batch] & (limit[batch] > t)
        rows = batch[alive]
        ids[rows, t], logp[rows, t], entropy[rows, t] = (
            token[alive],
            chosen[alive].float(),
            spread[alive].float(),
        )
        length[rows] = t + 1
        ended[rows[torch.isin(token[alive], ends) & ~given[alive]]] = True
    columns = [column.cpu() for column in (ids, logp, entropy)]
    return [
        Grown(*(column[i, :n] for column in columns), stopped) if there else None
        for i, (n, stopped, there) in enumerate(
            zip(length.tolist(), ended.tolist(), grown.tolist(), strict=True)
        )
    ]
