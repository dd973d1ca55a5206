"""Prefill: compute the keys and values of every distinct prompt once for all rows that answer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.core.tensor import cat_padded
from mmrl.kv_cache import hf_cache
from mmrl.kv_cache.attention_interface import read_shared_prefix, record_keys
from mmrl.kv_cache.layout import placeholder_ids
from mmrl.vision.decoding.single_step import AHEAD, Angles, SingleStep, step_of
from mmrl.vision.models.model_families import family_of, type_arguments
from mmrl.vision.models.processor import EncodedPrompt

MakeCache = Callable[[Any, Tensor, Tensor], Any]  # maps (config, visual mask, attention mask) to a cache
VIDEOS = "pixel_values_videos"


@dataclass
class Prefix:
    """KV cache of `P` prompts without their last token, left-padded to `S` tokens.

    After `select` it has `n` rows, each with one of the prompts. The last token of a prompt is not cached: it
    is the first input of every answer and predicts the answer's first token. If all tokens of a prompt attend
    to each other, the last token is cached, too, and `state` predicts the first token. There are `A` axes of
    positions.
    """

    core: nn.Module
    cache: Any
    mask: Tensor  # (P, S) int64
    last: Tensor  # (P,) id of the last token
    last_position: Tensor  # (A, P) position of the last token
    next_position: Tensor  # (A, P) position of the first token of an answer
    reading: Callable[[Any], AbstractContextManager]  # (config) -> context in which the model runs
    length: int = 0  # tokens read since the prefill
    state: Tensor | None = None  # (P, width) hidden state of the last token if it is cached
    _angles: list[Angles] = field(default_factory=list, init=False)  # rotary angles of steps from `_since` on
    _since: int = field(default=0, init=False)

    @property
    def shared(self) -> bool:
        """Whether rows share the exact keys and values of their prompt."""
        return self.reading is read_shared_prefix

    def select(self, which: Tensor) -> Prefix:
        """Select prompts or rows by index (n,); gradients of a repeatedly selected prompt add up."""
        self.cache.batch_select_indices(which)
        return replace(
            self,
            mask=self.mask[which],
            last=self.last[which],
            last_position=self.last_position[:, which],
            next_position=self.next_position[:, which],
            state=self.state if self.state is None else self.state[which],
        )

    def read(
        self, ids: Tensor, positions: Tensor | None = None, media: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Tensor:
        """Run the next tokens (n, t) after the cached tokens; return their hidden states (n, t, width).

        For images and videos pass `media` and `positions` (A, n, t). The prompt's last token comes first.
        """
        if self.state is not None and not self.length:
            self.length, first = 1, self.state[:, None]
            if ids.shape[1] == 1:
                return first
            rest = self.read(ids[:, 1:], positions if positions is None else positions[..., 1:], media)
            return torch.cat([first, rest], 1)
        single = ids.shape[1] == 1 and positions is None and not media and self.shared
        if single and (step := step_of(self.core)):
            return self._read_one(step, ids)
        # Token i of an answer has position next_position + i; the last prompt token counts as i = -1.
        steps = torch.arange(self.length - 1, self.length - 1 + ids.shape[1], device=ids.device)
        positions = self.next_position[..., None] + steps if positions is None else positions
        if not self.length:  # the last prompt token; after a video, its position may not be next_position - 1
            positions[..., 0] = self.last_position
        self.length += ids.shape[1]
        self.mask = torch.cat([self.mask, self.mask.new_ones(ids.shape)], 1)
        experts = family_of(self.core.config).experts(self.core.config, ids) if media else {}
        with self.reading(self.core.config):
            return self.core(
                input_ids=ids,
                attention_mask=self.mask,
                position_ids=squeeze_axes(positions),
                past_key_values=self.cache,
                use_cache=True,
                **experts,
                **media,
            ).last_hidden_state

    def _read_one(self, step: SingleStep, ids: Tensor) -> Tensor:
        """Run one token per row (n, 1) with the fast `SingleStep`; return hidden states (n, 1, width)."""
        if self.length - self._since >= len(self._angles):
            place, ahead = self.last_position, torch.zeros(1, dtype=torch.int64, device=ids.device)
            if self.length:
                place = self.next_position
                ahead = torch.arange(self.length - 1, self.length - 1 + AHEAD, device=ids.device)
            positions = place[..., None] + ahead
            self._since, self._angles = self.length, step.angles(squeeze_axes(positions))
        angles = self._angles[self.length - self._since]
        self.length += 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(ids.shape)], 1)
        return step(ids[:, 0], angles, self.cache.layers)[:, None]


def prefill(
    core: nn.Module,
    prompts: Sequence[EncodedPrompt],
    make_cache: MakeCache | None = None,
    *,
    share_prefix: bool = True,
) -> Prefix:
    """Compute the keys and values of distinct prompts in one forward pass.

    Args:
        core: A model without its head.
        prompts: Distinct prompts.
        make_cache: Function that makes a quantised KV cache; None: an exact cache is used.
        share_prefix: Store the exact keys and values of a prompt once for all its rows. Rows get copies if
            the model does not use the attention interface of transformers.
    """
    device = core.get_input_embeddings().weight.device
    whole = family_of(core.config).prefix_lm
    end = None if whole else -1
    cut = [replace(prompt, ids=prompt.ids[:end], positions=prompt.positions[:, :end]) for prompt in prompts]
    ids, mask, positions = pad_left(cut, device)
    visual = torch.isin(ids, ids.new_tensor(placeholder_ids(core.config))) & mask.bool()
    cache = make_cache(core.config, visual, mask.bool()) if make_cache else hf_cache.exact_cache(core.config)
    with record_keys(core.config) if share_prefix and not make_cache else nullcontext([]) as recorded:
        hidden = core(
            input_ids=ids,
            attention_mask=mask,
            position_ids=squeeze_axes(positions),
            past_key_values=cache,
            use_cache=True,
            **type_arguments(core.config, ids),
            **merge_media(core, [prompt.media for prompt in prompts], device),
        ).last_hidden_state
    if make_cache:
        hf_cache.warn_of_larger(cache, core.config, ids.numel(), core.get_input_embeddings().weight.dtype)
    shared = hf_cache.share_prefix(cache, recorded, mask) if recorded else None
    ends = torch.stack([prompt.positions[:, -1] for prompt in prompts], 1)  # (A, P)
    return Prefix(
        core,
        cache if shared is None else shared,
        mask,
        last=torch.stack([prompt.ids[-1] for prompt in prompts]).to(device),
        last_position=ends.to(device),
        next_position=torch.tensor([prompt.next_position for prompt in prompts]).expand_as(ends).to(device),
        reading=nullcontext if shared is None else read_shared_prefix,
        state=hidden[:, -1] if whole else None,
    )


def pad_left(prompts: Sequence[EncodedPrompt], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pad P prompts on the left; return token ids (P, S), attention mask (P, S), positions (A axes, P, S)."""
    ids = pad_rows([prompt.ids for prompt in prompts], device)
    mask = pad_rows([torch.ones_like(prompt.ids) for prompt in prompts], device)
    return ids, mask, pad_positions([prompt.positions for prompt in prompts], device)


