"""Batched sampling from a token policy with a KV cache; prompts are prefilled once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, ShareBelowOne
from mmrl.config.registry import engine
from mmrl.core.onednn import onednn
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.runtime.modules import LOW, evaluating
from mmrl.vision.decoding.decoding import BeginReading, CachedReader, GenerationRequest, draw_tokens
from mmrl.vision.decoding.prefill import MakeCache
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.models.loading import EngineModel, TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt

COMPACT = 8  # finished rows leave the batch once they are one in this many


@engine
@dataclass(eq=False)
class Generate:
    """Sample answers from a token policy; a checkpoint's generation_config is not read.

    Args:
        policy: The policy.
        max_completion_length: The most tokens of an answer.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Nucleus sampling: the most likely tokens of this total probability.
        top_k: The most likely k tokens; 0: all.
        min_p: Tokens of at least this share of the highest probability.
        batch_size: Rows generated at the same time; 0: all.
        cache: The KV cache; it gets masks of visual tokens and of padding.
        transform: Transforms of the engine's own model, which keeps the policy's weights; the policy itself
            stays exact.
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
    cache: MakeCache | None = None
    transform: tuple[Callable, ...] = ()
    notes: ClassVar[frozenset[str]] = frozenset({"logp", "entropy", "token", "temperature"})

    def __post_init__(self) -> None:
        self.rollout_policy: TokenPolicy = self.policy
        if self.transform:
            self.rollout_policy = EngineModel(self.policy, self.transform)

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order."""
        return self.decode(prompts)

    def reader(self, prompts: Sequence[EncodedPrompt]) -> CachedReader:
        """Make a reader of one row per prompt, with the engine's model and cache."""
        return CachedReader(self.rollout_policy, prompts, self.cache)

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Generate with the policy's own model and the exact cache inside the block."""
        before = self.rollout_policy, self.cache
        self.rollout_policy, self.cache = self.policy, None
        try:
            yield
        finally:
            self.rollout_policy, self.cache = before

    def decode(self, prompts: Sequence[Prompt], begin: BeginReading | None = None) -> Rollouts:
        """Answer every entry, in order, with the logits of a reader that `begin` makes for every batch.

        Without `begin`, readers are those of the engine's model and cache.
        """
        counters: dict[str, count[int]] = defaultdict(count)
        rows = []
        for prompt in prompts:
            index = next(counters[prompt.uid])
            # A number per token and row: a draw depends on neither the batch nor the other rows.
            generator = self.stream.generator(prompt.uid, index)
            uniform = torch.rand(self.max_completion_length, generator=generator)
            encoded = self.policy.prompt_encoder.encode(prompt)
            rows.append(GenerationRequest(prompt, index, encoded, uniform))
        return self.answer(rows, begin)

    @torch.no_grad()
    def answer(self, rows: Sequence[GenerationRequest], begin: BeginReading | None = None) -> Rollouts:
        """Answer requests, in order, each in at most as many tokens as it has random numbers."""
        begin = begin or (lambda rows: self.reader([row.encoded for row in rows]))
        size = self.batch_size or len(rows) or 1
        model, compute = self.rollout_policy.model, self.rollout_policy.compute
        autocast = torch.autocast(model.get_input_embeddings().weight.device.type, compute, compute in LOW)
        finished: list[Trajectory] = []
        # Layers with gradient checkpointing refuse a KV cache in training mode.
        with evaluating(model), autocast, onednn(model, pack=True):
            for at in range(0, len(rows), size):
                finished += self._answer(rows[at : at + size], begin)
        return tuple(finished)

    def _answer(self, rows: Sequence[GenerationRequest], begin: BeginReading) -> list[Trajectory]:
        """Sample one batch, a token of every row at a time, until all rows have ended."""
        device, encoder = self.policy.core.get_input_embeddings().weight.device, self.policy.prompt_encoder
        options = {"temperature": self.temperature, "top_p": self.top_p}
        options |= {"top_k": self.top_k, "min_p": self.min_p}
        uniform = pad_sequence([row.uniform for row in rows], batch_first=True).to(device)
        limit = torch.tensor([len(row.uniform) for row in rows], device=device)
        ends = torch.tensor(encoder.end, device=device)
        ids = torch.zeros(uniform.shape, dtype=torch.int64, device=device)
        logp, entropy = (torch.zeros(ids.shape, device=device) for _ in range(2))
        length = limit.clone()  # of rows that never end
        ended, stopped = (torch.zeros(len(rows), dtype=torch.bool, device=device) for _ in range(2))
        reader, token = begin(rows), None
        batch = torch.arange(len(rows), device=device)  # the rows that the reader still has
        for t in range(uniform.shape[1]):
            token, *values = draw_tokens(reader.read(token), uniform[batch, t], **options)
            # Rows that ended stay until `keep` pays off: it copies the cache.
            alive = ~ended[batch]
            now = batch[alive]
            ids[now, t], logp[now, t], entropy[now, t] = token[alive], *(v[alive].float() for v in values)
            done = now[torch.isin(token[alive], ends)]
            length[done], stopped[done] = t + 1, True  # the end token is part of the answer
            ended = stopped | (limit <= t + 1)
            finished = ended[batch]
            if finished.all():
                break
            if int(finished.sum()) * COMPACT >= len(finished):
                kept = (~finished).nonzero()[:, 0]
                reader.keep(kept)
                batch, token = batch[kept], token[kept]
        columns = {"logp": logp.cpu(), "entropy": entropy.cpu(), "token": ids.cpu()}
        answers = []
        for i, (row, n, stop) in enumerate(zip(rows, length.tolist(), stopped.tolist(), strict=True)):
            notes = {name: column[i, :n] for name, column in columns.items()}
            text = encoder.text(notes["token"])
            outcome = Outcome(text=text, end=n, tags={"finish": "stop" if stop else "length"})
            # Greedy answers are trained on at temperature 1, at which their `logp` was noted.
            temperature = self.temperature or 1.0
            notes["temperature"] = torch.full((n,), temperature)
            steps = TokenRow(row.encoded, notes["token"], temperature)
            answers.append(Trajectory(row.prompt, row.prompt.uid, (outcome,), steps, n, notes))
        return answers
