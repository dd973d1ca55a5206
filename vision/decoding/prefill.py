"""Prefill: the keys and values of every distinct prompt, computed once for all rows that answer it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.tensor import cat_padded
from mmrl.kv_cache import hf_cache
from mmrl.kv_cache.attention_interface import read_shared_prefix, record_keys
from mmrl.kv_cache.layout import placeholder_ids
from mmrl.vision.models.processor import EncodedPrompt

MakeCache = Callable[[Any, Tensor, Tensor], Any]  # (config, visual, mask), both (P, S) bool, to a cache
VIDEOS = "pixel_values_videos"


@dataclass
class Prefix:
    """A KV cache of `P` prompts without their last token, left-padded to `S`, or of `n` rows of them.

    The last token is not in the cache, because it is the first input of every answer: it predicts the first
    token.
    """

    cache: Any
    mask: Tensor  # (P, S) int64
    last: Tensor  # (P,) id of the last token
    positions: Tensor  # (A, P, 2): of the last token, and of the first token of an answer
    reading: Callable[[Any], AbstractContextManager] = nullcontext  # entered, with the config, for a forward

    def select(self, which: Tensor) -> Prefix:
        """Index prompts or rows by (n,) numbers. Gradients of several rows of a prompt add up in it."""
        self.cache.batch_select_indices(which)
        return replace(self, mask=self.mask[which], last=self.last[which], positions=self.positions[:, which])

    def read(self, core: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
        """Run tokens (n, t) at positions (A, n, t) after everything in the cache: states (n, t, width)."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(ids.shape)], 1)
        with self.reading(core.config):
            return core(
                input_ids=ids,
                attention_mask=self.mask,
                position_ids=squeeze_axes(positions),
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state


def prefill(
    core: nn.Module,
    prompts: Sequence[EncodedPrompt],
    make_cache: MakeCache | None = None,
    *,
    share_prefix: bool = True,
) -> Prefix:
    """Run prompts through a model, once each.

    Args:
        core: A model without its head.
        prompts: Distinct prompts.
        make_cache: Makes the KV cache; None: an exact one.
        share_prefix: Rows share the keys and values of their prompt, instead of a copy for every row, which
            models get whose attention does not go through transformers' interface.
    """
    device = core.get_input_embeddings().weight.device
    cut = [
        EncodedPrompt(prompt.uid, prompt.ids[:-1], prompt.positions[:, :-1], prompt.media)
        for prompt in prompts
    ]
    ids, mask, positions = pad_left(cut, device)
    visual = torch.isin(ids, ids.new_tensor(placeholder_ids(core.config)))
    cache = (make_cache or _exact_cache)(core.config, visual & mask.bool(), mask.bool())
    recording = record_keys(core.config) if share_prefix and make_cache is None else nullcontext([])
    with recording as recorded:
        core(
            input_ids=ids,
            attention_mask=mask,
            position_ids=squeeze_axes(positions),
            past_key_values=cache,
            use_cache=True,
            **merge_media([prompt.media for prompt in prompts], device),
        )
    shared = hf_cache.share_prefix(cache, recorded, mask) if recorded else None
    last = torch.stack([prompt.ids[-1] for prompt in prompts]).to(device)
    end = torch.stack([prompt.positions[:, -1] for prompt in prompts], 1)  # (A, P)
    start = torch.tensor([prompt.next_position for prompt in prompts]).expand_as(end)
    ends = torch.stack([end, start], -1).to(device)
    if shared is None:
        return Prefix(cache, mask, last, ends)
    return Prefix(shared, mask, last, ends, read_shared_prefix)


def _exact_cache(config: Any, visual: Tensor, mask: Tensor) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=config)


def pad_left(prompts: Sequence[EncodedPrompt], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pad prompts on the left: ids and mask (P, S), positions (A, P, S)."""
    size = max(len(prompt.ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), size, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    positions = torch.zeros(len(prompts[0].positions), len(prompts), size, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        at = size - len(prompt.ids)
        ids[i, at:], mask[i, at:], positions[:, i, at:] = prompt.ids, 1, prompt.positions
    return ids.to(device), mask.to(device), positions.to(device)


def squeeze_axes(positions: Tensor) -> Tensor:
    """Convert (A, N, S) positions to the (N, S) that models with a single axis expect."""
    return positions[0] if positions.shape[0] == 1 else positions


def merge_media(media: Sequence[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Concatenate the media tensors of several prompts, padding tiles and frames to the largest."""
    names = dict.fromkeys(name for tensors in media for name in tensors)
    videos = [tensors[VIDEOS] for tensors in media if VIDEOS in tensors]
    frames = {video.shape[1] for video in videos if video.dim() == 5}
    if len(frames) > 1:
        raise ValueError(
            f"this model reads videos of one number of frames together, not of {sorted(frames)}; "
            "give `min_frames` and `max_frames` of the data the same value"
        )
    return {
        name: cat_padded([tensors[name] for tensors in media if name in tensors]).to(device) for name in names
    }
