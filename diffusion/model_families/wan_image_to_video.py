"""The model family of Wan 2.1 and 2.2, image to video (arXiv 2503.20314)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.config.registry import family
from mmrl.diffusion.flow_math import along
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_families.wan import Wan
from mmrl.diffusion.model_family import Condition, Request, channel_moments

CLIP_TEXT_LENGTH = 512  # diffusers' attention takes the last 512 tokens as text, earlier ones as CLIP's


@family
class WanImageToVideo(Wan):
    """Wan, image to video: the prompt's image is the first frame, stretched to the size of the video.

    Wan 2.1 and Wan 2.2 A14B take a mask and the latents of the image followed by grey frames as extra
    channels; Wan 2.1 also reads the image through CLIP. Wan 2.2 5B (`expand_timesteps`) instead takes the
    image as a clean first latent frame, at time 0. Models that also need the last frame are not supported.
    """

    pipelines = frozenset({"WanImageToVideoPipeline"})
    targets = ("add_k_proj", "add_v_proj", *Wan.targets)  # `add_*` project CLIP tokens (Wan 2.1)
    images = (1, 1)

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if a text is too long, or a model with CLIP has a text length other than 512.

        The attention of diffusers takes the last 512 tokens as text, and the tokens before as CLIP's.
        """
        if pipe.transformer.config.image_dim is not None and max_sequence_length != CLIP_TEXT_LENGTH:
            raise ValueError(
                f"`max_sequence_length` must be {CLIP_TEXT_LENGTH} for this model, not {max_sequence_length}"
            )
        super().check_text(pipe, text, max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts to (tokens, D), and images to latents (C, f or 1, h, w) and CLIP tokens (N, E)."""
        conditions = super().encode(pipe, requests, max_sequence_length)
        for request, condition in zip(requests, conditions, strict=True):
            (image,) = map(to_pil, request.images)
            frames, height, width = request.size
            first = pipe.video_processor.preprocess(image, height=height, width=width).unsqueeze(2)
            if pipe.config.expand_timesteps:
                condition["first_latents"] = self._latents(pipe, first)
            else:
                grey = first.new_zeros(1, 3, frames - 1, height, width)
                condition["image_latents"] = self._latents(pipe, torch.cat([first, grey], 2))
            if pipe.transformer.config.image_dim is not None:
                condition["encoder_hidden_states_image"] = pipe.encode_image(image)[0].cpu()
        return conditions

    def _latents(self, pipe: Any, video: Tensor) -> Tensor:
        """Encode one video (1, 3, F, height, width) in [-1, 1] to latents (C, f, h, w), on the CPU."""
        vae = pipe.vae
        mode = vae.encode(video.to(vae.device, vae.dtype), return_dict=False)[0].mode()
        mode = mode.to(torch.promote_types(mode.dtype, torch.float32))
        mean, std = channel_moments(vae, mode)
        return ((mode - mean) / std)[0].cpu()

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Return the number of latent channels (the network has more input channels), and the patch side."""
        return pipe.vae.config.z_dim, pipe.transformer.config.patch_size[-1]

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the latent shape (C, f, h, w); raises ValueError if the model also needs the last frame."""
        if pipe.transformer.config.pos_embed_seq_len is not None:
            raise ValueError("this model wants the first and the last frame, and the last cannot be given")
        return super().latent_shape(pipe, height, width, num_frames)

    def velocity(
        self, network: Any, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities with the image as extra channels, or in place of the first latent frame."""
        others = dict(condition)
        if (first := others.pop("first_latents", None)) is not None:
            return self._continued(network, latents, sigma, first.to(latents), others)
        known = others.pop("image_latents").to(latents)
        # The mask has one channel for each video frame of a latent frame.
        mask = known.new_zeros(len(known), network.config.in_channels - 2 * known.shape[1], *known.shape[2:])
        mask[:, :, 0] = 1
        return super().velocity(network, torch.cat([latents, mask, known], 1), sigma, others, guidance)

    def _continued(
        self, network: Any, latents: Tensor, sigma: Tensor, first: Tensor, others: Condition
    ) -> Tensor:
        """Predict velocities with a given first latent frame `first` (B, C, 1, h, w), at time 0.

        The velocity of this frame points from `first` to the latents, so that Euler steps end at `first`.
        """
        _, patch_height, patch_width = network.config.patch_size
        frames, height, width = latents.shape[2:]
        per_frame = (height // patch_height) * (width // patch_width)
        timestep = (1000 * sigma)[:, None].repeat(1, frames * per_frame)  # (B, tokens), frame by frame
        timestep[:, :per_frame] = 0
        velocity = network(
            hidden_states=torch.cat([first, latents[:, :, 1:]], 2).to(network.dtype),
            timestep=timestep,
            **{name: value.to(network.dtype) for name, value in others.items()},
            return_dict=False,
        )[0]
        time = along(sigma, latents)
        fixed = (latents[:, :, :1] - first) / time.where(time > 0, 1)  # 0 at time 0: latents equal `first`
        return torch.cat([fixed.to(velocity), velocity[:, :, 1:]], 2)
