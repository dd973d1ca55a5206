"""Tiny checkpoints of Ernie 4.5-VL, Kimi-K2.5, MiniCPM-V and Molmo2, with their own processors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mmrl.core.rng import seeded
from tests.vision import tiny
from tests.vision.tiny import MROPE, QWEN_VISION, TEXT, TOWER
from tests.vision.tiny_more import _text


def _tokenizer(words: dict[str, str], **special: str):
    """Make a tokenizer with attributes that name special tokens, such as `image_token`."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = tiny._tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*words.values()]})
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=words,
        **special,
    )


def _template(image: str, video: str) -> str:
    media = "{% if c['type'] == 'video' %}" + video + "{% else %}" + image + "{% endif %}"
    return tiny.TEMPLATE.replace("PLACEHOLDER", media)


def _ernie(folder: Path) -> None:
    """Write Ernie 4.5-VL: every layer has experts for text and others for media."""
    import transformers as t

    words = {
        f"{kind}_{place}token": f"<|{kind}_{place}|>".upper()
        for kind in ("image", "video")
        for place in ("", "start_", "end_")
    }
    tokenizer = _tokenizer(words)
    ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in words.items()}
    text = _text(
        tokenizer,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        mlp_layer_types=["sparse", "sparse"],
        moe_intermediate_size=[32, 16],
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
    )
    vision = {key: QWEN_VISION[key] for key in ("depth", "hidden_size", "intermediate_size", "num_heads")}
    config = t.Ernie4_5_VLMoeConfig(
        text_config=text, vision_config=vision, **{f"{name}_id": number for name, number in ids.items()}
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    patch = {"patch_size": 14, "merge_size": 2}
    processor = t.Ernie4_5_VLMoeProcessor(
        t.Ernie4_5_VLMoeImageProcessor(size=size, **patch),
        tokenizer,
        t.Ernie4_5_VLMoeVideoProcessor(size=size, draw_on_frames=False, **patch),
        chat_template=_template(
            "<|IMAGE_START_|><|IMAGE_|><|IMAGE_END_|>", "<|VIDEO_START_|><|VIDEO_|><|VIDEO_END_|>"
        ),
    )
    tiny._save(t.Ernie4_5_VLMoeForConditionalGeneration(config), processor, folder)


def _kimi(folder: Path) -> None:
    """Write Kimi-K2.5: latent attention, whose keys and values differ in width, and an expert layer."""
    import transformers as t

    words = {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"}
    around = {word: f"<|media_{word}|>" for word in ("begin", "content", "end")}
    tokenizer = _tokenizer(words | around)
    ids = tokenizer.convert_tokens_to_ids
    text = t.DeepseekV3Config(
        **_text(tokenizer, num_key_value_heads=4),
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    )
    tower = {key: TOWER[key] for key in TOWER if key != "image_size"}
    config = t.Kimi_K25Config(
        text_config=text,
        vision_config={**tower, "pos_emb_height": 8, "pos_emb_width": 8},
        projection_hidden_size=TOWER["hidden_size"],
        image_token_id=ids(words["image_token"]),
        video_token_id=ids(words["video_token"]),
        vision_start_token_id=ids(around["begin"]),
        vision_end_token_id=ids(around["end"]),
        tie_word_embeddings=False,
    )
    processor = t.Kimi_K25Processor(
        t.Kimi_K25ImageProcessor(patch_size=14),
        tokenizer,
        t.Kimi_K25VideoProcessor(patch_size=14),
        chat_template=_template(
            "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
            "<|kimi_k25_video_placeholder|>",
        ),
    )
    tiny._save(t.Kimi_K25ForConditionalGeneration(config), processor, folder)


def _minicpm(version: str, folder: Path) -> None:
    """Write MiniCPM-V 4.6 or 4.7: images in slices of about 64 pixels, and three recurrent layers."""
    import transformers as t

    words = {f"{name}_token": f"<|{name}|>" for name in ("image", "video")}
    words |= {
        f"{name}_{place}_token": f"<{'/' * (place == 'end')}{name}>"
        for name in ("image", "slice", "image_id")
        for place in ("start", "end")
    }
    tokenizer = _tokenizer(words)
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "model_type": "qwen3_5_text",
        **_text(tokenizer, num_hidden_layers=4),
        "head_dim": TEXT["hidden_size"] // TEXT["num_attention_heads"],
        "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    name = f"MiniCPMV4_{version}"
    markers = {
        f"{mark}_id": ids(words[f"{mark}_token"])
        for mark in ("image_start", "image_end", "slice_start", "slice_end")
    }
    config = getattr(t, f"{name}Config")(
        text_config=text,
        vision_config={**TOWER, "num_hidden_layers": 3, "image_size": 112},
        insert_layer_id=1,
        image_token_id=ids(words["image_token"]),
        video_token_id=ids(words["video_token"]),
        **(markers | {"newline_id": tokenizer("\n")["input_ids"][0]} if version == "7" else {}),
    )
    slices = {"scale_resolution": 64, "patch_size": 14, "max_slice_nums": 4}
    processor = getattr(t, f"{name}Processor")(
        t.MiniCPMV4_6ImageProcessor(**slices),
        t.MiniCPMV4_6VideoProcessor(**{**slices, "max_slice_nums": 1}),
        tokenizer,
        chat_template=_template(words["image_token"], words["video_token"]),
    )
    tiny._save(getattr(t, f"{name}ForConditionalGeneration")(config), processor, folder)


MOLMO = ("im_patch", "im_col", "im_start", "low_res_im_start", "frame_start", "im_end", "frame_end", "im_low")


def _molmo2(folder: Path) -> None:
    """Write Molmo2: crops of 56 pixels, and tokens of images beyond the vocabulary of the head."""
    import transformers as t

    words = {"image_token": "<|image|>", "video_token": "<|video|>"}
    tokenizer = _tokenizer({**words, **{word: f"<{word}>" for word in MOLMO}})
    patch, column, start, low, frame, end, frame_end, small = tokenizer.convert_tokens_to_ids(
        [f"<{word}>" for word in MOLMO]
    )
    inside = min(tokenizer.convert_tokens_to_ids([*words.values(), *(f"<{word}>" for word in MOLMO)]))
    text = _text(tokenizer, head_dim=8)
    text |= {"vocab_size": inside, "additional_vocab_size": len(tokenizer) - inside}
    config = t.Molmo2Config(
        text_config=text,
        vision_config={**TOWER, "image_size": [56, 56], "head_dim": 8, "num_key_value_heads": 4},
        adapter_config={
            "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
            "intermediate_size": 64, "text_hidden_size": 32, "vision_feature_layer": [1, 0],
        },
        image_patch_id=patch,
        image_start_token_id=start,
        low_res_image_start_token_id=low,
        image_end_token_id=end,
        frame_start_token_id=frame,
        frame_end_token_id=frame_end,
        image_col_id=column,
        image_low_res_id=small,
    )  # fmt: skip
    size = {"height": 56, "width": 56}
    processor = t.Molmo2Processor(
        t.Molmo2ImageProcessor(size=size, max_crops=4, overlap_margins=[0, 0], patch_size=14),
        t.Molmo2VideoProcessor(size=size, patch_size=14),
        tokenizer,
        chat_template=_template(*words.values()),
    )
    tiny._save(t.Molmo2ForConditionalGeneration(config), processor, folder)


def _internvl(kind: str, folder: Path) -> None:
    """Write InternVL3.5 with Qwen3, its experts or those of gpt-oss; large images are cut into tiles."""
    import transformers as t

    words = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    tokenizer = _tokenizer({**words, "video_token": "<video>"})
    text = _text(tokenizer, model_type=kind, head_dim=tiny.head_size())
    if kind != "qwen3":
        text |= {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
        text |= {"moe_intermediate_size": 16}
    if kind == "gpt_oss":
        text |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = t.InternVLConfig(
        vision_config={**TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=1,
        tie_word_embeddings=False,
    )
    size = {"height": 28, "width": 28}
    processor = t.InternVLProcessor(
        t.GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4),
        tokenizer,
        t.InternVLVideoProcessor(size=size),
        image_seq_length=1,
        chat_template=_template("<IMG_CONTEXT>", "<video>"),
    )
    tiny._save(t.InternVLForConditionalGeneration(config), processor, folder)


# InternVL3.5 by the type of its language model.
VARIANTS = {f"internvl_{kind}": partial(_internvl, kind) for kind in ("qwen3", "qwen3_moe", "gpt_oss")}
MAKERS = {
    "ernie4_5_vl_moe": _ernie,
    "kimi_k25": _kimi,
    "minicpmv4_6": lambda folder: _minicpm("6", folder),
    "minicpmv4_7": lambda folder: _minicpm("7", folder),
    "molmo2": _molmo2,
}


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint of a family, with weights large enough that answers differ."""
    with seeded(0):
        {**MAKERS, **VARIANTS}[name](folder)
    return folder
