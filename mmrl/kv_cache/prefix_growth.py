"""Prompts that grow: rows of a shared prefix become prefixes themselves, which other rows share."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.kv_cache.hf_cache import PromptCache, derive
from mmrl.kv_cache.layers import SharedPrefixLayer
from mmrl.kv_cache.layout import PromptLayout


def rows_as_prompts(cache: PromptCache, rows: Tensor, count: Tensor) -> PromptCache:
    """Make a cache whose prompts are rows of another one, each with its prompt before it; gradients flow.

    `cache` is one of `share_prefix`, whose rows have read tokens since. Of those of row i the first
    `count[i]` stay, and the others were padding; `rows` (n,) are those wanted. Both are on its device.
    """
    layers: list[SharedPrefixLayer] = cache.own_layers
    layout = layers[0].layout
    owner, read = layout.groups.owner[rows], layers[0].length - layout.length
    sizes = layout.real.sum(1)[owner] + count[rows]  # (n,)
    size = int(sizes.max())
    real = torch.arange(size, device=rows.device) >= size - sizes[:, None]  # padded on the left
    grown = PromptLayout(None, real)
    grown.begin(len(rows), size, rows.device)
    padding = read - count[rows]

    def joined(prompts: Tensor, tail: Tensor, window: int) -> Tensor:
        whole = torch.cat([prompts[owner], tail[rows]], 2)
        length = whole.shape[2]
        # A sliding-window layer stores one token less than it sees.
        stored = min(size, length, max(1, window - 1) if window else size)
        index = torch.arange(length - stored, length, device=rows.device) - padding[:, None]  # (n, stored)
        return whole.take_along_dim(index.clamp(min=0)[:, None, :, None], 2)

    return derive(PromptCache)(
        [
            derive(SharedPrefixLayer)(
                grown,
                *(
                    joined(*both, layer.window)
                    for both in zip((layer.keys, layer.values), layer.tail.tensors(), strict=True)
                ),
                layer.window,
            )
            for layer in layers
        ]
    )
