"""The model family of FLUX.1 (https://github.com/black-forest-labs/flux)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.model_family import (
    JOINT_ATTENTION,
    Condition,
    PackedFamily,
    Request,
    check_fits,
    pack,
    per_text,
    texts_of,
    unpack,
)
from mmrl.diffusion.schedule import scheduled_times, size_shift

MAX_TOKENS = 512  # of T5


@family
class Flux(PackedFamily):
    """FLUX.1: T5 reads the whole text, CLIP gives one vector, and guidance is an input of the network.

    CLIP sees the first 77 tokens, as in the pipeline; diffusers warns with the words that it leaves out.
    FLUX.1-schnell has no guidance input, and ignores the guidance scale.
    """

    pipelines = frozenset({"FluxPipeline"})
    targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
    embedded_guidance = True

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise if T5 would truncate a text."""
        if max_sequence_length > MAX_TOKENS:
            raise ValueError(f"`max_sequence_length` is at most {MAX_TOKENS}, not {max_sequence_length}")
        check_fits(pipe.tokenizer_2, text, max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts: states (S, D) of T5, padded without a mask, and the vector (D,) of CLIP."""
        for text in texts_of(requests):
            self.check_text(pipe, text, max_sequence_length)
        states, pooled, _ = pipe.encode_prompt(texts_of(requests), max_sequence_length=max_sequence_length)
        return per_text(encoder_hidden_states=states, pooled_projections=pooled)

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Run the network at timestep sigma; position ids are (0, row, column), zeros for words."""
        height, width = latents.shape[-2:]
        inputs = {name: value.to(network.dtype) for name, value in condition.items()}
        sides = (torch.arange(n, device=latents.device).float() for n in (1, height // 2, width // 2))
        positions = torch.cartesian_prod(*sides)  # (tokens, 3), row by row
        tokens = network(
            hidden_states=pack(latents).to(network.dtype),
            timestep=sigma,
            guidance=guidance if network.config.guidance_embeds else None,
            **inputs,
            txt_ids=positions.new_zeros(inputs["encoder_hidden_states"].shape[1], 3),
            img_ids=positions,
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly unless the scheduler does so itself, and shift them by the image's size."""
        if pipe.scheduler.config.get("use_flow_sigmas", False):
            return scheduled_times(pipe.scheduler, num_steps, mu=size_shift(pipe.scheduler, shape, 2))
        return super().sigmas(pipe, num_steps, shape)
