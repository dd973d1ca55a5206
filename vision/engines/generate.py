"""Batched sampling from a token policy with a KV cache; prompts are prefilled once."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, count, pairwise
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, ShareBelowOne
from mmrl.config.registry import engine
from mmrl.core.onednn import onednn
from mmrl.core.progress import advance
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.runtime.modules import LOW, evaluating
from mmrl.vision.decoding.decoding import (
    COMPACT,
    BeginReading,
    CachedReader,
    GenerationRequest,
    answer_row,
    draw_tokens,
    first_tokens,
)
from mmrl.vision.decoding.prefill import MakeCache
from mmrl.vision.decoding.single_step import single_steps
from mmrl.vision.decoding.stop_strings import StopStrings
from mmrl.vision.decoding.turns import Key, Turns
from mmrl.vision.models.loading import EngineModel, TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt

if TYPE_CHECKING:
    from mmrl.vision.decoding.branching import Branch, Grown


@engine(sets_tags={"finish"})
@dataclass(eq=False)
class Generate:
    """Sample answers from a token policy; a checkpoint's generation_config is not read.

    Args:
        policy: The policy.
        max_completion_length: Maximal number of tokens in an answer.
        temperature: Divides the logits; 0: greedy decoding.
        top_p: Nucleus sampling: keeps the most likely tokens up to this total probability.
        top_k: Keeps the k most likely tokens; 0: all.
        min_p: Keeps tokens with at least this fraction of the highest probability.
        batch_size: Number of answers sampled together; 0: all.
        stop_strings: Strings that end an answer and stay in it.
        confidence_top_k: Record the "confidence" of every answer, a weight for votes (SCOPE, arXiv
            2512.15146): minus the mean log-probability of the k most likely tokens, averaged over the tokens
            of each paragraph, then over paragraphs. 0: do not record it.
        cache: Function that makes a KV cache, given masks of visual tokens and of padding; None: exact cache.
        transform: Transforms of the engine's own model, which shares the weights of the policy; the policy
            itself is not transformed.
    """

    policy: TokenPolicy
    _: KW_ONLY
    stream: Stream
    max_completion_length: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0
    top_p: PositiveShare = 1.0
    top_k: NonNegativeInt = 0
    min_p: ShareBelowOne = 0.0
    batch_size: NonNegativeInt = 0
    stop_strings: tuple[str, ...] = ()
    confidence_top_k: NonNegativeInt = 0
    cache: MakeCache | None = None
    transform: tuple[Callable, ...] = ()
    notes: ClassVar[frozenset[str]] = frozenset({"logp", "entropy", "token", "temperature"})

    def __post_init__(self) -> None:
        if self.confidence_top_k == 1:
            raise ConfigError(
                "`confidence_top_k` of 1 would be higher where the model is less sure; set 2 or more, or 0"
            )
        self.more_ends: list[int] = []  # end tokens besides those of the encoder
        self.stops = StopStrings(self.stop_strings, self.policy.prompt_encoder)
        self.rollout_policy: TokenPolicy = self.policy
        if self.transform:
            self.rollout_policy = EngineModel(self.policy, self.transform)

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample an answer for every entry of `prompts`, in order."""
        return self.decode(prompts)

    def reader(self, prompts: Sequence[EncodedPrompt]) -> CachedReader:
        """Create a reader with one row per prompt, using the engine's model and cache."""
        return CachedReader(self.rollout_policy, prompts, self.cache)

    def turns(self) -> Turns:
        """Return a factory of readers for conversation turns, using the engine's model and cache."""
        return Turns(self.rollout_policy, self.cache)

    def converse(self) -> GeneratedTurns:
        """Begin a batch of conversations, whose turns reuse the keys and values of earlier turns."""
        return GeneratedTurns(self, self.turns())

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Inside the context, generate with the policy's own model and an exact cache."""
        before = self.rollout_policy, self.cache
        self.rollout_policy, self.cache = self.policy, None
        try:
            yield
        finally:
            self.rollout_policy, self.cache = before

    def decode(self, prompts: Sequence[Prompt], begin: BeginReading | None = None) -> Rollouts:
        """Sample an answer for every prompt, in order; `begin` makes the reader (default: `self.reader`)."""
        counters: dict[str, count[int]] = defaultdict(count)
        rows = []
        for prompt in prompts:
            index = next(counters[prompt.uid])
            # Draw a random number per token and row, so that answers do not depend on the batch.
            generator = self.stream.generator(prompt.uid, index)
            uniform = torch.rand(self.max_completion_length, generator=generator)
            encoded = self.policy.prompt_encoder.encode(prompt)
            rows.append(GenerationRequest(prompt, index, encoded, uniform))
        return self.answer(rows, begin)

    @torch.no_grad()
    def answer(self, rows: Sequence[GenerationRequest], begin: BeginReading | None = None) -> Rollouts:
        """Sample an answer to every request, in order, of at most one token per number in `uniform`."""
        begin = begin or (lambda rows: self.reader([row.encoded for row in rows]))
        size = self.batch_size or len(rows) or 1
        finished: list[Trajectory] = []
        with self.running():
            for at in range(0, len(rows), size):
                work = f"generating, batch {at // size + 1} of {-(-len(rows) // size)}, tokens"
                finished += self._answer(rows[at : at + size], begin, work)
        return tuple(finished)

    @torch.no_grad()
    def first_words(self, prompts: Sequence[Prompt], words: Sequence[Sequence[str]]) -> list[list[float]]:
        """Compute, for every prompt and list, the probability that an answer begins with a listed word.

        Sampling options have no effect. Only words of a single token count. Raises `ConfigError` if a list
        has no such word, or if two lists have a token in common.
        """
        tokens = first_tokens(self.policy.prompt_encoder.tokenizer, words)
        encoded = [self.policy.prompt_encoder.encode(prompt) for prompt in prompts]
        size, shares = self.batch_size or len(prompts) or 1, []
        with self.running():
            for at in range(0, len(prompts), size):
                share = self.reader(encoded[at : at + size]).read(None).float().softmax(-1).cpu()
                shares += torch.stack([share[:, listed].sum(-1) for listed in tokens], -1).tolist()
        return shares

    @torch.no_grad()
    def grow(
        self, branches: Sequence[Branch], *, temperature: float | None = None, batch_size: int = 0
    ) -> list[Grown | None]:
        """Sample branches, computing their common prefixes once; see `grow_with`."""
        from mmrl.vision.decoding.branching import grow_with  # imported here because few runs need it

        return grow_with(self, branches, temperature=temperature, batch_size=batch_size)

    def greedily(self) -> Generate:
        """Return a copy of the engine that decodes greedily, with the same model and cache."""
        greedy = copy(self)
        greedy.temperature = 0.0
        return greedy

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside the context, prepare the model for decoding: evaluation mode, autocast, fast kernels."""
        model, compute = self.rollout_policy.model, self.rollout_policy.compute
        autocast = torch.autocast(model.get_input_embeddings().weight.device.type, compute, compute in LOW)
        # In training mode, layers with gradient checkpointing refuse a KV cache.
        with (
            evaluating(model),
            autocast,
            onednn(model, pack=True) as packed,
            single_steps(self.rollout_policy.core, packed),
        ):
            yield

    def _answer(self, rows: Sequence[GenerationRequest], begin: BeginReading, work: str) -> list[Trajectory]:
        """Sample the answers of one batch token by token, until all answers have ended."""
        device, encoder = self.policy.core.get_input_embeddings().weight.device, self.policy.prompt_encoder
        options: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        options |= {"top_k": self.top_k, "min_p": self.min_p}
        uniform = pad_sequence([row.uniform for row in rows]).to(device)  # (T, n)
        limits, ends = (
            [len(row.uniform) for row in rows],
            torch.tensor([*encoder.end, *self.more_ends], device=device),
        )
        notes = SampledNotes(len(rows), len(uniform), device)
        length = torch.tensor(limits, device=device)  # (n,) token counts, reduced at the end of a row
        ended, stopped = (torch.zeros(len(rows), dtype=torch.bool, device=device) for _ in range(2))
        reader, token, stops = begin(rows), None, self.stops.rows(len(rows))
        batch = torch.arange(len(rows), device=device)  # (b,) indices of the reader's rows
        soonest, limit = min(limits, default=0), length.clone()
        awaited = any(row.on_stop for row in rows)
        for t in range(len(uniform)):
            logits = reader.read(token)
            advance(work, t, len(uniform))
            token, *values = draw_tokens(logits, uniform[t], **options)
            notes.append(token, *values, *([self._confidence(logits)] if self.confidence_top_k else []))
            ends_now = torch.isin(token, ends)  # (b,) bool
            if self.stop_strings:
                alive = (~ended[batch]).nonzero()[:, 0]
                ends_now[alive] |= stops.append(batch[alive], token[alive])
            if t + 1 < soonest and not ends_now.any():
                continue  # no row ends
            # Ended rows stay in the batch until `reader.keep` pays off, because it copies the cache.
            done = batch[ends_now & ~ended[batch]]
            length[done], stopped[done] = t + 1, True  # the end token is part of the answer
            if awaited and len(done):
                notes.write(batch)
                for i in done.tolist():
                    if on_stop := rows[i].on_stop:
                        on_stop(notes.columns[0][i, : t + 1].cpu())
            ended = stopped | (limit <= t + 1)
            finished = ended[batch]
            if finished.all():
                break
            soonest = int(limit[~ended].min())
            if int(finished.sum()) * COMPACT >= len(finished):
                live = (~finished).nonzero()[:, 0]
                notes.write(batch)
                reader.keep(live)
                batch, token, uniform = batch[live], token[live], uniform[:, live]
        notes.write(batch)
        ids, logp, entropy, confidence = notes.columns
        columns = {"logp": logp.cpu(), "entropy": entropy.cpu(), "token": ids.cpu()}
        answers = []
        for i, (row, n, stop) in enumerate(zip(rows, length.tolist(), stopped.tolist(), strict=True)):
            noted = {name: column[i, :n] for name, column in columns.items()}
            recorded = {}
            if self.confidence_top_k:
                words = [encoder.tokenizer.decode([token]) for token in noted["token"].tolist()]
                recorded["confidence"] = mean_over_parts(words, confidence[i, :n].tolist())
            answers.append(self.row(row.prompt, row.encoded, noted, stop, recorded=recorded))
        return answers

    def row(
        self,
        prompt: Prompt,
        encoded: EncodedPrompt,
        notes: dict[str, Tensor],
        stopped: bool,
        chosen: Tensor | None = None,
        recorded: Mapping[str, float] = MappingProxyType({}),
    ) -> Trajectory:
        """Build the training row of a sampled answer; see `answer_row`."""
        encoder = self.policy.prompt_encoder
        return answer_row(encoder, self.temperature, prompt, encoded, notes, stopped, chosen, recorded)

    def _confidence(self, logits: Tensor) -> Tensor:
        """Return minus the mean log-probability of the k most likely tokens (n,), from logits (n, V)."""
        logp = (logits / (self.temperature or 1.0)).log_softmax(-1)
        return -logp.topk(min(self.confidence_top_k, logp.shape[-1])).values.float().mean(-1)


@dataclass(frozen=True, eq=False)
class GeneratedTurns:
    """Samples the turns of a batch of conversations, and keeps their KV cache between turns."""

    engine: Generate
    turns: Turns

    def sample(self, requests: Sequence[GenerationRequest]) -> Rollouts:
        """Sample one turn for every request, in order."""
        return self.engine.answer(requests, self.turns.begin)

    def part(self, parents: Mapping[Key, Key]) -> None:
        """Branch conversations: `parents` maps each new one to its origin, whose cache it reuses."""
        self.turns.part(parents)


class SampledNotes:
    """Values of the sampled tokens of a batch: `columns` (n, T) of ids and of float32 values.

    Steps are buffered and written together, because one write costs as much time as an operator of the model.
    """

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        ids = torch.zeros(rows, longest, dtype=torch.int64, device=device)
        self.columns = (ids, *(torch.zeros(ids.shape, device=device) for _ in range(3)))
        self.steps: list[tuple[Tensor, ...]] = []
        self.written = 0  # number of written steps

    def append(self, *values: Tensor) -> None:
        """Add a step: tokens, log-probabilities, entropies and optionally confidences, (b,) each."""
        self.steps.append(values)

    def write(self, batch: Tensor) -> None:
        """Write the buffered steps to the rows (b,) of the batch."""
        end = self.written + len(self.steps)
        for column, values in zip(self.columns, zip(*self.steps, strict=True), strict=False):
            column[batch, self.written : end] = torch.stack(values, 1).to(column)
        self.steps, self.written = [], end


def mean_over_parts(words: Sequence[str], values: Sequence[float]) -> float:
    """Average the values of tokens within each paragraph, then over paragraphs.

    `words` are the decoded tokens. The token that completes a blank line belongs to the paragraph before it.
    """
    ends = list(accumulate(map(len, words)))
    blanks = [match.end() for match in re.finditer(r"\n[^\S\n]*\n\s*", "".join(words))]
    cuts = sorted({0, *(bisect_left(ends, end) + 1 for end in blanks), len(words)})
    return fmean(fmean(values[a:b]) for a, b in pairwise(cuts))
