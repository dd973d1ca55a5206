"""A tiny Llama 4, read by `families/test_llama4.py`."""

from __future__ import annotations

from pathlib import Path

from mmrl.core.rng import seeded
from tests.vision import tiny
from tests.vision.tiny_more import _text, _tokenizer

WORDS = ("image", "image_start", "image_end", "patch", "tile_x_separator", "tile_y_separator")
CHUNK = 2048


def _llama4(folder: Path) -> None:
    """Write Llama 4: the first layer has chunked attention and experts, the second no rotary positions."""
    import transformers as t

    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{word}|>" for word in WORDS]})
    ids = {word: tokenizer.convert_tokens_to_ids(f"<|{word}|>") for word in WORDS}
    text = t.Llama4TextConfig(
        **_text(tokenizer, head_dim=8, intermediate_size_mlp=64, num_local_experts=2, moe_layers=[0]),
        **{"no_rope_layers": [1, 0], "attention_chunk_size": CHUNK, "floor_scale": CHUNK},
    )
    vision = {"pixel_shuffle_ratio": 0.5, "projector_input_dim": 32, "projector_output_dim": 32}
    config = t.Llama4Config(
        text_config=text,
        vision_config={**tiny.TOWER, **vision, "vision_output_dim": 32, "intermediate_size": 128},
        boi_token_index=ids["image_start"],
        eoi_token_index=ids["image_end"],
        image_token_index=ids["patch"],
    )
    processor = t.Llama4Processor(
        t.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=4),
        tokenizer,
        patch_size=14,
        chat_template=tiny.TEMPLATE.replace("PLACEHOLDER", "<|image|>"),
    )
    tiny._save(t.Llama4ForConditionalGeneration(config), processor, folder)


MAKERS = {"llama4": _llama4}


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint with weights from a fixed seed."""
    with seeded(0):
        MAKERS[name](folder)
    return folder
