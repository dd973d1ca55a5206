"""Chameleon with the decoder of its VQ autoencoder, which transformers 5.23 leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.models.janus.modeling_janus import JanusVQVAEDecoder

from mmrl.vision.models.family import FromConfig


class ChameleonDecoder(JanusVQVAEDecoder):
    """Decode latents of the autoencoder: Janus's decoder, without attention in its blocks.

    The blocks of `up` are ordered from the highest resolution, as in the files of Anole (arXiv 2407.06135).
    """

    def __init__(self, config: Any) -> None:
        super().__init__(SimpleNamespace(**config.to_dict(), out_channels=config.in_channels))
        self.up = nn.ModuleList(reversed(self.up))
        for level in self.up:
            level.attn = nn.ModuleList()

    def forward(self, hidden_state: Tensor) -> Tensor:
        """Map latents (N, C, h, w) to pixel values (N, 3, H, W)."""
        states = self.mid(self.conv_in(hidden_state))
        for level in reversed(self.up):
            for block in level.block:
                states = block(states)
            states = level.upsample(states) if hasattr(level, "upsample") else states
        return self.conv_out(nn.functional.silu(self.norm_out(states)))


class ChameleonForConditionalGeneration(FromConfig, transformers.ChameleonForConditionalGeneration):
    """Chameleon with the autoencoder's decoder, whose weights have the name `vqmodel.decoder` as in Anole."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.vqmodel.decoder = ChameleonDecoder(config.vq_config)
