"""Emu3 (arXiv 2409.18869): images of any size, written as rows of tokens of the text vocabulary."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.vision.models.family import Inputs, VLMFamily, linear, split_images
from mmrl.vision.models.image_rules import ImageRules

LINE = "<|extra_200|>"  # ends a row of image tokens
# Template for Emu3-Gen, which reads plain texts without control tokens; the processor adds BOS.
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def side(config: Any) -> int:
    """Return the side of an image token in pixels."""
    return 2 ** (len(config.vq_config.channel_multiplier) - 1)


def tokens(config: Any) -> Tensor:
    """Return the ids of the image tokens `<|visual token 000000|>` etc., in the order of the codebook."""
    named = {
        name: token for name, token in config.vocabulary_map.items() if name.startswith("<|visual token")
    }
    return torch.tensor([named[name] for name in sorted(named)])


def layout(processor: Any, config: Any, rows: int, columns: int) -> tuple[str, str, str]:
    """Return the texts before an image (with its rows and columns), after every row, and after the image."""
    before = f"{processor.image_start_token}{rows}*{columns}{processor.fake_token_around_image}"
    return before, LINE, f"{processor.eof_token}{processor.image_end_token}"


def size(config: Any) -> tuple[int, int]:
    """Return the default size: a square with the processor's area for generated images."""
    from transformers import Emu3Processor

    length = round(math.sqrt(Emu3Processor.image_area) / side(config)) * side(config)
    return length, length


def encode(core: Any, values: Tensor) -> Tensor:
    return core.vqmodel.encode(values, [values.shape[2:]]).image_tokens[0]


def features(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the tokens of all images, including one end of line per row, by the id of their placeholder."""
    if "image_sizes" not in inputs:
        return {}
    grids = torch.as_tensor(inputs["image_sizes"]) // side(core.config)
    return {core.config.image_token_id: int((grids[:, 0] * (grids[:, 1] + 1)).sum())}


FAMILIES = {
    "emu3": VLMFamily(
        linear,
        features,
        split_images,
        chat_template=TEMPLATE,
        frozen="vqmodel",
        images=ImageRules(
            tokens, layout, side, size, encode, lambda core, codes: core.vqmodel.decode(codes[None])[0]
        ),
    )
}
