"""Builders of small Qwen2.5-VL, Qwen2.5-Omni and LLaVA models with newly trained tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream, seeded

# Special tokens of the tiny models.
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "<video>",
)
# The ChatML template of Qwen; PLACEHOLDER is replaced by the tokens of an image or video.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}PLACEHOLDER{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_MEDIA = (
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|video_pad|><|vision_end|>{% endif %}"
)
OMNI_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
OMNI_MEDIA = (
    "{% if c['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% else %}"
    f"{QWEN_MEDIA}{{% endif %}}"
)


def tiny_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    tokens: Sequence[str] = (),
    named: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Train a byte-level BPE tokenizer that splits digits, as in Qwen; `tokens` become one token each.

    `named` maps attribute names of the tokenizer to special tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(tokens),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all bytes, to encode any text
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        **({"extra_special_tokens": dict(named)} if named else {}),
    )


CLIP_INIT = 0.02  # standard deviation of CLIP's initial weights in transformers


@dataclass(kw_only=True)
class TinyModel:
    """Base class of the builders of small models: common options, the language model, and saving."""

    stream: Stream
    texts: tuple[str, ...] = ("0123456789 abcdefghijklmnopqrstuvwxyz",)
    tokens: tuple[str, ...] = ()
    vocab_size: PositiveInt = 512
    template: str = TEMPLATE
    width: PositiveInt = 128
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    vision_width: PositiveInt = 64
    vision_layers: PositiveInt = 2
    init: PositiveFloat = 0.02

    def text_config(self, tokenizer: Any, **others: Any) -> dict[str, Any]:
        """Return the configuration of the language model as a dictionary."""
        return {
            "vocab_size": len(tokenizer),
            "hidden_size": self.width,
            "intermediate_size": 3 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": max(1, self.heads // 2),  # grouped-query attention, as in Qwen2.5
            "initializer_range": self.init,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
            "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
            **others,
        }

    def initialized(self, model: Any) -> Any:
        """Rescale initial weights if the model class ignores an option; does nothing by default."""
        return model

    def write(
        self, name: str, model_class: type, config: Any, processor: Any, output: Path
    ) -> dict[str, Any]:
        """Save a model with random weights and its processor; return the numbers of parameters and tokens."""
        with seeded(self.stream.seed_of(name)):
            model = self.initialized(model_class(config))
        model.save_pretrained(output)
        processor.save_pretrained(output)
        parameters = sum(p.numel() for p in model.parameters())
        return {"parameters": parameters, "vocabulary": len(processor.tokenizer)}


@builder
@dataclass(kw_only=True)
class TinyQwen2_5Vl(TinyModel):
    """Build a small Qwen2.5-VL with random weights, using the model classes of transformers.

    Four patches of an image, or of two video frames, become one token.

    Args:
        texts: Training texts of the tokenizer.
        tokens: Texts that become one token each, such as the words of tool calls.
        vocab_size: Number of tokens of the tokenizer.
        template: Chat template; PLACEHOLDER stands for an image or video.
        width: Hidden size of the language model.
        layers: Number of layers of the language model.
        heads: Number of attention heads of the language model.
        vision_width: Hidden size of the vision tower.
        vision_layers: Number of layers of the vision tower.
        max_pixels: Maximum number of pixels of an image or video frame; larger images are shrunk.
        patch: Side of a patch in pixels.
        rope_theta: Base of the language model's rotary position embeddings. Image rows and columns use the
            slower half of the frequencies; at base 10000 in narrow heads, these hardly vary over few tokens.
        init: Standard deviation of the initial weights.
    """

    max_pixels: PositiveInt = 56 * 56
    patch: PositiveInt = 14
    rope_theta: PositiveFloat = 10000.0

    def build(self, output: Path) -> dict[str, Any]:
        """Write the model and its processor to `output`; return the number of parameters and of tokens."""
        from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
        from transformers.models.qwen2_vl import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

        token = (2 * self.patch) ** 2  # pixels per image token
        processor = Qwen2_5_VLProcessor(
            image_processor=Qwen2VLImageProcessor(
                min_pixels=token, max_pixels=self.max_pixels, patch_size=self.patch
            ),
            video_processor=Qwen2VLVideoProcessor(
                cap_pixels_per_frame=False,
                size={"shortest_edge": token, "longest_edge": self.max_pixels},  # pixels per frame
                patch_size=self.patch,
            ),
            tokenizer=tiny_tokenizer(self.texts, self.vocab_size, self.tokens),
            chat_template=self.template.replace("PLACEHOLDER", QWEN_MEDIA),
        )
        config = self._config(processor.tokenizer)
        return self.write("tiny_qwen2_5_vl", Qwen2_5_VLForConditionalGeneration, config, processor, output)

    def _config(self, tokenizer: Any) -> Any:
        from transformers import Qwen2_5_VLConfig

        # Divide the rotary frequencies of a head among time, height and width.
        pairs = self.width // self.heads // 2
        sections = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
        rope = {"rope_type": "default", "rope_theta": self.rope_theta, "mrope_section": sections}
        vision = {
            "depth": self.vision_layers,
            "hidden_size": self.vision_width,
            "intermediate_size": 2 * self.vision_width,
            "num_heads": 4,
            "out_hidden_size": self.width,  # output size of the patch merger
            "patch_size": self.patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            # Side in pixels of the windows (4 x 4 tokens) of blocks that are not in `fullatt_block_indexes`.
            "window_size": 8 * self.patch,
            "fullatt_block_indexes": [self.vision_layers - 1],
            "tokens_per_second": 2,
            "initializer_range": self.init,
        }
        marks = {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }
        return Qwen2_5_VLConfig(
            text_config=self.text_config(tokenizer, max_position_embeddings=4096, rope_parameters=rope),
            vision_config=vision,
            tie_word_embeddings=True,
            **{name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()},
        )


@builder
@dataclass(kw_only=True)
class TinyQwen2_5Omni(TinyModel):
    """Build a small thinker of Qwen2.5-Omni (arXiv 2503.20215) with random weights, for texts and sounds.

    It uses the model classes of transformers. Each token of a sound covers 40 ms. An image becomes one token.

    Args:
        texts: Training texts of the tokenizer.
        tokens: Texts that become one token each, such as the words of tool calls.
        vocab_size: Number of tokens of the tokenizer.
        template: Chat template; PLACEHOLDER stands for a medium.
        width: Hidden size of the language model.
        layers: Number of layers of the language model.
        heads: Number of attention heads of the language model.
        vision_width: Hidden size of the towers of images and sounds.
        vision_layers: Number of layers of these towers.
        seconds: Longest sound that the processor reads.
        bands: Number of frequency bands of the spectrum.
        init: Standard deviation of the initial weights.
    """

    seconds: PositiveInt = 30
    bands: PositiveInt = 40

    def build(self, output: Path) -> dict[str, Any]:
        """Write the model and its processor to `output`; return the number of parameters and of tokens."""
        from transformers import (
            Qwen2_5OmniProcessor,
            Qwen2_5OmniThinkerConfig,
            Qwen2_5OmniThinkerForConditionalGeneration,
            WhisperFeatureExtractor,
        )
        from transformers.models.qwen2_vl import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

        pixels = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}
        tokenizer = tiny_tokenizer(self.texts, self.vocab_size, self.tokens, OMNI_TOKENS)
        processor = Qwen2_5OmniProcessor(
            Qwen2VLImageProcessor(size=pixels, patch_size=14),
            Qwen2VLVideoProcessor(cap_pixels_per_frame=False, size=pixels, patch_size=14),
            WhisperFeatureExtractor(feature_size=self.bands, chunk_length=self.seconds),
            tokenizer,
            chat_template=self.template.replace("PLACEHOLDER", OMNI_MEDIA),
        )
        ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in OMNI_TOKENS.items()}
        pairs = self.width // self.heads // 2
        sections = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
        tower = {
            "hidden_size": self.vision_width,
            "intermediate_size": 2 * self.vision_width,
            "num_heads": 4,
            "out_hidden_size": self.width,
            "initializer_range": self.init,
        }
        ear = {
            "num_mel_bins": self.bands,
            "d_model": self.vision_width,
            "encoder_layers": self.vision_layers,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 2 * self.vision_width,
            "output_dim": self.width,
            "initializer_range": self.init,
        }
        config = Qwen2_5OmniThinkerConfig(
            text_config=self.text_config(tokenizer, max_position_embeddings=4096, rope_parameters=rope),
            vision_config={**tower, "depth": self.vision_layers, "fullatt_block_indexes": [0]},
            audio_config=ear,
            **{f"{kind}_token_index": ids[f"{kind}_token"] for kind in ("image", "video", "audio")},
            **{
                f"{kind}_{place}_token_id": ids[f"{kind}_{begin}_token"]
                for kind in ("audio", "vision")
                for place, begin in (("start", "bos"), ("end", "eos"))
            },
            initializer_range=self.init,
            tie_word_embeddings=True,
        )
        maker = Qwen2_5OmniThinkerForConditionalGeneration
        return self.write("tiny_qwen2_5_omni", maker, config, processor, output)


@builder
@dataclass(kw_only=True)
class TinyLlava(TinyModel):
    """Build a small LLaVA (arXiv 2304.08485) with random weights, using the model classes of transformers.

    It has a CLIP vision tower, a projector of two layers and a Llama language model.

    Args:
        texts: Training texts of the tokenizer.
        tokens: Texts that become one token each, such as the words of tool calls.
        vocab_size: Number of tokens of the tokenizer.
        template: Chat template; PLACEHOLDER stands for an image.
        width: Hidden size of the language model.
        layers: Number of layers of the language model.
        heads: Number of attention heads of the language model.
        vision_width: Hidden size of the vision tower.
        vision_layers: Number of layers of the vision tower.
        side: Side of an image in pixels.
        patch: Side of a patch in pixels; each patch becomes one token.
        init: Standard deviation of the initial weights of the language model and the projector. The vision
            tower keeps CLIP's initialisation.
        position_init: Standard deviation of the vision tower's position embeddings; CLIP's value is 0.02.
    """

    layers: PositiveInt = 3
    vision_width: PositiveInt = 96
    vision_layers: PositiveInt = 3
    side: PositiveInt = 48
    patch: PositiveInt = 8
    position_init: PositiveFloat = 0.02

    def __post_init__(self) -> None:
        if self.side % self.patch:
            raise ValueError(f"an image of {self.side} pixels cannot be cut into patches of {self.patch}")

    def build(self, output: Path) -> dict[str, Any]:
        """Write the model and its processor to `output`; return the number of parameters and of tokens."""
        from transformers import (
            CLIPImageProcessor,
            CLIPVisionConfig,
            LlamaConfig,
            LlavaConfig,
            LlavaForConditionalGeneration,
            LlavaProcessor,
        )

        size = {"height": self.side, "width": self.side}
        processor = LlavaProcessor(
            CLIPImageProcessor(size={"shortest_edge": self.side}, crop_size=size),
            tiny_tokenizer(self.texts, self.vocab_size, self.tokens),
            patch_size=self.patch,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,  # the vision tower's class token; "default" drops it again
            chat_template=self.template.replace(
                "PLACEHOLDER", "{% if c['type'] == 'image' %}<image>{% endif %}"
            ),
        )
        vision = CLIPVisionConfig(
            hidden_size=self.vision_width,
            intermediate_size=3 * self.vision_width,
            num_hidden_layers=self.vision_layers,
            num_attention_heads=4,
            image_size=self.side,
            patch_size=self.patch,
        )
        config = LlavaConfig(
            vision_config=vision,
            text_config=LlamaConfig(**self.text_config(processor.tokenizer, max_position_embeddings=1024)),
            image_token_id=processor.tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1,  # the last layer; LLaVA-1.5 uses the last but one
            tie_word_embeddings=True,
        )
        return self.write("tiny_llava", LlavaForConditionalGeneration, config, processor, output)

    def initialized(self, model: Any) -> Any:
        """Rescale position embeddings and projector; else models with large patches learn positions late."""
        model.model.vision_tower.embeddings.position_embedding.weight.data *= self.position_init / CLIP_INIT
        for layer in (model.model.multi_modal_projector.linear_1, model.model.multi_modal_projector.linear_2):
            layer.weight.data *= self.init / CLIP_INIT
        return model
