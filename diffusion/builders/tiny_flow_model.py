"""Builder of a small flow-matching model: a Stable Diffusion 3 pipeline in pixel space."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream, seeded
from mmrl.data.text_files import captions


def word_tokenizer(texts: Iterable[str], max_length: int) -> Any:
    """Build a tokenizer with one token for each word in `texts`, and one for all unknown words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    start, end, unknown = special = ("<start>", "<end>", "<unknown>")
    words = sorted({word for text in texts for word in re.findall(r"\w+", text.lower())})
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, 0), (end, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start,
        eos_token=end,
        pad_token=end,  # as in CLIP, which pools the state of the first end token
        unk_token=unknown,
        model_max_length=max_length,
    )


@builder(packages={"diffusers": "diffusion"})
@dataclass(kw_only=True)
class TinyFlowModel:
    """Build a small SD3 pipeline in pixel space with random weights, as an ordinary diffusers folder.

    There is no autoencoder: the transformer sees pixels. The two CLIP text encoders are never trained; their
    tokens are the words of `texts`.

    Args:
        texts: File of prompts, as `diffusion.prompts` reads it: text, JSON lines, CSV or TSV.
        side: Height and width of the images in pixels.
        patch: Side of the transformer's patches in pixels.
        width: Hidden size of the transformer.
        layers: Number of layers of the transformer.
        heads: Number of attention heads of the transformer.
        text_width: Hidden size of the text encoders.
        text_length: Maximum number of tokens of a text.
        init: Scale of the text encoders' weights; at 1 their attention is too flat to tell words apart in the
            pooled vector.
        shift: Shift of the denoising times towards noise; 1: none.
    """

    stream: Stream
    texts: str
    side: PositiveInt = 32
    patch: PositiveInt = 8
    width: PositiveInt = 128
    layers: PositiveInt = 3
    heads: PositiveInt = 4
    text_width: PositiveInt = 64
    text_length: PositiveInt = 8
    init: PositiveFloat = 4.0
    shift: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        if self.side % self.patch or self.width % self.heads:
            raise ValueError(
                f"patches of {self.patch} pixels must divide the side {self.side}, and {self.heads} heads "
                f"the width {self.width}"
            )

    def autoencoder(self) -> Any:
        """Return the autoencoder of the pipeline; None: the transformer sees pixels."""
        return None

    def build(self, output: Path) -> dict[str, Any]:
        """Write the pipeline folder; returns the numbers of parameters and of tokens in the vocabulary."""
        from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
        from transformers import CLIPTextConfig, CLIPTextModelWithProjection

        texts, vae = captions(Path(self.texts)), self.autoencoder()
        # Without an autoencoder the transformer sees pixels.
        factor = 1 if vae is None else 2 ** (len(vae.config.block_out_channels) - 1)
        channels = 3 if vae is None else vae.config.latent_channels
        tokenizer = word_tokenizer(texts, self.text_length)
        text_config = CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.text_width,
            projection_dim=self.text_width,
            intermediate_size=2 * self.text_width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=self.text_length,
            initializer_factor=self.init,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with seeded(self.stream.seed_of("tiny_flow_model")):
            encoders = [CLIPTextModelWithProjection(text_config) for _ in range(2)]
            network = SD3Transformer2DModel(
                sample_size=self.side // factor,
                patch_size=self.patch,
                in_channels=channels,
                out_channels=channels,
                num_layers=self.layers,
                attention_head_dim=self.width // self.heads,
                num_attention_heads=self.heads,
                joint_attention_dim=2 * self.text_width,  # hidden states of both encoders, concatenated
                caption_projection_dim=self.width,
                pooled_projection_dim=2 * self.text_width,
                pos_embed_max_size=self.side // factor // self.patch,
                qk_norm="rms_norm",  # as in SD3.5
            )
        StableDiffusion3Pipeline(
            transformer=network,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=self.shift),
            vae=vae,
            text_encoder=encoders[0],
            tokenizer=tokenizer,
            text_encoder_2=encoders[1],
            tokenizer_2=tokenizer,
            text_encoder_3=None,
            tokenizer_3=None,
        ).save_pretrained(output)
        return {"parameters": sum(p.numel() for p in network.parameters()), "vocabulary": len(tokenizer)}
