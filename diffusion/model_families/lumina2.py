"""The model family of Lumina-Image 2.0 (arXiv 2503.21758)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.model_family import Condition, PipelineFamily, Request, check_fits, check_size, per_text
from mmrl.diffusion.schedule import scheduled_times, size_shift

MAX_TOKENS = 512  # maximum number of text tokens in the pipeline


@family
class Lumina2(PipelineFamily):
    """Lumina-Image 2.0: Gemma 2 reads a system prompt and the text; one sequence of text and image tokens.

    The network counts times from 0 (noise) to 1 (data) and predicts `data - noise`. The system prompt is that
    of the pipeline; the negative prompt is encoded without it. As with the pipeline's defaults, guidance acts
    at all steps (`cfg_trunc_ratio` 1). Each row of latent pixels of a guided velocity, per channel, is
    rescaled to the norm of that row without guidance, with the text (`cfg_normalization`).
    """

    pipelines = frozenset({"Lumina2Pipeline"})
    targets = ("attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v")

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if a text, with the system prompt, is too long."""
        self._check(pipe, f"{pipe.system_prompt} <Prompt Start> {text}", max_sequence_length)

    def _check(self, pipe: Any, words: str, max_sequence_length: int) -> None:
        # Leave one position free: the image takes the one after the last text token on the first axis.
        most = min(MAX_TOKENS, pipe.transformer.config.axes_lens[0] - 1)
        if max_sequence_length > most:
            raise ValueError(f"`max_sequence_length` is at most {most}, not {max_sequence_length}")
        check_fits(pipe.tokenizer, words, max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts after the system prompt: padded hidden states (tokens, D), and a mask (tokens,)."""
        conditions = []
        for request in requests:
            self.check_text(pipe, request.text, max_sequence_length)
            states, mask, _, _ = pipe.encode_prompt(
                [request.text], do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
            )
            conditions += per_text(encoder_hidden_states=states, encoder_attention_mask=mask)
        return conditions

    def encode_negative(self, pipe: Any, request: Request, max_sequence_length: int) -> dict[str, Tensor]:
        """Encode the negative prompt, without the system prompt."""
        self._check(pipe, request.text, max_sequence_length)
        *_, states, mask = pipe.encode_prompt(
            [""], negative_prompt=[request.text], max_sequence_length=max_sequence_length
        )
        return per_text(encoder_hidden_states=states, encoder_attention_mask=mask)[0]

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the latent shape (C, h, w); raises ValueError if the network has too few positions."""
        shape = super().latent_shape(pipe, height, width, num_frames)
        most = min(pipe.transformer.config.axes_lens[1:])
        check_size(height, width, pipe.vae_scale_factor * pipe.transformer.config.patch_size, most)
        return shape

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities: run the network at timestep 1 - sigma, and negate its output."""
        return -network(
            hidden_states=latents.to(network.dtype),
            timestep=1 - sigma,
            encoder_hidden_states=condition["encoder_hidden_states"].to(network.dtype),
            encoder_attention_mask=condition["encoder_attention_mask"],
            return_dict=False,
        )[0]

    def guide(self, with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Apply guidance, then rescale every image row of latents to its norm in `with_text`."""
        combined = super().guide(with_text, without, guidance)
        scale = with_text.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
        return combined * scale

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly from 1 to 1 / `num_steps`, and shift them as the pipeline does.

        A size-dependent shift uses the number of channels C as the number of tokens, as in the pipeline.
        """
        even = torch.linspace(1.0, 1.0 / num_steps, num_steps)
        mu = size_shift(pipe.scheduler, (shape[0], 1), 1)
        return scheduled_times(pipe.scheduler, num_steps, sigmas=even, mu=mu)
