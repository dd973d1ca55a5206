"""Decoding of answers that branch off from other answers; common prefixes are computed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.core.progress import advance
from mmrl.core.types import Outcome, Prompt
from mmrl.vision.decoding.decoding import COMPACT, LogitsReader, draw_tokens
from mmrl.vision.decoding.stop_strings import StopStrings
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder

NO_TOKENS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Branch:
    """An answer that continues an earlier branch, first with forced and then with sampled tokens.

    Args:
        encoded: The prompt.
        uniform: (L,) random numbers in [0, 1), one per sampled token; at most L tokens are sampled.
        forced: (F,) token ids that come before the sampled tokens.
        parent: Index of the branch that this branch continues; None: it begins after the prompt.
        start: Number of leading tokens taken from the parent.
        scored: Whether log-probabilities of the forced tokens are needed; otherwise servers leave them out.
    """

    encoded: EncodedPrompt
    uniform: Tensor
    forced: Tensor = NO_TOKENS
    parent: int | None = None
    start: int = 0
    scored: bool = True

    @property
    def given(self) -> int:
        """Number of tokens before the first sampled token."""
        return self.start + len(self.forced)

    @property
    def limit(self) -> int:
        """Maximum number of tokens, including given tokens."""
        return self.given + len(self.uniform)


@dataclass(frozen=True, eq=False)
class Grown:
    """A sampled branch: its tokens (T,) after the prompt, their log-probabilities and entropies.

    Servers compute no entropies (None), and log-probabilities of forced tokens only if `scored` (else NaN).
    """

    ids: Tensor
    logp: Tensor
    entropy: Tensor | None
    stopped: bool  # whether an end token or a stop string ended the branch

    @property
    def notes(self) -> dict[str, Tensor]:
        """Per-token values (T,) by name: "token", "logp", and "entropy" if it was computed."""
        entropy = {} if self.entropy is None else {"entropy": self.entropy}
        return {"token": self.ids, "logp": self.logp, **entropy}

    def begins(self, start: int) -> bool:
        """Whether another branch can continue this one after its first `start` tokens."""
        return not (self.stopped and len(self.ids) <= start)


def tokenized(encoder: PromptEncoder, text: str) -> Tensor:
    """Tokenize a text inside an answer (n,), without an end token."""
    return encoder.answer(text)[:-1] if text else NO_TOKENS


def right_answer(prompt: Prompt, engine: str) -> str:
    """Return the first target that is a text, else the first recorded answer; ValueError if there is none."""
    match prompt.target, prompt.answers:
        case (str(text), _) | ((str(text), *_), _) | (_, (Outcome(text=str(text)), *_)) if text:
            return text
    raise ValueError(
        f"`{engine}` with `score_target` wants a right answer as text, but the target of prompt "
        f"'{prompt.uid}' is {prompt.target!r} and it has {len(prompt.answers)} recorded answers; add "
        "recorded answers, or leave `score_target` out"
    )


def target_scores(logp: Tensor) -> dict[str, float]:
    """Return two means over the token probabilities of an answer, given its log-probabilities (n,).

    `answer_likelihood` is the geometric mean, which IGPO reads (arXiv 2510.14967); `answer_probability` is
    the arithmetic mean, which SPAE reads (arXiv 2601.03823).
    """
    logp = logp.double()
    return {"answer_likelihood": float(logp.mean().exp()), "answer_probability": float(logp.exp().mean())}


@torch.no_grad()
def grow_with(
    engine: Any,
    branches: Sequence[Branch],
    *,
    temperature: float | None = None,
    batch_size: int = 0,
) -> list[Grown | None]:
    """Sample branches with the settings of an engine; compute their common prefixes once.

    Args:
        engine: The engine `vision.generate`.
        branches: Branches to sample; a parent comes before its children.
        temperature: Replaces the temperature of the engine, unless None.
        batch_size: Replaces the batch size of the engine, unless 0.
    """
    device = engine.policy.core.get_input_embeddings().weight.device
    ends = torch.tensor(engine.policy.prompt_encoder.end, device=device)
    options: dict[str, Any] = {"top_p": engine.top_p, "top_k": engine.top_k, "min_p": engine.min_p}
    options["temperature"] = engine.temperature if temperature is None else temperature
    grown: list[Grown | None] = [None] * len(branches)
    with engine.running():
        for batch in families(branches, batch_size or engine.batch_size):
            chosen = renumbered(branches, batch)
            reader = engine.reader([branch.encoded for branch in chosen if branch.parent is None])
            results = grow(reader, chosen, ends, engine.stops, **options)
            for number, result in zip(batch, results, strict=True):
                grown[number] = result
    return grown


def families(branches: Sequence[Branch], size: int) -> Iterator[list[int]]:
    """Yield batches of up to `size` branch indices (0: no limit), or of one root with more descendants."""
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
    """Select the branches of a batch, and convert their parents to indices within the batch."""
    place = {number: i for i, number in enumerate(batch)}
    chosen = [branches[i] for i in batch]
    return [b if b.parent is None else replace(b, parent=place[b.parent]) for b in chosen]


def grow(
    reader: LogitsReader,
    branches: Sequence[Branch],
    ends: Tensor,
    stops: StopStrings,
    *,
    temperature: float,
    **options: Any,
) -> list[Grown | None]:
    """Generate branches in one batch, computing their common prefixes once, with any KV cache.

    A branch joins the batch at the step where it leaves its parent. The result is None for a branch whose
    parent ended before that step.

    Args:
        reader: Reader with one row for every branch without a parent, in order.
        branches: The branches; a parent comes before its children.
        ends: (E,) tokens that end an answer.
        stops: Strings that end an answer.
        temperature: Sampling temperature; 0: greedy.
        **options: Other options of `draw_tokens`.
    """
    forest, token = Forest(reader, branches, ends, stops), None
    longest = max(branch.limit for branch in branches)
    for t in range(longest):
        advance("generating branches, tokens", t, longest)
        logits = forest.part(t, reader.read(token))
        if not len(logits):
            break
        numbers, forced = forest.uniform[forest.batch, t], forest.forced[forest.batch, t]
        token, logp, entropy = draw_tokens(logits, numbers, temperature=temperature, **options)
        given = forced >= 0
        if given.any():
            whole = (logits[given] / (temperature or 1.0)).log_softmax(-1)
            token, logp = token.masked_scatter(given, forced[given]), logp.clone()
            logp[given] = whole.gather(1, forced[given][:, None])[:, 0]
        forest.append(t, token, logp, entropy, given)
    return forest.grown()


class Forest:
    """State of a generation with branches; `batch[i]` is the index of the branch in row i of the reader."""

    def __init__(
        self, reader: LogitsReader, branches: Sequence[Branch], ends: Tensor, stops: StopStrings
    ) -> None:
        self.stops = stops.rows(len(branches))
        self.reader, self.ends, device = reader, ends, ends.device
        shape = (len(branches), max(branch.limit for branch in branches))
        self.ids, self.forced = (
            torch.full(shape, fill, dtype=torch.int64, device=device) for fill in (0, -1)
        )
        self.uniform, self.logp, self.entropy = (torch.zeros(shape, device=device) for _ in range(3))
        self.joining: dict[int, list[int]] = defaultdict(list)  # maps a step to the branches that begin there
        for i, branch in enumerate(branches):
            self.forced[i, branch.start : branch.given] = branch.forced.to(device)
            self.uniform[i, branch.given : branch.limit] = branch.uniform.to(device)
            if branch.parent is not None:
                self.joining[branch.start].append(i)
        self.parent = [branch.parent for branch in branches]
        self.limit = torch.tensor([branch.limit for branch in branches], device=device)
        self.length = torch.zeros_like(self.limit)
        self.ended, self.begun = (torch.zeros_like(self.limit, dtype=torch.bool) for _ in range(2))
        self.batch = torch.tensor([i for i, p in enumerate(self.parent) if p is None], device=device)
        self.begun[self.batch] = True

    @property
    def alive(self) -> Tensor:
        """Mask (b,) of the rows in the batch that are not finished."""
        return ~self.ended[self.batch] & (self.limit[self.batch] > self.length[self.batch])

    def part(self, t: int, logits: Tensor) -> Tensor:
        """Add the branches that begin after `t` tokens; they get the `logits` of their parents.

        Finished rows stay until they are 1 / COMPACT of the batch, because removing them copies the cache.
        Returns the logits (b, V) of the new batch; without rows when all branches are finished.
        """
        stay = self.alive.nonzero()[:, 0]
        place = {row: i for i, row in enumerate(self.batch.tolist())} if self.joining[t] else {}
        fresh = [i for i in self.joining[t] if self.parent[i] in place and not self.ended[self.parent[i]]]
        if not fresh and not len(stay):
            return logits[:0]
        if not fresh and (len(self.batch) - len(stay)) * COMPACT < len(self.batch):
            return logits
        old, new = (stay.new_tensor(rows) for rows in ([self.parent[i] for i in fresh], fresh))
        for column in (self.ids, self.logp, self.entropy):
            column[new, :t] = column[old, :t]
        self.stops.copy(old.tolist(), fresh)
        self.begun[new], self.length[new] = True, t
        index = torch.cat([stay, stay.new_tensor([place[self.parent[i]] for i in fresh])])
        if len(index) != len(self.batch) or not torch.equal(index, torch.arange(len(index)).to(index)):
            self.reader.keep(index)
            logits = logits[index]
        self.batch = torch.cat([self.batch[stay], new])
        return logits

    def append(self, t: int, token: Tensor, logp: Tensor, entropy: Tensor, given: Tensor) -> None:
        """Append the tokens (b,) of step `t`; forced tokens (mask `given`) do not end an answer."""
        alive = self.alive
        rows = self.batch[alive]
        for column, values in ((self.ids, token), (self.logp, logp), (self.entropy, entropy)):
            column[rows, t] = values[alive].to(column)
        self.length[rows] = t + 1
        ends = torch.isin(token[alive], self.ends) | self.stops.append(rows, token[alive])
        self.ended[rows[ends & ~given[alive]]] = True

    def grown(self) -> list[Grown | None]:
        """Return the finished branches on the CPU; None for a branch that never began."""
        columns = [column.cpu() for column in (self.ids, self.logp, self.entropy)]
        states = zip(self.length.tolist(), self.ended.tolist(), self.begun.tolist(), strict=True)
        return [
            Grown(*(column[i, :n] for column in columns), stopped) if begun else None
            for i, (n, stopped, begun) in enumerate(states)
        ]
