"""The model family of FLUX.1 (https://github.com/black-forest-labs/flux)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
    images_of,
    pack,
    per_text,
    texts_of,
    unpack,
)
from mmrl.diffusion.schedule import scheduled_times, size_shift

MAX_TOKENS = 512  # maximum number of tokens that T5 reads


@family
class Flux(PackedFamily):
    """FLUX.1: T5 reads the whole text, CLIP gives one vector, and guidance is an input of the network.

    CLIP reads the first 77 tokens, as in the pipeline; diffusers logs a warning with the truncated words.
    FLUX.1-schnell has no guidance input, and ignores the guidance scale.
    """

    pipelines = frozenset({"FluxPipeline"})
    targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
    embedded_guidance = True

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if T5 would truncate a text."""
        if max_sequence_length > MAX_TOKENS:
            raise ValueError(f"`max_sequence_length` is at most {MAX_TOKENS}, not {max_sequence_length}")
        check_fits(pipe.tokenizer_2, text, max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts: T5 hidden states (tokens, D), padded without a mask, and the CLIP vector (E,)."""
        texts = [(text, max_sequence_length) for text in texts_of(requests)]
        for text in texts:
            self.check_text(pipe, *text)
        return [self.once(partial(self._read, pipe, *text), *text) for text in texts]

    def _read(self, pipe: Any, text: str, max_sequence_length: int) -> Condition:
        """Encode one text to a condition."""
        states, pooled, _ = pipe.encode_prompt([text], max_sequence_length=max_sequence_length)
        return per_text(encoder_hidden_states=states, pooled_projections=pooled)[0]

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities at timestep sigma; tokens of condition images follow the latent tokens.

        Position ids are (0, row, column) for latents, (1, row, column) for images, and zeros for text.
        """
        images = images_of(condition)
        shown = [latents, *images.values()]  # (B, C, h, w) each
        packed = [pack(one) for one in shown]
        inputs = {name: value.to(network.dtype) for name, value in condition.items() if name not in images}
        positions = [token_positions(one, min(i, 1)) for i, one in enumerate(shown)]
        tokens = network(
            hidden_states=torch.cat(packed, 1).to(network.dtype),
            timestep=sigma,
            guidance=guidance if network.config.guidance_embeds else None,
            **inputs,
            txt_ids=positions[0].new_zeros(inputs["encoder_hidden_states"].shape[1], 3),
            img_ids=torch.cat(positions),
            return_dict=False,
        )[0]
        return unpack(tokens[:, : packed[0].shape[1]], *latents.shape[-2:])

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly unless the scheduler spaces them itself, and shift them for the image's size."""
        if pipe.scheduler.config.get("use_flow_sigmas", False):
            return scheduled_times(pipe.scheduler, num_steps, mu=size_shift(pipe.scheduler, shape, 2))
        return super().sigmas(pipe, num_steps, shape)


def token_positions(latents: Tensor, first: int) -> Tensor:
    """Return position ids (tokens, 3) of latents (B, C, h, w) in row-major order: (`first`, row, column)."""
    rows, columns = (torch.arange(side // 2, device=latents.device).float() for side in latents.shape[-2:])
    return torch.cartesian_prod(rows.new_full((1,), first), rows, columns)
