"""Builders of small models that write images as tokens, with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import builder
from mmrl.vision.builders.tiny_models import TinyModel, tiny_tokenizer


@dataclass(kw_only=True)
class TinyImageWriter(TinyModel):
    """Base class of these builders: options of the VQ autoencoder, the tokenizer and the chat template."""

    codes: PositiveInt = 64
    levels: PositiveInt = 3
    vq_channels: PositiveInt = 32
    vision_width: PositiveInt = 8
    vision_layers: PositiveInt = 1

    def __post_init__(self) -> None:
        if self.vq_channels % 32:
            raise ValueError(
                f"`vq_channels` is a multiple of 32, the groups of its norms, not {self.vq_channels}"
            )

    def tokenizer(self, named: dict[str, str], codes: list[str], others: tuple[str, ...] = ()) -> Any:
        """Train a tokenizer with `named` special tokens, and a special token for every code."""
        from tokenizers import AddedToken

        tokenizer = tiny_tokenizer(self.texts, self.vocab_size, self.tokens, named)
        tokenizer.add_tokens([AddedToken(word, special=True) for word in (*others, *codes)])
        return tokenizer

    def image_template(self) -> str:
        """Return the chat template with `<image>` as the placeholder of images."""
        return self.template.replace("PLACEHOLDER", "<image>")

    def vq_config(self) -> dict[str, Any]:
        """Return the options that the VQ autoencoders of all families share."""
        return {
            "embed_dim": self.vision_width,
            "latent_channels": self.vision_width,
            "base_channels": self.vq_channels,
            "channel_multiplier": [1] * self.levels,
            "num_res_blocks": self.vision_layers,
        }


@builder
@dataclass(kw_only=True)
class TinyChameleon(TinyImageWriter):
    """Build a small Chameleon (arXiv 2405.09818) with random weights and the decoder of its autoencoder.

    Args:
        texts: Training texts of the tokenizer.
        tokens: Texts that become one token each.
        vocab_size: Number of tokens of the tokenizer, without those of images.
        template: Chat template; PLACEHOLDER stands for an image.
        width: Hidden size of the language model.
        layers: Number of layers of the language model.
        heads: Number of attention heads of the language model.
        side: Side of an image in pixels.
        codes: Size of the codebook.
        levels: Number of resolutions of the VQ autoencoder; a token is a square of 2 ** (levels - 1) pixels.
        vq_channels: Channels of the VQ autoencoder, a multiple of 32.
        vision_width: Size of a code vector.
        vision_layers: Residual blocks of the VQ autoencoder per resolution.
        init: Standard deviation of the initial weights.
    """

    side: PositiveInt = 32

    def build(self, output: Path) -> dict[str, Any]:
        """Write the model and its processor to `output`; return the number of parameters and of tokens."""
        from transformers import (
            ChameleonConfig,
            ChameleonImageProcessor,
            ChameleonProcessor,
            ChameleonVQVAEConfig,
        )

        from mmrl.vision.models.modeling_chameleon import ChameleonForConditionalGeneration

        digits = str.maketrans("0123456789", "ABCDEFGHIJ")
        codes = [f"IMGIMG{str(code).translate(digits)}Z" for code in range(self.codes)]
        named = {"image_token": "<image>", "boi_token": "<racm3:break>", "eoi_token": "<eoss>"}
        tokenizer = self.tokenizer(named, codes, ("<reserved08706>",))
        tokenizer.sep_token = "<reserved08706>"
        size = {"height": self.side, "width": self.side}
        images = ChameleonImageProcessor(size={"shortest_edge": self.side}, crop_size=size)
        tokens = (self.side // 2 ** (self.levels - 1)) ** 2
        processor = ChameleonProcessor(images, tokenizer, image_seq_length=tokens)
        processor.chat_template = self.image_template()
        config = ChameleonConfig(
            **self.text_config(tokenizer, max_position_embeddings=4096),
            vq_config=ChameleonVQVAEConfig(
                **self.vq_config(), num_embeddings=self.codes, resolution=self.side
            ),
            vocabulary_map=tokenizer.get_vocab(),
        )
        return self.write("tiny_chameleon", ChameleonForConditionalGeneration, config, processor, output)


@builder
@dataclass(kw_only=True)
class TinyJanus(TinyImageWriter):
    """Build a small Janus (arXiv 2501.17811) with random weights, using the model classes of transformers.

    Args:
        texts: Training texts of the tokenizer.
        tokens: Texts that become one token each.
        vocab_size: Number of tokens of the tokenizer.
        template: Chat template; PLACEHOLDER stands for an image.
        width: Hidden size of the language model and of the vision tower.
        layers: Number of layers of the language model.
        heads: Number of attention heads of the language model and of the vision tower.
        side: Side of an image in pixels.
        codes: Size of the codebook.
        levels: Number of resolutions of the VQ autoencoder; a token is a square of 2 ** (levels - 1) pixels.
        vq_channels: Channels of the VQ autoencoder, a multiple of 32.
        vision_width: Size of a code vector.
        vision_layers: Residual blocks of the VQ autoencoder per resolution, and layers of the vision tower.
        init: Standard deviation of the initial weights.
    """

    side: PositiveInt = 32

    def build(self, output: Path) -> dict[str, Any]:
        """Write the model and its processor to `output`; return the number of parameters and of tokens."""
        from transformers import (
            JanusConfig,
            JanusImageProcessor,
            JanusProcessor,
            JanusVisionConfig,
            JanusVQVAEConfig,
            LlamaConfig,
        )

        from mmrl.vision.models.modeling_janus import JanusForConditionalGeneration

        named = {"image_token": "<image>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
        tokenizer, patch = self.tokenizer(named, []), 2 ** (self.levels - 1)
        size = {"height": self.side, "width": self.side}
        images = JanusImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
        tokens = (self.side // patch) ** 2
        processor = JanusProcessor(
            images, tokenizer, chat_template=self.image_template(), num_image_tokens=tokens
        )
        vision = JanusVisionConfig(
            hidden_size=self.width,
            num_hidden_layers=self.vision_layers,
            num_attention_heads=self.heads,
            image_size=self.side,
            patch_size=patch,
            projection_dim=self.width,
            num_image_tokens=tokens,
        )
        vq = JanusVQVAEConfig(
            **self.vq_config(),
            num_embeddings=self.codes,
            projection_dim=self.width,
            image_token_embed_dim=self.width,
        )
        config = JanusConfig(
            text_config=LlamaConfig(**self.text_config(tokenizer, max_position_embeddings=4096)),
            vision_config=vision,
            vq_config=vq,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        )
        return self.write("tiny_janus", JanusForConditionalGeneration, config, processor, output)


EMU3_TOKENS = {
    "image_token": "<image>",
    "boi_token": "<|image start|>",
    "eoi_token": "<|image end|>",
    "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>",
}


@builder
@dataclass(kw_only=True)
class TinyEmu3(TinyImageWriter):
    """Build a small Emu3 (arXiv 2409.18869) with random weights, using the model classes of transformers.

    Args:
        texts: Training texts of the tokenizer.
        tokens: Texts that become one token each.
        vocab_size: Number of tokens of the tokenizer, without those of images.
        template: Chat template; PLACEHOLDER stands for an image.
        width: Hidden size of the language model.
        layers: Number of layers of the language model.
        heads: Number of attention heads of the language model.
        codes: Size of the codebook.
        levels: Number of resolutions of the VQ autoencoder; a token is a square of 2 ** (levels - 1) pixels.
        vq_channels: Channels of the VQ autoencoder, a multiple of 32.
        vision_width: Size of a code vector.
        vision_layers: Residual blocks of the VQ autoencoder per resolution.
        init: Standard deviation of the initial weights.
    """

    def build(self, output: Path) -> dict[str, Any]:
        """Write the model and its processor to `output`; return the number of parameters and of tokens."""
        from transformers import (
            Emu3Config,
            Emu3ForConditionalGeneration,
            Emu3ImageProcessor,
            Emu3Processor,
            Emu3TextConfig,
            Emu3VQVAEConfig,
        )

        visual = [f"<|visual token {code:06d}|>" for code in range(self.codes)]
        tokenizer = self.tokenizer(EMU3_TOKENS, visual, ("<|extra_200|>", "<|extra_203|>"))
        tokenizer.bos_token = "<|extra_203|>"
        side = 2 ** (self.levels - 1)
        images = Emu3ImageProcessor(
            image_mean=[0.5] * 3, image_std=[0.5] * 3, min_pixels=side**2, spatial_factor=side
        )
        processor = Emu3Processor(images, tokenizer, chat_template=self.image_template())
        vq = Emu3VQVAEConfig(
            **self.vq_config(),
            codebook_size=self.codes,
            temporal_downsample_factor=1,
            attn_resolutions=[],
            hidden_size=self.vq_channels,
        )
        text = self.text_config(tokenizer, max_position_embeddings=4096, attention_dropout=0.0)
        text |= {"bos_token_id": tokenizer.bos_token_id}
        config = Emu3Config(
            vq_config=vq,
            text_config=Emu3TextConfig(**text),
            vocabulary_map=tokenizer.get_vocab(),
            tie_word_embeddings=True,
        )
        return self.write("tiny_emu3", Emu3ForConditionalGeneration, config, processor, output)
