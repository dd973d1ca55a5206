"""Tiny checkpoints of every family, made from the real configurations of transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from mmrl.core.rng import seeded
from mmrl.core.types import Frames, Media, Message, Part, Prompt
from mmrl.vision.builders.tiny_models import QWEN_MEDIA, SPECIAL, TEMPLATE, tiny_tokenizer

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
RECURRENT = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


def head_size() -> int:
    """Return the width of a head of the language models."""
    return TEXT["hidden_size"] // TEXT["num_attention_heads"]


def _tokenizer():
    tokenizer = tiny_tokenizer(["the quick brown fox 0123456789"] * 4, 320)
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                "<end_of_utterance>",
                "<fake_token_around_image>",
                "<global-img>",
                "<IMG_CONTEXT>",
                "<img>",
                "</img>",
            ]
        }
    )
    return tokenizer


def _begin(tokenizer):
    """Let a tokenizer begin every sequence with BOS, as those of Gemma and Llama do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    return tokenizer


def _ids(tokenizer):
    return {
        word: tokenizer.convert_tokens_to_ids(word)
        for word in (
            *SPECIAL,
            "<IMG_CONTEXT>",
            "<fake_token_around_image>",
            "<global-img>",
            "<img>",
            "</img>",
        )
    }


def _qwen(kind: str, folder: Path) -> None:
    import transformers as t
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor, Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl import Qwen3VLVideoProcessor

    tokenizer = _tokenizer()
    ids = _ids(tokenizer)
    special = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    text = {
        **TEXT,
        "vocab_size": len(tokenizer),
        "rope_parameters": MROPE,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    patch = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if kind.startswith("qwen3") else {}
    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56, **patch, **half)
    clips = {"size": {"shortest_edge": 28 * 28, "longest_edge": 8 * 56 * 56}, **patch}
    template = TEMPLATE.replace("PLACEHOLDER", QWEN_MEDIA)
    if kind == "qwen2_vl":
        vision = {
            "depth": 2,
            "embed_dim": QWEN_VISION["hidden_size"],
            "hidden_size": QWEN_VISION["out_hidden_size"],
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 14,
        }
        model = t.Qwen2VLForConditionalGeneration(
            t.Qwen2VLConfig(text_config=text, vision_config=vision, **special)
        )
        processor = t.Qwen2VLProcessor(
            images,
            tokenizer,
            Qwen2VLVideoProcessor(cap_pixels_per_frame=False, **clips),
            chat_template=template,
        )
    elif kind == "qwen2_5_vl":
        vision = {**QWEN_VISION, "window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        model = t.Qwen2_5_VLForConditionalGeneration(
            t.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
        )
        processor = t.Qwen2_5_VLProcessor(
            images,
            tokenizer,
            Qwen2VLVideoProcessor(cap_pixels_per_frame=False, **clips),
            chat_template=template,
        )
    elif kind == "qwen3_5":
        text |= {
            "num_hidden_layers": 4,  # the first three have a recurrent state, the last one attends
            "head_dim": head_size(),
            "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
            **RECURRENT,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        }
        vision = {**QWEN_VISION, "num_position_embeddings": 64}
        model = t.Qwen3_5ForConditionalGeneration(
            t.Qwen3_5Config(text_config=text, vision_config=vision, **special)
        )
        processor = t.Qwen3VLProcessor(
            images,
            tokenizer,
            Qwen3VLVideoProcessor(cap_pixels_per_frame=False, **clips),
            chat_template=template,
        )
    else:
        vision = {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        text["head_dim"] = head_size()
        text["rope_parameters"] = {**MROPE, "mrope_interleaved": True}  # vLLM reads it, transformers need not
        model = t.Qwen3VLForConditionalGeneration(
            t.Qwen3VLConfig(text_config=text, vision_config=vision, **special)
        )
        processor = t.Qwen3VLProcessor(
            images,
            tokenizer,
            Qwen3VLVideoProcessor(cap_pixels_per_frame=False, **clips),
            chat_template=template,
        )
    _save(model, processor, folder)


GLM_SPECIAL = ("image", "video", "begin_of_image", "end_of_image", "begin_of_video", "end_of_video")


def _glm(folder: Path, kind: str = "glm46v") -> None:
    """Write GLM-4.6V, GLM-4.1V or GLM-4.5V, whose images have start and end tokens of their own."""
    import transformers as t

    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{word}|>" for word in GLM_SPECIAL]})
    ids = {word: tokenizer.convert_tokens_to_ids(f"<|{word}|>") for word in GLM_SPECIAL}
    text = {
        **TEXT,
        "model_type": "glm4v_moe_text" if kind == "glm4v_moe" else "glm4v_text",
        "vocab_size": len(tokenizer),
        "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
        "attention_bias": True,  # vLLM reads it; transformers have a bias in any case
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {**QWEN_VISION, "image_size": 56}
    if kind == "glm4v_moe":
        text |= {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
        text |= {"moe_intermediate_size": 16, "n_shared_experts": 1, "head_dim": head_size()}
        text |= {"use_qk_norm": False}  # vLLM reads it
    special = {
        f"{kind}_{place}token_id": ids[word]
        for kind in ("image", "video")
        for place, word in {
            "": kind,
            "start_": f"begin_of_{kind}",
            "end_": f"end_of_{kind}",
        }.items()
    }
    name = {"glm46v": "Glm46V", "glm4v": "Glm4v", "glm4v_moe": "Glm4vMoe"}[kind]
    config = getattr(t, f"{name}Config")(text_config=text, vision_config=vision, **special)
    size = {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 56 * 56}  # of two frames
    patch = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    video = "<|begin_of_video|><|video|><|end_of_video|>"
    media = "{% if c['type'] == 'video' %}" + video + "{% else %}" + image + "{% endif %}"
    name = name.removesuffix("Moe")  # GLM-4.5V has the processor of GLM-4.1V
    processor = getattr(t, f"{name}Processor")(
        getattr(t, f"{name}ImageProcessor")(size=size, **patch),
        tokenizer,
        getattr(t, f"{name}VideoProcessor")(size=size, **patch),
        chat_template=TEMPLATE.replace("PLACEHOLDER", media),
    )
    _save(t.AutoModelForImageTextToText.from_config(config), processor, folder)


def _gemma(folder: Path) -> None:
    """Write Gemma 3: the tokens of an image attend to each other, and one layer has a sliding window."""
    import transformers as t

    tokenizer = _tokenizer()
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": "<image>", "boi_token": "<img>", "eoi_token": "</img>"},
    )
    tokenizer.add_tokens(["\n" * number for number in range(1, 5)])  # which vLLM looks for
    ids = _ids(_begin(tokenizer))
    text = {
        **TEXT,
        "vocab_size": len(tokenizer),
        "head_dim": head_size(),
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    config = t.Gemma3Config(
        text_config=text,
        vision_config={**TOWER, "vision_use_head": False, "image_size": 56},
        mm_tokens_per_image=4,
        image_token_index=ids["<image>"],
        boi_token_index=ids["<img>"],
        eoi_token_index=ids["</img>"],
        tie_word_embeddings=False,  # tied random weights answer with the same token for ever
    )
    size = {"height": 56, "width": 56}
    processor = t.Gemma3Processor(
        t.Gemma3ImageProcessor(size=size),
        tokenizer,
        chat_template=TEMPLATE.replace("PLACEHOLDER", "<img>"),
        image_seq_length=4,
    )
    model = t.Gemma3ForConditionalGeneration(config)
    # Transformers begin it with 0: no image would be seen.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    _save(model, processor, folder)


def _llava(kind: str, folder: Path) -> None:
    import transformers as t

    tokenizer = _begin(_tokenizer()) if kind == "llava" else _tokenizer()
    ids, bos = _ids(tokenizer), tokenizer.bos_token_id
    text = t.LlamaConfig(**TEXT, vocab_size=len(tokenizer), bos_token_id=bos, eos_token_id=ids["<|im_end|>"])
    media = "{% if c['type'] == 'image' %}<image>{% else %}<video>{% endif %}"
    template = TEMPLATE.replace("PLACEHOLDER", media)
    size = {"height": 28, "width": 28}
    if kind == "llava":
        config = t.LlavaConfig(
            vision_config=t.CLIPVisionConfig(**TOWER),
            text_config=text,
            image_token_id=ids["<image>"],
            vision_feature_layer=-1,
        )
        images = t.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size)
        processor = t.LlavaProcessor(
            images,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        )
        _save(t.LlavaForConditionalGeneration(config), processor, folder)
        return
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = t.LlavaOnevisionConfig(
        vision_config=t.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=text,
        image_token_id=ids["<image>"],
        video_token_id=ids["<video>"],
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
    )
    images = t.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints)
    processor = t.LlavaOnevisionProcessor(
        images,
        tokenizer,
        t.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=template,
    )
    _save(t.LlavaOnevisionForConditionalGeneration(config), processor, folder)


def _smolvlm(folder: Path) -> None:
    import transformers as t

    tokenizer = _tokenizer()
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )
    text = t.LlamaConfig(
        **TEXT,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=_ids(tokenizer)["<|im_end|>"],
        pad_token_id=0,
    )
    config = t.SmolVLMConfig(
        vision_config={**TOWER},
        text_config=text,
        image_token_id=_ids(tokenizer)["<image>"],
        scale_factor=2,
        pad_token_id=0,
    )
    size = {"longest_edge": 28}
    images = t.SmolVLMImageProcessor(size=size, max_image_size=size, do_image_splitting=False)
    clips = t.SmolVLMVideoProcessor(
        size=size, max_image_size=size, do_image_splitting=False, num_frames=8, fps=1
    )
    media = "{% if c['type'] == 'image' %}<image>{% else %}<video>{% endif %}"
    processor = t.SmolVLMProcessor(
        images, tokenizer, clips, image_seq_len=1, chat_template=TEMPLATE.replace("PLACEHOLDER", media)
    )
    _save(t.SmolVLMForConditionalGeneration(config), processor, folder)


