"""Builder of a small untrained LLaVA with a processor, as an ordinary checkpoint folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.vision.builders.tiny_qwen2_5_vl import SPECIAL, TEMPLATE, tiny_tokenizer, write_untrained

IMAGE = "{% if c['type'] == 'image' %}<image>{% endif %}"


@builder
@dataclass(kw_only=True)
class TinyLlava:
    """Build a small LLaVA (arXiv 2304.08485) of the real classes with random weights.

    It has a CLIP vision tower, a projector of two layers and a Llama.

    Args:
        texts: Texts that train the tokenizer.
        vocab_size: Tokens of the tokenizer.
        width: Hidden size of the language model.
        layers: Layers of the language model.
        heads: Attention heads of the language model.
        vision_width: Hidden size of the vision tower.
        vision_layers: Layers of the vision tower.
        side: Side of an image in pixels.
        patch: Side of a patch in pixels; each patch makes a token.
        init: Standard deviation of the language model's weights; the tower has CLIP's own.
    """

    stream: Stream
    texts: tuple[str, ...] = ("0123456789 abcdefghijklmnopqrstuvwxyz",)
    vocab_size: PositiveInt = 512
    width: PositiveInt = 128
    layers: PositiveInt = 3
    heads: PositiveInt = 4
    vision_width: PositiveInt = 96
    vision_layers: PositiveInt = 3
    side: PositiveInt = 48
    patch: PositiveInt = 8
    init: PositiveFloat = 0.02

    def __post_init__(self) -> None:
        if self.side % self.patch:
            raise ValueError(f"an image of {self.side} pixels cannot be cut into patches of {self.patch}")

    def build(self, output: Path) -> dict[str, Any]:
        """Write the folder; return the number of parameters and tokens."""
        from transformers import CLIPImageProcessor, LlavaForConditionalGeneration, LlavaProcessor

        size = {"height": self.side, "width": self.side}
        processor = LlavaProcessor(
            CLIPImageProcessor(size={"shortest_edge": self.side}, crop_size=size),
            tiny_tokenizer(self.texts, self.vocab_size),
            patch_size=self.patch,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,  # the tower's class token, which the strategy drops again
            chat_template=TEMPLATE.replace("PLACEHOLDER", IMAGE),
        )
        config, generator = self._config(processor.tokenizer), self.stream.fixed("tiny_llava")
        return write_untrained(LlavaForConditionalGeneration, config, processor, generator, output)

    def _config(self, tokenizer: Any) -> Any:
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

        ids = {word: tokenizer.convert_tokens_to_ids(word) for word in SPECIAL}
        text = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=max(1, self.heads // 2),
            max_position_embeddings=1024,
            initializer_range=self.init,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=ids["<|im_end|>"],
            pad_token_id=ids["<|endoftext|>"],
        )
        vision = CLIPVisionConfig(
            hidden_size=self.vision_width,
            intermediate_size=3 * self.vision_width,
            num_hidden_layers=self.vision_layers,
            num_attention_heads=4,
            image_size=self.side,
            patch_size=self.patch,
        )
        return LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=ids["<image>"],
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )
