"""FLUX.1 (https://github.com/black-forest-labs/flux)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.latents import check_still, guided, pack, unpack
from mmrl.diffusion.model_family import Condition
from mmrl.diffusion.pixels import (
    check_fits,
    check_size,
    compress_pictures,
    decode_pictures,
    dynamic_mu,
    even_sigmas,
    num_patches,
)
from mmrl.diffusion.schedule import scheduled_times

LONGEST = 512  # tokens that T5 is read with at most


@family
class Flux:
    """A T5 that reads the whole text, a vector of CLIP, and guidance as an input of the network.

    CLIP sees the first 77 tokens, as in the pipeline; diffusers warns with the words that stand behind them.
    FLUX.1-schnell has no such input, and ignores the guidance scale.
    """

    pipelines = frozenset({"FluxPipeline"})
    targets = (
        "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
        "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    )  # fmt: skip
    embedded_guidance = True
    guide = staticmethod(guided)

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> list[dict[str, Tensor]]:
        """Read texts: "states" (S, D) of T5, padded without a mask, and "pooled" (D,) of CLIP."""
        if max_sequence_length > LONGEST:
            raise ValueError(f"`max_sequence_length` is at most {LONGEST}, not {max_sequence_length}")
        for text in texts:
            check_fits(pipe.tokenizer_2, text, max_sequence_length)
        states, pooled, _ = pipe.encode_prompt(list(texts), max_sequence_length=max_sequence_length)
        return [
            {"states": state.cpu(), "pooled": pool.cpu()} for state, pool in zip(states, pooled, strict=True)
        ]

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions, which all have one length."""
        return {name: torch.stack([one[name] for one in conditions]) for name in conditions[0]}

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Give (C, h, w); the network takes latents two by two."""
        check_still(num_frames)
        factor = pipe.vae_scale_factor
        check_size(height, width, 2 * factor)
        return pipe.transformer.config.in_channels // 4, height // factor, width // factor

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Ask the network, which is told sigma; a token stands at (0, row, column), words at the origin."""
        height, width = latents.shape[-2:]
        places = torch.cartesian_prod(
            *(torch.arange(n, device=latents.device).float() for n in (1, height // 2, width // 2))
        )
        tokens = network(
            hidden_states=pack(latents).to(network.dtype),
            timestep=sigma,
            guidance=guidance if network.config.guidance_embeds else None,
            encoder_hidden_states=condition["states"].to(network.dtype),
            pooled_projections=condition["pooled"].to(network.dtype),
            txt_ids=places.new_zeros(condition["states"].shape[1], 3),
            img_ids=places,
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Make pixels."""
        return decode_pictures(pipe, latents)

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Make latents."""
        return compress_pictures(pipe, pixels)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly, and shift them as the pipeline's scheduler does for pictures of this size."""
        own = pipe.scheduler.config.get("use_flow_sigmas", False)
        mu = dynamic_mu(pipe.scheduler, num_patches(shape, 2))
        return scheduled_times(
            pipe.scheduler, num_steps, sigmas=None if own else even_sigmas(num_steps), mu=mu
        )
