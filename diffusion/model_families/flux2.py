"""The model family of FLUX.2 (https://github.com/black-forest-labs/flux2)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_family import (
    JOINT_ATTENTION,
    Condition,
    PackedFamily,
    Request,
    check_fits,
    per_text,
)
from mmrl.diffusion.schedule import scheduled_times

MAX_AREA = 1024 * 1024  # pixels; larger images of a prompt are shrunk to it


@family
class Flux2(PackedFamily):
    """FLUX.2: Mistral reads a system message and the text, and guidance is an input of the network.

    A token is one latent position: 2 x 2 standardised positions of the autoencoder. Texts are padded without
    a mask. A prompt has up to ten images. As in the pipeline, they must be at least 64 pixels wide and high;
    they are shrunk to 1024 x 1024 pixels if larger, and cropped to sides that are multiples of 16. The
    pipeline's option to rewrite the text (`caption_upsample_temperature`) is off.
    """

    pipelines = frozenset({"Flux2Pipeline"})
    targets = (
        *JOINT_ATTENTION, "attn.to_qkv_mlp_proj",
        "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out",
    )  # fmt: skip
    embedded_guidance = True
    images = (0, 10)

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if a text, with the system message and the chat template, is too long."""
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        reader = pipe.tokenizer  # a processor, despite its name
        conversation = format_input([text], system_message=pipe.system_message)[0]
        rendered = reader.apply_chat_template(conversation, add_generation_prompt=False, tokenize=False)
        begun = rendered.startswith(reader.tokenizer.bos_token)
        check_fits(reader.tokenizer, rendered, max_sequence_length, add_special_tokens=not begun)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts to hidden states (tokens, D), and images to tokens (N, C) with position ids (N, 4)."""
        conditions = []
        for request in requests:
            self.check_count(len(request.images))
            self.check_text(pipe, request.text, max_sequence_length)
            text = (request.text, max_sequence_length)
            encoded = self.once(partial(self._read, pipe, *text), *text)
            if request.images:
                encoded["image_tokens"], encoded["image_positions"] = pipe.prepare_image_latents(
                    images=[self._prepared(pipe, image) for image in request.images],
                    batch_size=1,
                    generator=None,  # None: takes the mode of the posterior
                    device=pipe.vae.device,
                    dtype=pipe.vae.dtype,
                )
            conditions += per_text(**encoded)
        return conditions

    def check_source(self, pipe: Any, height: int, width: int) -> None:
        """Raise ValueError if a source image is too small, or its aspect ratio too extreme."""
        from PIL import Image

        pipe.image_processor.check_image_input(Image.new("L", (width, height)))

    def _read(self, pipe: Any, text: str, max_sequence_length: int) -> Condition:
        """Encode a text to hidden states (1, tokens, D) on the CPU."""
        states = pipe.encode_prompt(text, max_sequence_length=max_sequence_length)[0]
        return {"encoder_hidden_states": states.cpu()}

    def _prepared(self, pipe: Any, image: Tensor) -> Tensor:
        """Check, shrink and crop an image (3, height, width) as the pipeline does; values in [-1, 1]."""
        processor, multiple = pipe.image_processor, 2 * pipe.vae_scale_factor
        original = processor._resize_if_exceeds_area(processor.check_image_input(to_pil(image)), MAX_AREA)
        width, height = (side // multiple * multiple for side in original.size)
        return processor.preprocess(original, height=height, width=width, resize_mode="crop")

    def batch_key(self, condition: Condition) -> Hashable:
        """Return the position ids of image tokens as bytes: the network needs equal ids in all rows."""
        positions = condition.get("image_positions")
        return None if positions is None else positions.numpy().tobytes()

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the shape of one latent: (4 C, h / 2, w / 2) for C x h x w latents of the autoencoder."""
        channels, rows, columns = super().latent_shape(pipe, height, width, num_frames)
        return 4 * channels, rows // 2, columns // 2

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities at timestep sigma; position ids are (image, row, column, text token)."""
        height, width = latents.shape[-2:]
        states = condition["encoder_hidden_states"].to(network.dtype)
        tokens, positions = rearrange(latents, "b c h w -> b (h w) c"), grid(1, height, width, 1)
        if "image_tokens" in condition:
            tokens = torch.cat([tokens, condition["image_tokens"].to(tokens)], dim=1)
            positions = torch.cat([positions.to(tokens.device), condition["image_positions"][0]])
        velocity = network(
            hidden_states=tokens.to(network.dtype),
            timestep=sigma,
            guidance=self._scale(guidance),
            encoder_hidden_states=states,
            txt_ids=grid(1, 1, 1, states.shape[1]).to(tokens.device),
            img_ids=positions.to(tokens.device),
            return_dict=False,
        )[0]
        return rearrange(velocity[:, : height * width], "b (h w) c -> b c h w", h=height)

    def _scale(self, guidance: Tensor) -> Tensor | None:
        """Return the guidance scale (B,) to pass to the network; None if the network has no such input."""
        return guidance

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode latents to pixels, after undoing the standardisation and the packing."""
        mean, std = moments(pipe.vae, latents)
        unpacked = rearrange(latents * std + mean, "b (c p q) h w -> b c (h p) (w q)", p=2, q=2)
        return (pipe.vae.decode(unpacked.to(pipe.vae.dtype), return_dict=False)[0].float() + 1) / 2

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode pixels to latents: pack 2 x 2 positions into one, and standardise."""
        mode = pipe.vae.encode((2 * pixels - 1).to(pipe.vae.dtype), return_dict=False)[0].mode()
        mean, std = moments(pipe.vae, mode)
        return (rearrange(mode, "b c (h p) (w q) -> b (c p q) h w", p=2, q=2) - mean) / std

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly, and shift them for the image's size and the number of steps."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        even = torch.linspace(1.0, 1.0 / num_steps, num_steps)
        mu = compute_empirical_mu(math.prod(shape[-2:]), num_steps)
        return scheduled_times(pipe.scheduler, num_steps, sigmas=even, mu=mu)


def grid(*sizes: int) -> Tensor:
    """Return the position ids (N, 4) of a grid with four axes, in row-major order."""
    return torch.cartesian_prod(*map(torch.arange, sizes))


def moments(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of packed latents, from the VAE: (1, 4 C, 1, 1) each."""
    mean, variance = (value.to(like).view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
    return mean, (variance + vae.config.batch_norm_eps).sqrt()
