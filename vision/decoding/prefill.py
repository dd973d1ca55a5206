"""Computing prompts once: the keys and values of every distinct prompt, to be read by all rows that answer
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.tensor import cat_padded
from mmrl.kv_cache.prefix import merged, share, watched
from mmrl.vision.models.processor import EncodedPrompt


@dataclass
class Prefix:
    """Prompts without their last token, in a cache. `P` prompts, left-padded to `S`, or what `n` rows see of
    them.

    The last token is held back: it is the first input of every answer, and predicts its first token.
    """

    cache: Any
    mask: Tensor  # (P, S) int64
    last: Tensor  # (P,) id of the token held back
    positions: Tensor  # (A, P, 2): of the token held back, and of the first token of an answer
    reading: Reading = nullcontext  # what the model is called in behind the prompts

    def select(self, which: Tensor) -> Prefix:
        """Give every row (n,) the prompt it answers, or keep rows. Gradients of the rows add up in the
        prompt."""
        self.cache.batch_select_indices(which)
        return replace(self, mask=self.mask[which], last=self.last[which], positions=self.positions[:, which])

    def read(self, core: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
        """Read tokens (n, t) behind everything that was read before, at positions (A, n, t): states
        (n, t, width)."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(ids.shape)], 1)
        with self.reading(core.config):
            return core(
                input_ids=ids,
                attention_mask=self.mask,
                position_ids=axes(positions),
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state


Reading = Callable[[Any], AbstractContextManager]  # of a model's config
MakeCache = Callable[[Any, Tensor, Tensor], Any]  # (config, visual, mask), both (P, S) bool, to a cache


def prefill(
    core: nn.Module,
    prompts: Sequence[EncodedPrompt],
    make_cache: MakeCache | None = None,
    *,
    share_prefix: bool = True,
) -> Prefix:
    """Send distinct prompts through a model, each once.

    Their keys and values are held once for all rows, in the cache that `make_cache` makes or exactly. Without
    `share_prefix`, or where a model reads its cache in a way of its own, every row gets a copy.
    """
    from transformers import DynamicCache

    device = core.get_input_embeddings().weight.device
    held = [replace_ids(prompt, slice(0, -1)) for prompt in prompts]
    ids, mask, positions = pad_left(held, device)
    if make_cache:
        cache = make_cache(core.config, visual_tokens(core.config, ids) & mask.bool(), mask.bool())
    else:
        cache = DynamicCache(config=core.config)
    watching = watched if share_prefix and make_cache is None else _unwatched
    with watching(core.config) as noted:
        core(
            input_ids=ids,
            attention_mask=mask,
            position_ids=axes(positions),
            past_key_values=cache,
            use_cache=True,
            **merge_media([prompt.media for prompt in prompts], device),
        )
    shared = share(cache, noted, mask) if noted else None
    last = torch.stack([prompt.ids[-1] for prompt in prompts]).to(device)
    ends = torch.stack(
        [
            torch.stack(
                [prompt.positions[:, -1], torch.full_like(prompt.positions[:, -1], prompt.next_position)], 1
            )
            for prompt in prompts
        ],
        1,
    )
    if shared is None:
        return Prefix(cache, mask, last, ends.to(device))
    return Prefix(shared, mask, last, ends.to(device), merged)


def _unwatched(config: Any) -> AbstractContextManager:
    return nullcontext([])


def visual_tokens(config: Any, ids: Tensor) -> Tensor:
    """Find the placeholders that pictures and clips stand in for: ids (P, S) to (P, S) bool."""
    named = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")]
    return torch.isin(ids, ids.new_tensor([token for token in named if token is not None]))


def replace_ids(prompt: EncodedPrompt, cut: slice) -> EncodedPrompt:
    """Cut ids and positions of a prompt alike."""
    return EncodedPrompt(prompt.uid, prompt.ids[cut], prompt.positions[:, cut], prompt.media)


def pad_left(prompts: Sequence[EncodedPrompt], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pad prompts on the left: ids and mask (P, S), positions (A, P, S)."""
    size = max(len(prompt.ids) for prompt in prompts)
    axis = prompts[0].positions.shape[0]
    ids = torch.zeros(len(prompts), size, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    positions = torch.zeros(axis, len(prompts), size, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        at = size - len(prompt.ids)
        ids[i, at:], mask[i, at:], positions[:, i, at:] = prompt.ids, 1, prompt.positions
    return ids.to(device), mask.to(device), positions.to(device)


def axes(positions: Tensor) -> Tensor:
    """Give models with one axis the (N, S) they want; those with several get (A, N, S)."""
    return positions[0] if positions.shape[0] == 1 else positions


_CLIPS = "pixel_values_videos"


def merge_media(media: Sequence[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Join the media tensors of several prompts, in order, padding tiles and frames to the largest."""
    names = dict.fromkeys(name for one in media for name in one)
    frames = {one[_CLIPS].shape[1] for one in media if _CLIPS in one and one[_CLIPS].dim() == 5}
    if len(frames) > 1:
        raise ValueError(
            f"this model reads clips of one number of frames together, not of {sorted(frames)}; "
            "give `min_frames` and `max_frames` of the data the same value"
        )
    return {name: cat_padded([one[name] for one in media if name in one]).to(device) for name in names}
