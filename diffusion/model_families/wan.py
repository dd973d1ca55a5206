"""The model family of Wan 2.1 and 2.2, text to video (arXiv 2503.20314)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmrl.config.registry import family
from mmrl.diffusion.model_family import PipelineFamily, Request, check_fits, check_size, per_text, texts_of


@family
class Wan(PipelineFamily):
    """Wan, text to video: UMT5 reads the text, padded with zeros; videos have 4 f - 3 frames.

    The network attends to the zeros of the padding as well. Wan 2.2 A14B has a second network for times below
    `boundary_ratio`; both are guided alike. Wan 2.2 of 5 billion weights gets one time for all tokens, which
    have the same. Published schedulers are of second order and round times to whole numbers; only their
    sigmas are used.
    """

    pipelines = frozenset({"WanPipeline"})
    targets = ("to_k", "to_out.0", "to_q", "to_v")

    def stages(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Name the networks: with a `boundary_ratio`, a second one for times below it."""
        if (boundary := config.get("boundary_ratio")) is None:
            return super().stages(config)
        return {"transformer": boundary, "transformer_2": 0.0}

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise if UMT5 would truncate a text after the pipeline's clean-up."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        check_fits(pipe.tokenizer, prompt_clean(text), max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts: states (S, D), zero after the text."""
        for text in texts_of(requests):
            self.check_text(pipe, text, max_sequence_length)
        states, _ = pipe.encode_prompt(
            texts_of(requests), do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        return per_text(encoder_hidden_states=states)

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Read the number of latent channels, and the side of a patch; a patch is one latent frame long."""
        return pipe.transformer.config.in_channels, pipe.transformer.config.patch_size[-1]

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute (C, f, h, w): the first frame, and one latent frame for every four that follow."""
        factor, span = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
        channels, patch = self.channels_and_patch(pipe)
        most = pipe.transformer.config.rope_max_seq_len  # positions along every axis
        check_size(height, width, factor * patch, most)
        if num_frames < 1 or (num_frames - 1) % span:  # the first frame is a latent frame of its own
            raise ValueError(f"`num_frames` must be one more than a multiple of {span}, not {num_frames}")
        if (num_frames - 1) // span >= most:
            raise ValueError(
                f"`num_frames` is at most {(most - 1) * span + 1} for this model, not {num_frames}"
            )
        return channels, (num_frames - 1) // span + 1, height // factor, width // factor

    def frames_per_latent(self, pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Count 1 frame for the first latent frame, and four (the autoencoder's span) for every other."""
        return (1, *[pipe.vae_scale_factor_temporal] * (shape[1] - 1))
