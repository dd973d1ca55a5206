"""The model family of Qwen-Image (arXiv 2508.02324)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.registry import family
from mmrl.diffusion.latents import decode_videos, encode_videos, guided, image_latent_shape, pack, unpack
from mmrl.diffusion.model_family import JOINT_ATTENTION, Condition, PipelineFamily, check_fits, per_text
from mmrl.diffusion.schedule import even_sigmas, scheduled_times, size_shift


@family
class QwenImage(PipelineFamily):
    """Qwen-Image: a vision-language model reads texts of any length; the autoencoder is a video model's.

    A guided velocity keeps the norm that it has with the text alone, token by token.
    """

    pipelines = frozenset({"QwenImagePipeline"})
    targets = (
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    )  # fmt: skip

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> list[dict[str, Tensor]]:
        """Encode texts: "states" (S, D).

        A text is put into a template. The states of the template's beginning are dropped again; its end
        counts for the text's length.
        """
        if max_sequence_length > pipe.tokenizer_max_length:
            raise ValueError(
                f"`max_sequence_length` is at most {pipe.tokenizer_max_length}, not {max_sequence_length}"
            )
        conditions = []
        for text in texts:
            templated = pipe.prompt_template_encode.format(text)
            check_fits(pipe.tokenizer, templated, max_sequence_length + pipe.prompt_template_encode_start_idx)
            # Each text alone, so that none is padded inside the encoder.
            states, _ = pipe.encode_prompt([text], max_sequence_length=max_sequence_length)
            conditions += per_text(states=states)
        return conditions

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions: "states" (B, S, D), and a "mask" (B, S) if lengths differ."""
        lengths = torch.tensor([len(condition["states"]) for condition in conditions])
        states = pad_sequence([condition["states"] for condition in conditions], batch_first=True)
        if (lengths == lengths[0]).all():
            return {"states": states}
        return {"states": states, "mask": torch.arange(states.shape[1]) < lengths[:, None]}

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute (C, h, w); the network takes 2 x 2 latents as one token."""
        channels = pipe.transformer.config.in_channels // 4
        return image_latent_shape(channels, pipe.vae_scale_factor, 2, (height, width), num_frames)

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Run the network at timestep sigma."""
        height, width = latents.shape[-2:]
        tokens = network(
            hidden_states=pack(latents).to(network.dtype),
            timestep=sigma,
            encoder_hidden_states=condition["states"].to(network.dtype),
            encoder_hidden_states_mask=condition.get("mask"),
            img_shapes=[[(1, height // 2, width // 2)]] * len(latents),
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)

    def guide(self, with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Guide, then rescale every token of 2 x 2 latents to its norm with the text alone."""
        conditional, combined = pack(with_text), pack(guided(with_text, without, guidance))
        scale = conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
        return unpack(combined * scale, *with_text.shape[-2:])

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode the image as a video of one frame."""
        return decode_videos(pipe.vae, latents.unsqueeze(2)).squeeze(1)

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode the image as a video of one frame."""
        return encode_videos(pipe.vae, pixels.unsqueeze(1)).squeeze(2)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly and shift them by the image's size, as the pipeline's scheduler does."""
        mu = size_shift(pipe.scheduler, shape, 2)
        return scheduled_times(pipe.scheduler, num_steps, sigmas=even_sigmas(num_steps), mu=mu)
