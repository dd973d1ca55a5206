"""Wan, text to video (arXiv 2503.20314)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.latents import compress_film, decode_film, guided
from mmrl.diffusion.model_family import Condition
from mmrl.diffusion.pixels import check_fits, check_size
from mmrl.diffusion.schedule import scheduled_times


@family
class Wan:
    """Texts read by UMT5, zeros behind them that the network sees as well, and films of 4 f - 3 frames.

    Models with a second network for late times (Wan2.2 of 14 billion weights) are refused. Published
    schedulers are of second order and round times to whole numbers; of them only the sigmas are taken.
    """

    pipelines = frozenset({"WanPipeline"})
    targets = ("to_k", "to_out.0", "to_q", "to_v")
    embedded_guidance = False
    guide = staticmethod(guided)

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> list[dict[str, Tensor]]:
        """Read texts: "states" (S, D), zero behind the text."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        for text in texts:
            check_fits(pipe.tokenizer, prompt_clean(text), max_sequence_length)
        states, _ = pipe.encode_prompt(
            list(texts), do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        return [{"states": state.cpu()} for state in states]

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions, which all have one length."""
        return {"states": torch.stack([one["states"] for one in conditions])}

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Give (C, f, h, w): one frame, and one more for every four that follow."""
        if pipe.config.boundary_ratio is not None:
            raise ValueError(
                "this model has a second network for late times (`boundary_ratio`), and only one can be "
                "trained; take a Wan model of one network"
            )
        factor, span = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
        config = pipe.transformer.config
        check_size(height, width, factor * config.patch_size[-1])
        if num_frames < 1 or (num_frames - 1) % span:
            raise ValueError(f"`num_frames` must be one more than a multiple of {span}, not {num_frames}")
        return config.in_channels, (num_frames - 1) // span + 1, height // factor, width // factor

    def frames_per_latent(self, pipe: Any, num_latents: int) -> tuple[int, ...]:
        """Give one for the first latent frame, and four (the span of the autoencoder) for every other."""
        return (1, *[pipe.vae_scale_factor_temporal] * (num_latents - 1))

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Ask the network, which is told 1000 sigma."""
        return network(
            hidden_states=latents.to(network.dtype),
            timestep=1000 * sigma,
            encoder_hidden_states=condition["states"].to(network.dtype),
            return_dict=False,
        )[0]

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Make frames."""
        return decode_film(pipe.vae, latents)

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Make latents."""
        return compress_film(pipe.vae, pixels)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Read the schedule off the pipeline's scheduler."""
        return scheduled_times(pipe.scheduler, num_steps)
