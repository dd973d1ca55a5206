"""Plain transformers around a cache: a tiny model, ragged batches with pictures in different places, logits
token by token."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream, seeded
from mmrl.kv_cache.layout import find_visual

PICTURE = 60  # the placeholder of the tiny LLaVA


@cache
def llava(heads: int = 4, shared: int = 2, layers: int = 2, size: int = 16):
    """Make a tiny LLaVA in float64, with weights large enough that what is seen changes what is said."""
    import transformers as t

    text = t.LlamaConfig(
        hidden_size=heads * size,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    vision = t.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=7,
    )
    config = t.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=PICTURE,
        vision_feature_layer=-1,
    )
    with seeded(0):
        model = t.LlavaForConditionalGeneration(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6 if parameter.dim() > 1 else 1)
    model.generation_config.eos_token_id = None
    return model


def prompts(num: int = 8) -> list[dict[str, Tensor]]:
    """Make prompts of different lengths, with no, one or two images of 16 tokens in different places."""
    generator = torch.Generator().manual_seed(1)

    def words(many: int) -> list[int]:
        return torch.randint(1, 50, (many,), generator=generator).tolist()

    made = []
    for i in range(num):
        ids = words(2 + i)
        pictures = (1, 0, 2, 1, 1, 2, 0, 1)[i % 8]
        for _ in range(pictures):
            ids += [PICTURE] * 16 + words(3 + i % 3)
        pixels = torch.randn(pictures, 3, 28, 28, generator=generator, dtype=torch.float64)
        made.append({"input_ids": torch.tensor([ids]), "pixel_values": pixels})
    return made


def batch(listed: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad prompts on the left."""
    size = max(one["input_ids"].shape[1] for one in listed)
    pad = lambda x: torch.nn.functional.pad(x, (size - x.shape[1], 0))
    joined = {
        "input_ids": torch.cat([pad(one["input_ids"]) for one in listed]),
        "attention_mask": torch.cat([pad(torch.ones_like(one["input_ids"])) for one in listed]),
    }
    pixels = torch.cat([one["pixel_values"] for one in listed])
    return {**joined, "pixel_values": pixels} if len(pixels) else joined


def masks(model, inputs: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor]:
    """Give what a cache is made from."""
    return model.config, *find_visual(model.config, inputs["input_ids"], inputs.get("attention_mask"))


@torch.no_grad()
def read(model, inputs: dict[str, Tensor], cache: Any, answer: Tensor) -> Tensor:
    """Read prompts, then an answer (B, T) token by token: (B, T, V) logits of what follows."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    # Codes of turned keys depend on where a prompt starts, so padding must not count.
    position = (mask.cumsum(1) - 1).clamp(min=0)
    model(**{**inputs, "attention_mask": mask}, position_ids=position, past_key_values=cache)
    return follow(model, mask, cache, answer)


@torch.no_grad()
def follow(model, mask: Tensor, cache: Any, answer: Tensor) -> Tensor:
    """Read an answer (B, T) token by token behind what a cache holds."""
    logits = []
    for t in range(answer.shape[1]):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        position = mask.sum(1, keepdim=True) - 1
        step = answer[:, t : t + 1]
        logits.append(
            model(input_ids=step, attention_mask=mask, position_ids=position, past_key_values=cache).logits
        )
    return torch.cat(logits, 1)


def check_options(name: str, **options: Any) -> None:
    """Check the options of a cache as those of a configuration."""
    Pieces(Stream()).check("cache", Piece(f"compression.{name}", options), "cache")


def answers(rows: int, length: int = 6, seed: int = 2) -> Tensor:
    """Make answers of words."""
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(seed))
