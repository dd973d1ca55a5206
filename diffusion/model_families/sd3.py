"""The model family of Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.latents import image_latent_shape
from mmrl.diffusion.model_family import JOINT_ATTENTION, Condition, PipelineFamily, check_fits, per_text
from mmrl.diffusion.schedule import scheduled_times, size_shift


@family
class Sd3(PipelineFamily):
    """Stable Diffusion 3 and 3.5: two CLIP encoders and an optional T5.

    A pipeline without an autoencoder works on pixels.
    """

    pipelines = frozenset({"StableDiffusion3Pipeline"})
    targets = JOINT_ATTENTION

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> list[dict[str, Tensor]]:
        """Encode texts with all encoders: "states" (S, D) and "pooled" (D,)."""
        for text in texts:
            # T5 reads what the CLIP encoders truncate; a text is too long only if no encoder sees its end.
            if pipe.text_encoder_3 is None:
                check_fits(pipe.tokenizer, text, pipe.tokenizer_max_length)
            else:
                check_fits(pipe.tokenizer_3, text, max_sequence_length)
        states, _, pooled, _ = pipe.encode_prompt(
            prompt=list(texts),
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return per_text(states=states, pooled=pooled)

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute (C, h, w)."""
        factor = 1 if pipe.vae is None else pipe.vae_scale_factor
        channels = pipe.transformer.config.in_channels
        return image_latent_shape(channels, factor, pipe.patch_size, (height, width), num_frames)

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Run the network at timestep 1000 sigma."""
        return network(
            hidden_states=latents.to(network.dtype),
            timestep=1000 * sigma,
            encoder_hidden_states=condition["states"].to(network.dtype),
            pooled_projections=condition["pooled"].to(network.dtype),
            return_dict=False,
        )[0]

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Read the schedule of the pipeline's scheduler, shifted by the image's size if it says so."""
        mu = size_shift(pipe.scheduler, shape, pipe.transformer.config.patch_size)
        return scheduled_times(pipe.scheduler, num_steps, mu=mu)
