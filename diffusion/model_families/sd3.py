"""The model family of Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmrl.config.registry import family
from mmrl.diffusion.model_family import (
    JOINT_ATTENTION,
    PipelineFamily,
    Request,
    check_fits,
    per_text,
    texts_of,
)
from mmrl.diffusion.schedule import scheduled_times, size_shift


@family
class Sd3(PipelineFamily):
    """Stable Diffusion 3 and 3.5: two CLIP encoders and an optional T5.

    A pipeline without an autoencoder works on pixels.
    """

    pipelines = frozenset({"StableDiffusion3Pipeline"})
    targets = JOINT_ATTENTION

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if T5 (CLIP, if the pipeline has no T5) would truncate a text."""
        if pipe.text_encoder_3 is None:
            check_fits(pipe.tokenizer, text, pipe.tokenizer_max_length)
        else:
            check_fits(pipe.tokenizer_3, text, max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts with all encoders: hidden states (tokens, D), and one pooled vector (E,)."""
        for text in texts_of(requests):
            self.check_text(pipe, text, max_sequence_length)
        states, _, pooled, _ = pipe.encode_prompt(
            prompt=texts_of(requests),
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return per_text(encoder_hidden_states=states, pooled_projections=pooled)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Compute the times of the pipeline's own schedule, which may depend on the image's size."""
        mu = size_shift(pipe.scheduler, shape, pipe.transformer.config.patch_size)
        return scheduled_times(pipe.scheduler, num_steps, mu=mu)
