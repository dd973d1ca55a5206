"""Chameleon (arXiv 2405.09818): images of one size, written as tokens of the text vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.vision.models.families.emu3 import TEMPLATE, side
from mmrl.vision.models.family import VLMFamily, linear, per_image, split_images
from mmrl.vision.models.image_rules import ImageRules


def tokens(config: Any) -> Tensor:
    """Return the ids of the image tokens `IMGIMG...Z`, in the order of the codebook."""
    from transformers.models.chameleon.modeling_chameleon import ChameleonImageVocabularyMapping

    by_code = ChameleonImageVocabularyMapping(config.vocabulary_map).img2bpe
    return torch.tensor([by_code[code] for code in sorted(by_code)])


def layout(processor: Any, config: Any, rows: int, columns: int) -> tuple[str, str, str]:
    """Return the texts before an image, after each row (none) and after the image."""
    return processor.image_start_token, "", processor.image_end_token


def decode(core: Any, codes: Tensor) -> Tensor:
    vectors = core.vqmodel.quantize.embedding(codes[None]).permute(0, 3, 1, 2)
    return core.vqmodel.decoder(core.vqmodel.post_quant_conv(vectors))[0]


FAMILIES = {
    "chameleon": VLMFamily(
        linear,
        per_image(lambda c: (c.vq_config.resolution // side(c)) ** 2),
        split_images,
        chat_template=TEMPLATE,
        frozen="vqmodel",
        images=ImageRules(
            tokens,
            layout,
            side,
            lambda config: (config.vq_config.resolution,) * 2,
            lambda core, values: core.vqmodel.encode(values).image_tokens,
            decode,
            fixed=True,
        ),
        model="mmrl.vision.models.modeling_chameleon:ChameleonForConditionalGeneration",
    )
}
