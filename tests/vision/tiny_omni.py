"""Tiny checkpoints of the thinkers of Qwen2.5-Omni and Qwen3-Omni, and sounds that they read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmrl.core.rng import seeded
from mmrl.core.types import Frames, Media, Prompt, Sound
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.policies.tokens import Tokens
from tests.vision import tiny, tiny_more
from tests.vision.tiny import MROPE, QWEN_VISION

NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
MEDIA = (
    "{% if c['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|video_pad|><|vision_end|>{% endif %}"
)
AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "output_dim": 32,
    "max_source_positions": 200,
}


def parts(kind: str):
    """Make the configuration of a thinker and its processor."""
    import transformers as t
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tokenizer = tiny_more._tokenizer(**NAMED)
    ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in NAMED.items()}
    text = tiny_more._text(tokenizer, rope_parameters=MROPE)
    special = {
        "vision_start_token_id": ids["vision_bos_token"],
        "vision_end_token_id": ids["vision_eos_token"],
        "audio_start_token_id": ids["audio_bos_token"],
        "audio_end_token_id": ids["audio_eos_token"],
    }
    side = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56, **side)
    clips = Qwen2VLVideoProcessor(
        cap_pixels_per_frame=False, size={"shortest_edge": 28 * 28, "longest_edge": 8 * 56 * 56}, **side
    )
    mels = {"feature_size": 16, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400}
    template = tiny.TEMPLATE.replace("PLACEHOLDER", MEDIA)
    if kind == "qwen2_5_omni_thinker":
        vision = {**QWEN_VISION, "window_size": 112, "fullatt_block_indexes": [1]}
        named = {f"{kind}_token_index": ids[f"{kind}_token"] for kind in ("image", "video", "audio")}
        config = t.Qwen2_5OmniThinkerConfig(
            text_config=text,
            vision_config=vision,
            audio_config={**AUDIO, "n_window": 20},
            **special,
            **named,
        )
        extractor = t.WhisperFeatureExtractor(**mels, chunk_length=8)
        return config, t.Qwen2_5OmniProcessor(images, clips, extractor, tokenizer, chat_template=template)
    text |= {"head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    text |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    }
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    named = {f"{kind}_token_id": ids[f"{kind}_token"] for kind in ("image", "video", "audio")}
    config = t.Qwen3OmniMoeThinkerConfig(
        text_config=text,
        vision_config=vision,
        audio_config={**AUDIO, "downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 100},
        position_id_per_seconds=13,  # as released
        **special,
        **named,
    )
    extractor = t.WhisperFeatureExtractor(**mels, chunk_length=30)
    return config, t.Qwen3OmniMoeProcessor(images, clips, extractor, tokenizer, chat_template=template)


def _write(kind: str, folder: Path) -> None:
    """Write the checkpoint of a thinker."""
    from transformers import AutoModelForImageTextToText

    config, processor = parts(kind)
    model = AutoModelForImageTextToText.from_config(config)
    for name, value in model.model.audio_tower.named_parameters():
        value.data.mul_(4 if "conv" in name else 1)
    tiny._save(model, processor, folder)


MAKERS = {kind: partial(_write, kind) for kind in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")}


def make(kind: str, folder: Path) -> Path:
    """Write the checkpoint of a thinker, with weights large enough that answers differ."""
    with seeded(0):
        MAKERS[kind](folder)
    return folder


def tone(seconds: float = 0.5, *, pitch: float = 440.0, rate: int = 16000, seed: int = 0) -> Sound:
    """Make a tone with a little noise."""
    times = torch.arange(round(seconds * rate)) / rate
    noise = torch.randn(len(times), generator=torch.Generator().manual_seed(seed))
    return Sound(0.4 * torch.sin(2 * torch.pi * pitch * times) + 0.01 * noise, rate)


def sound(seconds: float = 0.5, *, pitch: float = 440.0, rate: int = 16000, seed: int = 0) -> Media:
    """Make a sound as a medium."""
    made = tone(seconds, pitch=pitch, rate=rate, seed=seed)
    return Media("audio", f"sound{seed}", lambda: made)


def prompts(family: str) -> list[Prompt]:
    """Ask in words, about images, sounds, clips, and clips with their sound."""
    return [
        tiny.ask("words", "the quick brown fox"),
        tiny.ask("sound", tiny.picture(), "what", sound(1.5)),
        tiny.ask(
            "sounds", "is", sound(1.3, rate=22050, seed=1), "like", tiny.picture(seed=1), sound(0.2, seed=2)
        ),
        tiny.ask("clip", tiny.clip(4), "when", sound(1.0, seed=3)),
        tiny.ask("film", "look", film(6, seconds=0.7, heard=3.0), "when", tiny.picture(seed=2), "fox"),
        tiny.ask("alone", sound(2.2, seed=4), "quick"),
    ]


def placed(policy: Tokens, encoded: EncodedPrompt, more: int = 0) -> dict[str, Any]:
    """Place a prompt and `more` tokens after it by `get_rope_index` of the model (see `mixed.placed`)."""
    config, ids, media = policy.model.config, encoded.ids, encoded.media
    begins = (ids == config.audio_start_token_id).nonzero()[:, 0]
    heard = bool((ids[begins + 1] == config.video_token_id).any())
    if not more:  # `generate` places a prompt itself
        return {"use_audio_in_video": heard}
    whole = torch.cat([ids, ids.new_zeros(more)])[None]
    mask = media.get("feature_attention_mask")
    positions, _ = policy.core.get_rope_index(
        whole,
        media.get("image_grid_thw"),
        media.get("video_grid_thw"),
        torch.ones_like(whole),
        heard,
        None if mask is None else mask.sum(1),
        media.get("video_second_per_grid"),
    )
    return {"position_ids": positions}


def film(num: int = 4, *, seconds: float = 1.0, heard: float = 4.0, seed: int = 0) -> Media:
    """Make a clip of noise with a sound of `heard` seconds; `seconds` lie between two frames."""
    pixels = tiny.clip(num, seed=seed).load().pixels
    times = torch.arange(num).double() * seconds
    made = Frames(pixels, times, num * seconds, tone(heard, seed=seed) if heard else None)
    return Media("video", f"film{seed}", lambda: made)
