"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.latents import check_still, guided
from mmrl.diffusion.model_family import Condition
from mmrl.diffusion.pixels import (
    check_fits,
    check_size,
    compress_pictures,
    decode_pictures,
    dynamic_mu,
    num_patches,
)
from mmrl.diffusion.schedule import scheduled_times


@family
class Sd3:
    """Two CLIP encoders and an optional T5. A pipeline without an autoencoder works on pixels."""

    pipelines = frozenset({"StableDiffusion3Pipeline"})
    targets = (
        "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
        "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
    )  # fmt: skip
    embedded_guidance = False
    guide = staticmethod(guided)

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> list[dict[str, Tensor]]:
        """Read texts with all encoders."""
        for text in texts:
            # T5 reads on where the CLIP encoders stop; only what no encoder sees is lost.
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
        return [
            {"states": state.cpu(), "pooled": pool.cpu()} for state, pool in zip(states, pooled, strict=True)
        ]

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions, which all have one length."""
        return {name: torch.stack([one[name] for one in conditions]) for name in conditions[0]}

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Give (C, h, w)."""
        check_still(num_frames)
        factor = 1 if pipe.vae is None else pipe.vae_scale_factor
        check_size(height, width, factor * pipe.patch_size)
        return pipe.transformer.config.in_channels, height // factor, width // factor

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Ask the network, which is told 1000 sigma."""
        states = condition["states"]
        return network(
            hidden_states=latents.to(network.dtype),
            timestep=1000 * sigma,
            encoder_hidden_states=states.to(network.dtype),
            pooled_projections=condition["pooled"].to(network.dtype),
            return_dict=False,
        )[0]

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Make pixels."""
        return decode_pictures(pipe, latents)

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Make latents."""
        return compress_pictures(pipe, pixels)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Read the schedule off the pipeline's scheduler."""
        patches = num_patches(shape, pipe.transformer.config.patch_size)
        return scheduled_times(pipe.scheduler, num_steps, mu=dynamic_mu(pipe.scheduler, patches))
