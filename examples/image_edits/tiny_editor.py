"""Builder of a small FLUX.2 klein with an exact autoencoder of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream, seeded
from mmrl.data.text_files import CAPTION, objects, text_of
from mmrl.diffusion.builders.tiny_flow_model import word_tokenizer
from mmrl.diffusion.image_io import load_image

LAYERS = 27  # of the text encoder, whose states after layers 9, 18 and 27 FLUX.2 klein reads
LARGE = 100.0  # constant channels of the autoencoder, so that group norms hardly depend on the image


@builder(packages={"diffusers": "diffusion"})
@dataclass(kw_only=True)
class TinyEditor:
    """Build a small FLUX.2 klein with random weights, as an ordinary diffusers folder.

    The text encoder is never trained: its tokens are the words of the rows, and its layers add nothing to
    their random embeddings. The weights of the autoencoder are set: a latent is the mean colour of 16 x 16
    pixels, and one token of the network holds 2 x 2 of them.

    Args:
        rows: File of rows with a `prompt` and an `image`, in the folder of the images.
        width: Of the network.
        heads: Of its attention.
        layers: Blocks with separate streams for image and text.
        single_layers: Blocks with one stream.
        text_width: Of the text encoder.
        text_length: Most tokens of a text.
        shift: Of the denoising times towards noise; 1 does not move them.
    """

    stream: Stream
    rows: str
    width: PositiveInt = 48
    heads: PositiveInt = 2
    layers: PositiveInt = 1
    single_layers: PositiveInt = 1
    text_width: PositiveInt = 32
    text_length: PositiveInt = 6
    shift: PositiveFloat = 3.0

    def build(self, output: Path) -> dict[str, Any]:
        """Write the folder, and report the number of parameters and words."""
        from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline

        path = Path(self.rows)
        rows = objects(path, lambda row: (text_of(row, CAPTION), text_of(row, ("image",))))
        tokenizer = word_tokenizer((text for text, _ in rows), self.text_length)
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        with seeded(self.stream.seed_of("tiny_editor")):
            encoder, network = self.text_encoder(len(tokenizer)), self.network()
        images = torch.stack([load_image(path.parent / name) for _, name in rows[:256]])
        Flux2KleinPipeline(
            transformer=network, scheduler=FlowMatchEulerDiscreteScheduler(shift=self.shift),
            vae=block_autoencoder(images), text_encoder=encoder, tokenizer=tokenizer,
        ).save_pretrained(output)  # fmt: skip
        return {"parameters": sum(p.numel() for p in network.parameters()), "vocabulary": len(tokenizer)}

    def text_encoder(self, vocabulary: int) -> Any:
        """Make a Qwen3 language model whose states are the embeddings of words."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            hidden_size=self.text_width, intermediate_size=self.text_width, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, num_hidden_layers=LAYERS, vocab_size=vocabulary,
            initializer_range=1.0,
        )  # fmt: skip
        encoder = Qwen3ForCausalLM(config)
        for name, parameter in encoder.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                torch.nn.init.zeros_(parameter)
        return encoder

    def network(self) -> Any:
        """Make the network that is trained later."""
        from diffusers import Flux2Transformer2DModel

        side = self.width // self.heads
        return Flux2Transformer2DModel(
            in_channels=12, num_layers=self.layers,
            num_single_layers=self.single_layers, attention_head_dim=side, num_attention_heads=self.heads,
            joint_attention_dim=3 * self.text_width, timestep_guidance_channels=64,
            axes_dims_rope=(2, side // 2 - 2, side // 2 - 2, 2), rope_theta=100, guidance_embeds=False,
        )  # fmt: skip


@torch.no_grad()
def block_autoencoder(images: Tensor) -> Any:
    """Make an autoencoder without training: encode blocks of 16 x 16 pixels to their mean, decode to blocks.

    All layers keep 8 channels: red, green and blue, the same negated, and two constants of opposite sign. So
    the mean over channels is 0, group norms divide by half of the constant, and silu(x) - silu(-x) = x.
    Tokens are standardised by their moments over `images` (M, 3, height, width) uint8.
    """
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8, 8), layers_per_block=0, norm_num_groups=1, latent_channels=3,
        mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False, sample_size=96,
    )  # fmt: skip
    signed = torch.cat([torch.eye(3), -torch.eye(3), torch.zeros(2, 3)])  # (8, 3)
    for name, layer in vae.named_modules():
        if not isinstance(layer, torch.nn.Conv2d):
            continue
        layer.weight.zero_()
        layer.bias.zero_()
        if name.endswith("conv_in"):
            layer.weight[:, :, 1, 1] = signed
            layer.bias[6:] = torch.tensor([LARGE, -LARGE])
        elif name.endswith("conv_out"):
            layer.weight[:3, :, 1, 1] = signed.T * LARGE / 2
            layer.bias[3:] = -30.0  # of the encoder: the logarithm of the variance
        elif "downsamplers" in name:
            layer.weight[:, :, :2, :2] = torch.eye(8)[:, :, None, None] / 4
        elif "upsamplers" in name:
            layer.weight[:, :, 1, 1] = torch.eye(8)
    vae.eval()
    modes = vae.encode(images.float() / 127.5 - 1).latent_dist.mode()
    tokens = rearrange(modes, "b c (h p) (w q) -> (b h w) (c p q)", p=2, q=2)
    vae.bn.running_mean.copy_(tokens.mean(0))
    vae.bn.running_var.copy_(tokens.var(0))
    return vae
