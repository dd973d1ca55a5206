"""Tiny checkpoints of Gemma 3n, Gemma 4 and PaliGemma."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mmrl.core.rng import seeded
from mmrl.vision.policies.tokens import Tokens
from tests.vision import tiny
from tests.vision.tiny_more import _text, _tokenizer

NAMES = {
    "image_token": "<image>",
    "boi_token": "<img>",
    "eoi_token": "</img>",
    "audio_token": "<end_of_utterance>",
    "boa_token": "<fake_token_around_image>",
    "eoa_token": "<global-img>",
}
# The first convolution has as many channels as a spectrum has bins.
AUDIO = {
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 32},
    "subsampling_conv_channels": [16, 8],
}
MEDIA = (
    "{% if c['type'] == 'image' %}<image>{% elif c['type'] == 'audio' %}<end_of_utterance>"
    "{% else %}<|video|>{% endif %}"
)


def in_float64(policy: Tokens) -> None:
    """Let norms and experts compute in float64: norms of transformers round to float32."""

    def norm(module, states):
        states = module._norm(states)
        if not hasattr(module, "with_scale"):  # Gemma 1 and 2
            return states * (1 + module.weight)
        return states * module.weight if module.with_scale else states

    if policy.model.config.model_type == "gemma4":
        hear_in_float32(policy)
    policy.model.set_experts_implementation("eager")
    for module in policy.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm, module)


def hear_in_float32(policy: Tokens) -> None:
    """Keep the tower of sounds of Gemma 4 in float32, because its attention mixes float32 and float64."""
    if tower := policy.core.audio_tower:

        def widened(module, given, output):
            output["last_hidden_state"] = output["last_hidden_state"].double()
            return output

        tower.float()
        tower.register_forward_hook(widened)


def _gemma4(folder: Path, *, large: bool = False) -> None:
    """Write Gemma 4: as E2B, with sounds and layers that read the keys of earlier ones, or as 26B-A4B.

    In 26B-A4B the tokens of an image attend to each other in layers with a sliding window.
    """
    import transformers as t

    tokenizer = _tokenizer(**NAMES)
    # A feature for every square of 28 pixels. Images keep their sizes, because they would be enlarged to the
    # least maximum of 70 features.
    patch = {"patch_size": 14, "max_soft_tokens": 70, "pooling_kernel_size": 2, "do_resize": False}
    processor = t.Gemma4Processor(
        t.Gemma4AudioFeatureExtractor(feature_size=16),
        t.Gemma4ImageProcessor(**patch),
        tokenizer,
        t.Gemma4VideoProcessor(**patch),
        chat_template=tiny.TEMPLATE.replace("PLACEHOLDER", MEDIA),
    )  # adds the token of videos
    size = len(tokenizer)
    kinds = ["sliding_attention", "full_attention"]
    kind = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": size}
    if large:
        kind = {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        }
    layers = {"num_hidden_layers": 2 if large else 4, "layer_types": kinds * (1 if large else 2)}
    heads = {"head_dim": tiny.head_size(), "global_head_dim": 2 * tiny.head_size()}
    heads |= {"sliding_window": 12, "final_logit_softcapping": 30.0}
    config = t.Gemma4Config(
        text_config=t.Gemma4TextConfig(**_text(tokenizer, **layers, **heads, **kind)),
        vision_config={
            **tiny.TOWER,
            **{"num_key_value_heads": 4, "pooling_kernel_size": 2, "standardize": large},
            "head_dim": tiny.TOWER["hidden_size"] // tiny.TOWER["num_attention_heads"],
            "position_embedding_size": 256,
            "default_output_length": 70,  # vLLM reads it
        },
        audio_config=None if large else AUDIO,
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in NAMES.items()},
        video_token_id=processor.video_token_id,
        tie_word_embeddings=False,
    )
    tiny._save(t.Gemma4ForConditionalGeneration(config), processor, folder)


def _gemma3n(folder: Path) -> None:
    """Write Gemma 3n: the tower is a model of timm, and ids of media follow those of texts in one row.

    Two of four layers read the keys and values of earlier ones, and one layer is sparse.
    """
    import transformers as t

    # The last tokens of the vocabulary, in this order: end of image, image, end of audio, audio.
    last = ("<global-img>", "<IMG_CONTEXT>", "<img>", "</img>")
    names = dict(zip(("eoi_token", "image_token", "eoa_token", "audio_token"), last, strict=True))
    names |= {"boi_token": "<fake_token_around_image>", "boa_token": "<end_of_utterance>"}
    tokenizer = _tokenizer(**names)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    size, vision, audio = len(tokenizer), ids["eoi_token_id"], ids["eoa_token_id"]
    assert (vision, audio) == (size - 4, size - 2)
    text = t.Gemma3nTextConfig(
        **_text(tokenizer, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
        **{"head_dim": 8, "sliding_window": 12, "num_kv_shared_layers": 2, "laurel_rank": 4},
        **{"altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": vision},
    )
    config = t.Gemma3nConfig(
        text_config=text,
        vision_config={
            **{"architecture": "test_efficientnet", "hidden_size": 256},
            **{"vocab_offset": vision, "vocab_size": 2},
        },
        audio_config={
            **{"hidden_size": 32, "input_feat_size": 16, "vocab_offset": audio, "vocab_size": 2},
            **{"conf_num_attention_heads": 4, "conf_num_hidden_layers": 1, "sscp_conv_channel_size": [8, 4]},
        },
        vision_soft_tokens_per_image=4,
        tie_word_embeddings=False,
        **ids,
    )
    media = "{% if c['type'] == 'audio' %}</img>{% else %}<IMG_CONTEXT>{% endif %}"
    processor = t.Gemma3nProcessor(
        t.Gemma3nAudioFeatureExtractor(feature_size=16),
        t.SiglipImageProcessor(size={"height": 64, "width": 64}),
        tokenizer,
        chat_template=tiny.TEMPLATE.replace("PLACEHOLDER", media),
        image_seq_length=4,
    )
    tiny._save(t.Gemma3nForConditionalGeneration(config), processor, folder)


def _paligemma(folder: Path, *, second: bool = False) -> None:
    """Write PaliGemma, or PaliGemma 2, with a sliding window; the processor has no template."""
    import transformers as t

    tokenizer = _tokenizer(image_token="<image>")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    images = t.SiglipImageProcessor(size={"height": 28, "width": 28}, image_seq_length=4)
    processor = t.PaliGemmaProcessor(images, tokenizer)  # adds the tokens of places
    more = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
    text = {**_text(tokenizer, head_dim=8), "bos_token_id": tokenizer.bos_token_id}
    config = t.PaliGemmaConfig(
        text_config=t.Gemma2Config(**text, **more) if second else t.GemmaConfig(**text),
        vision_config=t.SiglipVisionConfig(**tiny.TOWER, vision_use_head=False),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vocab_size=len(tokenizer),
        projection_dim=32,
        hidden_size=32,
        tie_word_embeddings=False,
    )
    tiny._save(t.PaliGemmaForConditionalGeneration(config), processor, folder)


MAKERS = {"gemma3n": _gemma3n, "gemma4": _gemma4}
VARIANTS = {"gemma4_26b": lambda folder: _gemma4(folder, large=True)}  # of a family
PALIGEMMA = {"paligemma": _paligemma, "paligemma2": lambda folder: _paligemma(folder, second=True)}


def make(name: str, folder: Path) -> Path:
    """Write the checkpoint of a family, with weights large enough that answers differ."""
    with seeded(0):
        {**MAKERS, **VARIANTS, **PALIGEMMA}[name](folder)
    return folder