def _internvl(folder: Path) -> None:
    import transformers as t

    tokenizer = _tokenizer()
    ids = _ids(tokenizer)
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
            "context_image_token": "<IMG_CONTEXT>",
        },
    )
    text = t.LlamaConfig(**TEXT, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=ids["<|im_end|>"])
    vision = t.InternVLVisionConfig(**{**TOWER, "image_size": [28, 28], "patch_size": [14, 14]})
    config = t.InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=1,
        downsample_ratio=0.5,
    )
    size = {"height": 28, "width": 28}
    images = t.GotOcr2ImageProcessor(size=size, crop_to_patches=False)
    media = "{% if c['type'] == 'image' %}<IMG_CONTEXT>{% else %}<video>{% endif %}"
    processor = t.InternVLProcessor(
        images,
        tokenizer,
        t.InternVLVideoProcessor(size=size),
        image_seq_length=1,
        chat_template=TEMPLATE.replace("PLACEHOLDER", media),
    )
    _save(t.InternVLForConditionalGeneration(config), processor, folder)


def _save(model, processor, folder: Path) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            # Eight times the usual deviation, so that what is seen changes what is said.
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


MAKERS = {
    "qwen2_vl": lambda folder: _qwen("qwen2_vl", folder),
    "qwen2_5_vl": lambda folder: _qwen("qwen2_5_vl", folder),
    "qwen3_vl": lambda folder: _qwen("qwen3_vl", folder),
    "qwen3_5": lambda folder: _qwen("qwen3_5", folder),
    "glm46v": _glm,
    "gemma3": _gemma,
    "llava": lambda folder: _llava("llava", folder),
    "llava_onevision": lambda folder: _llava("llava_onevision", folder),
    "smolvlm": _smolvlm,
    "internvl": _internvl,
}
# Families of which more than norms compute in float32, whatever the weights are, and what that changes.
IN_FLOAT32 = {
    "gemma3": 1e-5,
    "internvl_gpt_oss": 1e-6,
    "kimi_k25": 1e-6,
    "llama4": 1e-6,
    "minicpmv4_6": 1e-3,
    "minicpmv4_7": 1e-3,
    "qwen3_5": 1e-3,
}
WITH_VIDEO = tuple(name for name in MAKERS if name not in ("llava", "gemma3"))


def make(family: str, folder: Path) -> Path:
    """Write the checkpoint of a family, with weights large enough that answers differ."""
    with seeded(0):
        MAKERS[family](folder)
    return folder


def clip(num: int = 4, *, seed: int = 0, side: int = 56) -> Media:
    """Make a clip of noise, one frame a second."""
    pixels = torch.randint(
        0, 255, (num, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return Media("video", f"clip{seed}", lambda: Frames(pixels, torch.arange(num).double(), float(num)))


def picture(*, seed: int = 0, height: int = 56, width: int = 56) -> Media:
    """Make a image of noise."""
    pixels = torch.randint(
        0, 255, (1, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return Media("image", f"picture{seed}", lambda: Frames(pixels, torch.zeros(1)))


def ask(uid: str, *parts) -> Prompt:
    """Ask something, in words and media."""
    return Prompt(
        uid,
        (
            Message(
                "user", tuple(Part(part) if isinstance(part, str) else Part(media=part) for part in parts)
            ),
        ),
    )


def in_few_bits(model: Path, folder: Path, nbits: int = 4) -> None:
    """Save a checkpoint with weights of 4 or 8 bits, as the run files of 32B and 72B name one."""
    from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

    bits = {"load_in_4bit": nbits == 4, "load_in_8bit": nbits == 8, "bnb_4bit_quant_type": "nf4"}
    settings = BitsAndBytesConfig(**bits, llm_int8_skip_modules=["lm_head"])
    AutoModelForImageTextToText.from_pretrained(model, quantization_config=settings).save_pretrained(folder)
    AutoProcessor.from_pretrained(model).save_pretrained(folder)
