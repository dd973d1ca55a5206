"""Batched generation: every prompt computed once, rows leave when they are done, everything noted on the
way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, ShareBelowOne
from mmrl.config.registry import engine
from mmrl.core.onednn import onednn
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.runtime.modules import LOW
from mmrl.vision.decoding.decoding import CachedReader, GenerationRequest, LogitsReader
from mmrl.vision.decoding.prefill import MakeCache
from mmrl.vision.decoding.sampling import TokenSampler
from mmrl.vision.decoding.token_steps import TokenPolicy, TokenRow
from mmrl.vision.models.engine_model import EngineModel
from mmrl.vision.models.loading import cache_enabled

COMPACT = 8  # rows leave the batch once one in so many is done


@engine
class Generate:
    """Sample answers from the policy, at most `max_completion_length` tokens each, `batch_size` rows at a
    time (0: all).

    Settings are built from zero; a checkpoint's generation_config is not read. `cache` names what holds keys
    and values; it learns which tokens of a prompt are visual and which are padding. `transform` makes the
    model cheaper for the engine alone, on the policy's weights as they move; the policy stays exact.
    """

    notes = frozenset({"logp", "entropy", "token"})

    def __init__(
        self,
        policy: TokenPolicy,
        *,
        stream: Stream,
        max_completion_length: PositiveInt = 256,
        temperature: NonNegativeFloat = 1.0,
        top_p: PositiveShare = 1.0,
        top_k: NonNegativeInt = 0,
        min_p: ShareBelowOne = 0.0,
        batch_size: NonNegativeInt = 0,
        cache: MakeCache | None = None,
        transform: tuple[Callable, ...] = (),
    ) -> None:
        if max_completion_length < 1:
            raise ValueError(f"`max_completion_length` must be at least 1, not {max_completion_length}")
        self.policy, self.stream, self.cache = policy, stream, cache
        self.rollout_policy: TokenPolicy = EngineModel(policy, transform) if transform else policy
        self.max_completion_length, self.batch_size = max_completion_length, batch_size
        self.temperature, self.top_p, self.top_k, self.min_p = temperature, top_p, top_k, min_p
        self._sampler()

    def _sampler(self) -> TokenSampler:
        # Made anew for every collection, because any of the four may follow a schedule.
        return TokenSampler(self.temperature, self.top_p, self.top_k, self.min_p)

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order."""
        return self.decode(prompts, self.reader)

    def reader(self, rows: Sequence[GenerationRequest]) -> LogitsReader:
        """Begin to read rows as the engine sees them."""
        return CachedReader(self.rollout_policy, [row.encoded for row in rows], self.cache)

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Answer with the policy's own model and the full cache for a while."""
        held = self.rollout_policy, self.cache
        self.rollout_policy, self.cache = self.policy, None
        try:
            yield
        finally:
            self.rollout_policy, self.cache = held

    @torch.no_grad()
    def decode(
        self, prompts: Sequence[Prompt], begin: Callable[[Sequence[GenerationRequest]], LogitsReader]
    ) -> Rollouts:
        """Answer every entry, in order, with the logits of a reader that `begin` makes for every batch of
        rows."""
        asked: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            index = asked[prompt.uid] = asked.get(prompt.uid, -1) + 1
            generator = self.stream.generator(prompt.uid, index)
            uniform = torch.rand(self.max_completion_length, generator=generator)
            rows.append(GenerationRequest(prompt, index, self.policy.prompt_encoder.encode(prompt), uniform))
        size = self.batch_size or len(rows) or 1
        model, compute = self.rollout_policy.model, self.rollout_policy.compute
        device = model.get_input_embeddings().weight.device
        finished: list[Trajectory] = []
        with (
            cache_enabled(model),
            torch.autocast(device.type, compute, compute in LOW),
            onednn(model, pack=True),
        ):
            for at in range(0, len(rows), size):
                finished += self._answer(rows[at : at + size], begin)
        return tuple(finished)

    def _answer(
        self, rows: list[GenerationRequest], begin: Callable[[Sequence[GenerationRequest]], LogitsReader]
    ) -> list[Trajectory]:
        device = self.policy.core.get_input_embeddings().weight.device
        uniform = torch.stack([row.uniform for row in rows]).to(device)
        ids = torch.zeros(len(rows), self.max_completion_length, dtype=torch.int64, device=device)
        logp, entropy = (torch.zeros(ids.shape, device=device) for _ in range(2))
        length = torch.full((len(rows),), self.max_completion_length, device=device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        for t, alive, token, said, doubt in self._steps(begin(rows), uniform):
            ids[alive, t], logp[alive, t], entropy[alive, t] = token, said.float(), doubt.float()
            done = torch.isin(token, torch.tensor(self.policy.prompt_encoder.end, device=device))
            length[alive[done]] = t + 1
            ended[alive[done]] = True
        ids, logp, entropy, length, ended = (x.cpu() for x in (ids, logp, entropy, length, ended))
        return [
            self._row(row, ids[i, :n], logp[i, :n], entropy[i, :n], bool(ended[i]))
            for i, (row, n) in enumerate(zip(rows, length.tolist(), strict=True))
        ]

    def _steps(self, reader: LogitsReader, uniform: Tensor):
        """Generate step by step: yields (step, row numbers, tokens, log-probabilities, entropies) of rows
        still in the batch."""
        sampler, device = self._sampler(), uniform.device
        ends = torch.tensor(self.policy.prompt_encoder.end, device=device)
        alive = torch.arange(len(uniform), device=device)
        done = torch.zeros(len(uniform), dtype=torch.bool, device=device)
        token = None
        for t in range(self.max_completion_length):
            logits = reader.read(token)
            token, said, doubt = sampler.draw(logits, uniform[alive, t])
            yield t, alive[~done], token[~done], said[~done], doubt[~done]
            done |= torch.isin(token, ends)
            if done.all():
                return
            if int(done.sum()) * COMPACT >= len(done):
                kept = (~done).nonzero()[:, 0]
                reader.keep(kept)
                alive, token, done = alive[kept], token[kept], done[kept]

    def _row(
        self, row: GenerationRequest, ids: Tensor, logp: Tensor, entropy: Tensor, ended: bool
    ) -> Trajectory:
        text = self.policy.prompt_encoder.text(ids)
        outcome = Outcome(text=text, end=len(ids), tags={"finish": "stop" if ended else "length"})
        steps = TokenRow(row.encoded, ids, self.temperature or 1.0)
        return Trajectory(
            row.prompt,
            row.prompt.uid,
            (outcome,),
            steps,
            len(ids),
            {"logp": logp, "entropy": entropy, "token": ids},
        )
