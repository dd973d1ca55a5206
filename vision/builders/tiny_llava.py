"""A small LLaVA of the real classes, with a processor, as an ordinary checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.vision.builders.tiny_qwen2_5_vl import SPECIAL, TEMPLATE, tiny_tokenizer, write_untrained

IMAGE = "{% if c['type'] == 'image' %}<image>{% endif %}"


@builder
class TinyLlava:
    """Build a small LLaVA (arXiv 2304.08485) from the real configuration, weights drawn at random: a CLIP
    vision tower, a projector of two layers, a Llama.

    `texts` trains the tokenizer. Pictures are brought to `side` pixels and cut into patches of `patch`, each
    of which makes a token. `init` is the deviation of the language model's weights; the tower has CLIP's own.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        texts: tuple[str, ...] = ("0123456789 abcdefghijklmnopqrstuvwxyz",),
        vocab_size: PositiveInt = 512,
        width: PositiveInt = 128,
        layers: PositiveInt = 3,
        heads: PositiveInt = 4,
        vision_width: PositiveInt = 96,
        vision_layers: PositiveInt = 3,
        side: PositiveInt = 48,
        patch: PositiveInt = 8,
        init: PositiveFloat = 0.02,
    ) -> None:
        if side % patch:
            raise ValueError(f"a picture of {side} pixels cannot be cut into patches of {patch}")
        self.stream, self.texts, self.vocab_size = stream, texts, vocab_size
        self.width, self.layers, self.heads = width, layers, heads
        self.vision_width, self.vision_layers = vision_width, vision_layers
        self.side, self.patch, self.init = side, patch, init

    def build(self, output: Path) -> dict[str, Any]:
        """Write the folder, and tell what is in it."""
        from transformers import LlavaForConditionalGeneration

        processor = self._processor()
        config = self._config(processor.tokenizer)
        return write_untrained(
            LlavaForConditionalGeneration, config, processor, self.stream.fixed("tiny_llava"), output
        )

    def _processor(self) -> Any:
        from transformers import CLIPImageProcessor, LlavaProcessor

        size = {"height": self.side, "width": self.side}
        images = CLIPImageProcessor(size={"shortest_edge": self.side}, crop_size=size)
        return LlavaProcessor(
            images,
            tiny_tokenizer(self.texts, self.vocab_size),
            patch_size=self.patch,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,  # the tower's class token, which the strategy leaves out again
            chat_template=TEMPLATE.replace("PLACEHOLDER", IMAGE),
        )

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
