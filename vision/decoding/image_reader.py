"""Reader for images written as tokens: guided logits of image tokens, and forced control tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.vision.decoding.decoding import CachedReader
from mmrl.vision.decoding.guidance import guide
from mmrl.vision.decoding.token_steps import FORBIDDEN
from mmrl.vision.models.image_writer import IMAGE


class ImageReader:
    """Computes image-token logits with guidance, and forces control tokens, such as the end of an image row.

    Args:
        reader: Reader of n rows that end with begin-of-image: prompt, then optionally a text.
        second: Reader of the unconditional rows: negative prompt and begin-of-image; None: no guidance.
        scale: Guidance scale.
        ids: Ids (C,) of the image tokens.
        layouts: For each row, the tokens (L,) after begin-of-image: `IMAGE` where an image token is sampled,
            otherwise the id of a forced control token.
    """

    def __init__(
        self,
        reader: CachedReader,
        second: CachedReader | None,
        scale: float,
        ids: Tensor,
        layouts: Sequence[Tensor],
    ) -> None:
        self.readers, self.scale = [reader, *([second] if second else [])], scale
        for one in self.readers:
            one.forbidden = one.forbidden[:0]  # layouts decide which tokens are allowed
        device = reader.prefix.last.device
        self.ids, self.time = ids.to(device), 0
        self.layouts = torch.nn.utils.rnn.pad_sequence(list(layouts), batch_first=True).to(device)

    def read(self, token: Tensor | None) -> Tensor:
        """Append one token per row (n,); return the next logits (n, V), float32."""
        values = [reader.read(token) for reader in self.readers]
        logits = guide(*values, self.scale) if len(values) > 1 else values[0]
        slot, self.time = self.layouts[:, self.time], self.time + 1
        masked = torch.full_like(logits, FORBIDDEN)
        masked[:, self.ids] = logits[:, self.ids]
        forced = (slot != IMAGE).nonzero()[:, 0]
        masked[forced] = FORBIDDEN
        masked[forced, slot[forced]] = 0.0
        return masked

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows with these indices (k,)."""
        for reader in self.readers:
            reader.keep(rows)
        self.layouts = self.layouts[rows]
