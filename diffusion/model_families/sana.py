"""Sana (arXiv 2410.10629)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.latents import check_still, default_of, guided
from mmrl.diffusion.model_family import Condition
from mmrl.diffusion.pixels import check_fits, check_size
from mmrl.diffusion.schedule import scheduled_times


@family
class Sana:
    """Texts read by Gemma behind an instruction, and an autoencoder that shrinks sides by 32.

    The instruction is the default of the pipeline. The empty text is read without it, as the pipeline does
    with what it guides away from. Published schedulers are of second order and round times to whole numbers;
    of them only the sigmas are taken.
    """

    pipelines = frozenset({"SanaPipeline"})
    targets = ("to_k", "to_out.0", "to_q", "to_v")
    embedded_guidance = False
    guide = staticmethod(guided)

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> list[dict[str, Tensor]]:
        """Read texts: "states" (S, D), padded, and their "mask" (S,)."""
        instruction = default_of(pipe, "complex_human_instruction")
        before = "\n".join(instruction)
        # Two of the instruction's tokens fall into the text's room: the first, and the last.
        room = len(pipe.tokenizer.encode(before)) - 2
        conditions = []
        for text in texts:
            asked = (before if text else "") + text.lower().strip()
            check_fits(pipe.tokenizer, asked, max_sequence_length + (room if text else 0))
            states, mask, _, _ = pipe.encode_prompt(
                [text],
                do_classifier_free_guidance=False,
                max_sequence_length=max_sequence_length,
                complex_human_instruction=instruction if text else None,
            )
            conditions.append({"states": states[0].cpu(), "mask": mask[0].cpu()})
        return conditions

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions, which all have one length."""
        return {name: torch.stack([one[name] for one in conditions]) for name in conditions[0]}

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Give (C, h, w)."""
        check_still(num_frames)
        factor = pipe.vae_scale_factor
        check_size(height, width, factor * pipe.transformer.config.patch_size)
        return pipe.transformer.config.in_channels, height // factor, width // factor

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Ask the network, which is told 1000 sigma on a scale of its own."""
        velocity = network(
            latents.to(network.dtype),
            encoder_hidden_states=condition["states"].to(network.dtype),
            encoder_attention_mask=condition["mask"],
            timestep=1000 * sigma * network.config.timestep_scale,
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]  # a network may say a variance behind it

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Make pixels."""
        scaled = (latents / pipe.vae.config.scaling_factor).to(pipe.vae.dtype)
        return (pipe.vae.decode(scaled, return_dict=False)[0].float() + 1) / 2

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Make latents; the encoder has no noise."""
        signed = (2 * pixels - 1).to(pipe.vae.dtype)
        return pipe.vae.encode(signed, return_dict=False)[0] * pipe.vae.config.scaling_factor

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Read the schedule off the pipeline's scheduler."""
        return scheduled_times(pipe.scheduler, num_steps)
