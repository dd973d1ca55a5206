"""Janus with a joint vocabulary: text tokens, then image tokens, which have their own embedding and head."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmrl.vision.models.family import FromConfig


class JanusModel(transformers.JanusModel):
    """Janus without its heads; token ids from the size of the text vocabulary on are image codes."""

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **options: Any
    ) -> Any:
        """Embed texts and images by their own embeddings, and run the language model."""
        if input_ids is not None:
            texts = self.get_input_embeddings()
            written = input_ids >= texts.num_embeddings
            codes = input_ids[written] - texts.num_embeddings
            images = self.generation_aligner(self.generation_embeddings(codes))
            inputs_embeds = texts(input_ids.masked_fill(written, 0))
            inputs_embeds = inputs_embeds.masked_scatter(written[..., None], images.to(inputs_embeds))
        return super().forward(inputs_embeds=inputs_embeds, **options)


class JointHead(nn.Module):
    """Output head that concatenates the logits of the text head and of the image head."""

    def __init__(self, texts: nn.Module, images: nn.Module) -> None:
        super().__init__()
        self.texts, self.images = texts, images

    @property
    def weight(self) -> Tensor:
        """The weight of the text head, which stands for both where a head's dtype and sizes are read."""
        return self.texts.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits (..., text tokens + codes)."""
        return torch.cat([self.texts(hidden), self.images(hidden)], -1)


class JanusForConditionalGeneration(FromConfig, transformers.JanusForConditionalGeneration):
    """Janus whose `get_output_embeddings` returns both heads; weights are named as in transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.__class__ = JanusModel
        # Stored outside of `_modules`, so that checkpoints do not contain it.
        vars(self)["joint_head"] = JointHead(self.lm_head, self.model.generation_head)

    def get_output_embeddings(self) -> nn.Module:
        """Return the text and image heads as one `JointHead`."""
        return vars(self).get("joint_head", self.lm_head)
