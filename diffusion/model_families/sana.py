"""The model family of Sana (arXiv 2410.10629)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.model_family import Condition, PipelineFamily, Request, check_fits, default_of, per_text


@family
class Sana(PipelineFamily):
    """Sana: Gemma encodes an instruction and the text; the autoencoder shrinks sides by a factor of 32.

    The instruction is the pipeline's default; the negative prompt is encoded without it. Published
    schedulers are second-order and round timesteps to integers; only their sigmas are used.
    """

    pipelines = frozenset({"SanaPipeline"})
    targets = ("to_k", "to_out.0", "to_q", "to_v")

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if Gemma would truncate a text after the instruction."""
        prefix = "\n".join(default_of(pipe, "complex_human_instruction"))
        self._check(pipe, prefix, text, max_sequence_length)

    def _check(self, pipe: Any, prefix: str, text: str, max_sequence_length: int) -> None:
        # The first and the last token of the instruction count towards the text length.
        room = len(pipe.tokenizer.encode(prefix)) - 2 if prefix else 0
        # Clean the text as the pipeline does.
        check_fits(pipe.tokenizer, prefix + text.lower().strip(), max_sequence_length + room)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts after the instruction: padded hidden states (tokens, D) and their mask (tokens,)."""
        return [self._encode(pipe, one.text, max_sequence_length, instructed=True) for one in requests]

    def encode_negative(self, pipe: Any, request: Request, max_sequence_length: int) -> dict[str, Tensor]:
        """Encode the negative prompt, without the instruction."""
        return self._encode(pipe, request.text, max_sequence_length, instructed=False)

    def _encode(
        self, pipe: Any, text: str, max_sequence_length: int, *, instructed: bool
    ) -> dict[str, Tensor]:
        instruction = default_of(pipe, "complex_human_instruction") if instructed else []
        prefix = "\n".join(instruction)
        self._check(pipe, prefix, text, max_sequence_length)
        states, mask, _, _ = pipe.encode_prompt(
            [text],
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
            complex_human_instruction=instruction,
        )
        return per_text(encoder_hidden_states=states, encoder_attention_mask=mask)[0]

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities at the timestep 1000 sigma, multiplied by the configured `timestep_scale`."""
        velocity = network(
            latents.to(network.dtype),
            encoder_hidden_states=condition["encoder_hidden_states"].to(network.dtype),
            encoder_attention_mask=condition["encoder_attention_mask"],
            timestep=1000 * sigma * network.config.timestep_scale,
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]  # further channels are a predicted variance

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode pixels to latents; the encoder is deterministic, so there is no posterior."""
        signed = (2 * pixels - 1).to(pipe.vae.dtype)
        return pipe.vae.encode(signed, return_dict=False)[0] * pipe.vae.config.scaling_factor
