"""Batched generation: every prompt computed once, rows leave when they are done, everything noted on the
way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.draws import Stream
from mmrl.modules import LOW
from mmrl.registry import engine
from mmrl.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.vision.chat import Encoded
from mmrl.vision.loading import caching
from mmrl.vision.prefill import Prefix, axes, prefill
from mmrl.vision.prefix import FORBIDDEN, Speaker, TokenRow, distinct_prompts
from mmrl.vision.sampling import Sampler

COMPACT = 8  # rows leave the batch once one in so many is done


@dataclass
class _Row:
    """An answer on its way."""

    prompt: Prompt
    encoded: Encoded
    uniform: Tensor


@engine
class Generate:
    """Sample answers from the policy, at most `max_completion_length` tokens each, `batch_size` rows at a
    time (0: all).

    Settings are built from zero; a checkpoint's generation_config is not read. `cache` names what holds keys
    and values.
    """

    notes = frozenset({"logp", "entropy", "token"})

    def __init__(
        self,
        policy: Speaker,
        *,
        stream: Stream,
        max_completion_length: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        batch_size: int = 0,
        cache: Callable[[Any], Any] | None = None,
    ) -> None:
        if max_completion_length < 1:
            raise ValueError(f"`max_completion_length` must be at least 1, not {max_completion_length}")
        self.policy, self.stream, self.cache = policy, stream, cache
        self.max_completion_length, self.batch_size = max_completion_length, batch_size
        self.temperature, self.top_p, self.top_k, self.min_p = temperature, top_p, top_k, min_p
        self._sampler()

    def _sampler(self) -> Sampler:
        # Made anew for every collection, because any of the four may follow a schedule.
        return Sampler(self.temperature, self.top_p, self.top_k, self.min_p)

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order."""
        asked: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            index = asked[prompt.uid] = asked.get(prompt.uid, -1) + 1
            generator = self.stream.generator(prompt.uid, index)
            uniform = torch.rand(self.max_completion_length, generator=generator)
            rows.append(_Row(prompt, self.policy.chat.encode(prompt), uniform))
        size = self.batch_size or len(rows) or 1
        core, compute = self.policy.core, self.policy.compute
        device = core.get_input_embeddings().weight.device
        finished: list[Trajectory] = []
        for at in range(0, len(rows), size):
            with caching(self.policy.model), torch.autocast(device.type, compute, compute in LOW):
                finished += self._answer(rows[at : at + size])
        return tuple(finished)

    def _answer(self, rows: list[_Row]) -> list[Trajectory]:
        distinct, which = distinct_prompts([row.encoded for row in rows])
        core = self.policy.core
        device = core.get_input_embeddings().weight.device
        prefix = prefill(core, distinct, self.cache).select(which.to(device))
        uniform = torch.stack([row.uniform for row in rows]).to(device)
        ids = torch.zeros(len(rows), self.max_completion_length, dtype=torch.int64, device=device)
        logp, entropy = (torch.zeros(ids.shape, device=device) for _ in range(2))
        length = torch.full((len(rows),), self.max_completion_length, device=device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        for t, alive, token, said, doubt in self._steps(prefix, uniform):
            ids[alive, t], logp[alive, t], entropy[alive, t] = token, said.float(), doubt.float()
            done = torch.isin(token, torch.tensor(self.policy.chat.end, device=device))
            length[alive[done]] = t + 1
            ended[alive[done]] = True
        ids, logp, entropy, length, ended = (x.cpu() for x in (ids, logp, entropy, length, ended))
        return [
            self._row(row, ids[i, :n], logp[i, :n], entropy[i, :n], bool(ended[i]))
            for i, (row, n) in enumerate(zip(rows, length.tolist(), strict=True))
        ]

    def _steps(self, prefix: Prefix, uniform: Tensor):
        """Generate step by step: yields (step, row numbers, tokens, log-probabilities, entropies) of rows
        still in the batch."""
        core, head, sampler = self.policy.core, self.policy.model.get_output_embeddings(), self._sampler()
        device = prefix.mask.device
        ends = torch.tensor(self.policy.chat.end, device=device)
        forbidden = torch.tensor(self.policy.chat.placeholders, device=device)
        alive = torch.arange(len(uniform), device=device)
        done = torch.zeros(len(uniform), dtype=torch.bool, device=device)
        token, positions, mask = prefix.last, prefix.positions, prefix.mask
        for t in range(self.max_completion_length):
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            at = positions[..., :1] if t == 0 else positions[..., 1:] + (t - 1)
            hidden = core(
                input_ids=token[:, None],
                attention_mask=mask,
                position_ids=axes(at),
                past_key_values=prefix.cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
            logits = head(hidden).float().index_fill(-1, forbidden, FORBIDDEN)
            token, said, doubt = sampler.draw(logits, uniform[alive, t])
            yield t, alive[~done], token[~done], said[~done], doubt[~done]
            done |= torch.isin(token, ends)
            if done.all():
                return
            if int(done.sum()) * COMPACT >= len(done):
                kept = (~done).nonzero()[:, 0]
                prefix.cache.batch_select_indices(kept)
                alive, token, mask, positions = alive[kept], token[kept], mask[kept], positions[:, kept]
                done = done[kept]

    def _row(self, row: _Row, ids: Tensor, logp: Tensor, entropy: Tensor, ended: bool) -> Trajectory:
        text = self.policy.chat.text(ids)
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
