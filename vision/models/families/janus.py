"""Janus and Janus-Pro (arXiv 2501.17811): images of one size, with an embedding and a head of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmrl.vision.models.families.chameleon import layout
from mmrl.vision.models.families.emu3 import side
from mmrl.vision.models.family import VLMFamily, linear, patches, per_image, split_images
from mmrl.vision.models.image_rules import ImageRules


def tokens(config: Any) -> Tensor:
    """Return the ids of the image tokens, which follow those of the text vocabulary."""
    return config.text_config.vocab_size + torch.arange(config.vq_config.num_embeddings)


def size(config: Any) -> tuple[int, int]:
    """Return the image size with as many tokens as the vision tower has patches."""
    length = config.vision_config.image_size // config.vision_config.patch_size * side(config)
    return length, length


def encode(core: Any, values: Tensor) -> Tensor:
    """Quantise by cosine similarity to the codes, because the decoder reads normalised code vectors.

    transformers 5.23 compares vectors without normalisation; the authors' code normalises both sides.
    """
    latents = core.vqmodel.quant_conv(core.vqmodel.encoder(values))[0]
    codebook = normalize(core.vqmodel.quantize.embedding.weight, dim=-1)
    return (normalize(latents, dim=0).permute(1, 2, 0) @ codebook.T).argmax(-1)


FAMILIES = {
    "janus": VLMFamily(
        linear,
        per_image(patches),
        split_images,
        frozen="vqmodel",
        images=ImageRules(
            tokens,
            layout,
            side,
            size,
            encode,
            lambda core, codes: core.vqmodel.decode(codes.flatten()[None])[0],
            fixed=True,
        ),
        model="mmrl.vision.models.modeling_janus:JanusForConditionalGeneration",
    )
}
