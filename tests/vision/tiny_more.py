"""Tiny checkpoints of further families, which only `test_more_families.py` reads."""

from __future__ import annotations

from pathlib import Path

from mmrl.core.rng import seeded
from tests.vision import tiny
from tests.vision.tiny import TEXT, TOWER

IMAGE = tiny.TEMPLATE.replace("PLACEHOLDER", "<image>")


def _tokenizer(**named: str):
    """Make a tokenizer whose attributes name some of its tokens, such as `image_token`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tiny._tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named,
    )


def _text(tokenizer, **others: object) -> dict[str, object]:
    """Options of a language model that reads these tokens."""
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    return {**TEXT, "vocab_size": len(tokenizer), **ids, **others}


def _llava_next(folder: Path) -> None:
    """Write LLaVA-NeXT: an image and its tiles, whose rows end with a newline."""
    import transformers as t

    tokenizer, pinpoints = _tokenizer(), [[28, 56], [56, 28], [56, 56]]
    config = t.LlavaNextConfig(
        vision_config=t.CLIPVisionConfig(**TOWER),
        text_config=t.LlamaConfig(**_text(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
    )
    images = t.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    processor = t.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=IMAGE,
    )
    tiny._save(t.LlavaNextForConditionalGeneration(config), processor, folder)


def _idefics3(folder: Path) -> None:
    """Write Idefics3, which cuts an image into tiles of 28 pixels and adds the whole image."""
    import transformers as t

    tokenizer = _tokenizer()
    text = t.LlamaConfig(**_text(tokenizer))
    config = t.Idefics3Config(
        vision_config={**TOWER},
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    images = t.Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    processor = t.Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=IMAGE)
    tiny._save(t.Idefics3ForConditionalGeneration(config), processor, folder)


def _mistral3(folder: Path) -> None:
    """Write Mistral 3: images of any size, squares of patches merged, a break after every row."""
    import transformers as t

    tokenizer = _tokenizer()
    config = t.Mistral3Config(
        vision_config=t.PixtralVisionConfig(**{**TOWER, "image_size": 112}, head_dim=8),
        text_config=t.MistralConfig(**_text(tokenizer, head_dim=8, sliding_window=None)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    patch = {"height": 14, "width": 14}
    processor = t.PixtralProcessor(
        t.PixtralImageProcessor(size={"longest_edge": 84}, patch_size=patch),
        tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=IMAGE,
        image_token="<image>",
        image_break_token="<img>",
        image_end_token="</img>",
    )
    tiny._save(t.Mistral3ForConditionalGeneration(config), processor, folder)


MAKERS = {"llava_next": _llava_next, "idefics3": _idefics3, "mistral3": _mistral3}


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint of a family, with weights large enough that answers differ."""
    with seeded(0):
        MAKERS[name](folder)
    return folder
