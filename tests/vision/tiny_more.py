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


def _llava_next(folder: Path, *, granite: bool = False) -> None:
    """Write LLaVA-NeXT, an image and its tiles with a newline after every row, or Granite Vision.

    Granite Vision reads several layers of a tower without a class token, and scales its logits.
    """
    import transformers as t

    tokenizer, pinpoints = _tokenizer(), [[28, 56], [56, 28], [56, 56]]
    select, text, tower = "default", t.LlamaConfig(**_text(tokenizer)), t.CLIPVisionConfig(**TOWER)
    if granite:
        scales = {"attention_multiplier": 0.4, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
        text = t.GraniteConfig(**_text(tokenizer), **scales, logits_scaling=4.0)
        select, tower = "full", t.SiglipVisionConfig(**TOWER, vision_use_head=False)
    config = t.LlavaNextConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=[-2, -1] if granite else -1,
        vision_feature_select_strategy=select,
    )
    images = t.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    processor = t.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy=select,
        num_additional_image_tokens=int(not granite),
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
        vision_config=t.PixtralVisionConfig(**{**TOWER, "image_size": 112}, head_dim=tiny.head_size()),
        text_config=t.MistralConfig(**_text(tokenizer, head_dim=tiny.head_size(), sliding_window=None)),
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


def _deepseek_vl(folder: Path) -> None:
    """Write DeepSeek-VL: every image padded to a square, a feature per patch."""
    import transformers as t

    tokenizer = _tokenizer(image_token="<image>")
    config = t.DeepseekVLConfig(
        vision_config=t.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=t.LlamaConfig(**_text(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    images = t.DeepseekVLImageProcessor(size={"height": 28, "width": 28})
    processor = t.DeepseekVLProcessor(images, tokenizer, chat_template=IMAGE, num_image_tokens=4)
    tiny._save(t.DeepseekVLForConditionalGeneration(config), processor, folder)


def _cohere(kind: str, folder: Path) -> None:
    """Write Aya Vision or Command A Vision: tiles of 28 pixels, layers of both kinds, scaled logits."""
    import transformers as t

    names = {"image_token": "<image>", "boi_token": "<img>", "eoi_token": "</img>"}
    tokenizer = _tokenizer(**names, img_line_break_token="<global-img>")
    text = t.Cohere2Config(
        **_text(tokenizer, layer_types=["sliding_attention", "full_attention"], sliding_window=8),
        logit_scale=0.25,
    )
    options = {
        "vision_config": t.SiglipVisionConfig(**TOWER, vision_use_head=False),
        "text_config": text,
        "downsample_factor": 2,
        "tie_word_embeddings": False,
    }
    size = {"height": 28, "width": 28}
    token = tokenizer.convert_tokens_to_ids("<image>" if kind == "cohere2_vision" else "<IMG_CONTEXT>")
    if kind == "cohere2_vision":
        config = t.Cohere2VisionConfig(**options, image_token_id=token, alignment_intermediate_size=64)
        # The processor takes `patch_size` for the features of a row, which are merged patches.
        images = t.Cohere2VisionImageProcessor(size=size, patch_size=1, max_patches=4)
        processor = t.Cohere2VisionProcessor(images, tokenizer, chat_template=IMAGE)
        tiny._save(t.Cohere2VisionForConditionalGeneration(config), processor, folder)
        return
    config = t.AyaVisionConfig(**options, image_token_index=token)
    processor = t.AyaVisionProcessor(
        t.GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4),
        tokenizer,
        patch_size=14,
        img_size=28,
        downsample_factor=2,
        start_of_img_token="<img>",
        end_of_img_token="</img>",
        img_patch_token="<IMG_CONTEXT>",
        chat_template=IMAGE,
    )
    tiny._save(t.AyaVisionForConditionalGeneration(config), processor, folder)


def _lfm2_vl(folder: Path) -> None:
    """Write LFM2-VL: images of any size, and short convolutions between layers of attention."""
    import transformers as t

    tokenizer = _tokenizer()
    config = t.Lfm2VlConfig(
        vision_config=t.Siglip2VisionConfig(
            **{**TOWER, "image_size": None}, num_patches=16, vision_use_head=False
        ),
        text_config=t.Lfm2Config(**_text(tokenizer, layer_types=["conv", "full_attention"])),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=32,
        tie_word_embeddings=False,
    )
    images = t.Lfm2VlImageProcessor(
        encoder_patch_size=14,
        tile_size=56,
        min_image_tokens=1,
        max_image_tokens=4,
        max_tiles=4,
        max_num_patches=16,
    )
    processor = t.Lfm2VlProcessor(images, tokenizer, chat_template=IMAGE)
    tiny._save(t.Lfm2VlForConditionalGeneration(config), processor, folder)


MAKERS = {
    "llava_next": _llava_next,
    "idefics3": _idefics3,
    "mistral3": _mistral3,
    "deepseek_vl": _deepseek_vl,
    "aya_vision": lambda folder: _cohere("aya_vision", folder),
    "cohere2_vision": lambda folder: _cohere("cohere2_vision", folder),
    "lfm2_vl": _lfm2_vl,
}
VARIANTS = {"granite_vision": lambda folder: _llava_next(folder, granite=True)}  # of a family


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint of a family, with weights large enough that answers differ."""
    with seeded(0):
        {**MAKERS, **VARIANTS}[name](folder)
    return folder