def pad_rows(rows: list[Tensor], device: torch.device, side: str = "left") -> Tensor:
    """Pad n tensors (L, ...) with 0 on a side, and stack them on a device: (n, longest, ...)."""
    return pad_sequence(rows, batch_first=True, padding_side=side).to(device)


def pad_positions(rows: list[Tensor], device: torch.device, side: str = "left") -> Tensor:
    """Pad n positions (A axes, L) with 0 on a side, and stack them on a device: (A, n, longest)."""
    return pad_rows([row.T for row in rows], device, side).permute(2, 0, 1).contiguous()


def squeeze_axes(positions: Tensor) -> Tensor:
    """Convert positions (A, N, S) to (N, S) for models with one axis of positions."""
    return positions[0] if positions.shape[0] == 1 else positions


def merge_media(
    core: nn.Module, media: Sequence[Mapping[str, Tensor]], device: torch.device
) -> dict[str, Tensor]:
    """Concatenate the media tensors of prompts by name, padded to the largest number of tiles.

    Returns arguments of `core`, the model without its head.
    """
    names = dict.fromkeys(name for tensors in media for name in tensors)
    columns = {name: [tensors[name] for tensors in media if name in tensors] for name in names}
    # Videos as (videos, frames, 3, height, width) need equal numbers of frames; Qwen's packed patches do not.
    frames = {video.shape[1] for video in columns.get(VIDEOS, ()) if video.dim() == 5}
    if len(frames) > 1:
        raise ValueError(
            f"this model reads videos of one number of frames together, not of {sorted(frames)}; "
            "give `min_frames` and `max_frames` of the data the same value"
        )
    merged = {name: cat_padded(tensors).to(device) for name, tensors in columns.items()}
    return family_of(core.config).assemble(core, merged)
