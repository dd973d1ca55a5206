"""The model family of Wan 2.1 and 2.2, text to video (arXiv 2503.20314)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from mmrl.config.registry import family
from mmrl.diffusion.model_family import (
    Condition,
    PipelineFamily,
    Request,
    check_fits,
    check_size,
    per_text,
    texts_of,
)


@family
class Wan(PipelineFamily):
    """Wan, text to video: UMT5 reads the text, padded with zeros; f latent frames give 4 f - 3 frames.

    The network also attends to the zeros of the padding. Wan 2.2 A14B has a second network for times below
    `boundary_ratio`; both networks are guided alike. Wan 2.2 5B gets one time per row, since all tokens of a
    row have the same time. Published schedulers are second-order and round timesteps to integers; only their
    sigmas are used.
    """

    pipelines = frozenset({"WanPipeline"})
    targets = ("to_k", "to_out.0", "to_q", "to_v")

    def stages(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Map network names to their lowest times; with `boundary_ratio`, a second network runs below it."""
        if (boundary := config.get("boundary_ratio")) is None:
            return super().stages(config)
        return {"transformer": boundary, "transformer_2": 0.0}

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if UMT5 would truncate a text after the pipeline's clean-up."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        check_fits(pipe.tokenizer, prompt_clean(text), max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts: hidden states (tokens, D), zeros after the text."""
        texts = [(text, max_sequence_length) for text in texts_of(requests)]
        for text in texts:
            self.check_text(pipe, *text)
        return [self.once(partial(self._read, pipe, *text), *text) for text in texts]

    def _read(self, pipe: Any, text: str, max_sequence_length: int) -> Condition:
        """Encode one text to a condition."""
        states, _ = pipe.encode_prompt(
            [text], do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        return per_text(encoder_hidden_states=states)[0]

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Return the number of latent channels, and the side of a patch, which covers one latent frame."""
        return pipe.transformer.config.in_channels, pipe.transformer.config.patch_size[-1]

    def pixels_per_latent(self, pipe: Any) -> int:
        """Return the spatial downsampling factor of the autoencoder."""
        return pipe.vae_scale_factor_spatial

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the latent shape (C, f, h, w): 1 latent frame for frame 1, then 1 for every 4 frames."""
        factor, span = self.pixels_per_latent(pipe), pipe.vae_scale_factor_temporal
        channels, patch = self.channels_and_patch(pipe)
        most = pipe.transformer.config.rope_max_seq_len  # number of positions along every axis
        check_size(height, width, factor * patch, most)
        if num_frames < 1 or (num_frames - 1) % span:  # the first frame has its own latent frame
            raise ValueError(f"`num_frames` must be one more than a multiple of {span}, not {num_frames}")
        if (num_frames - 1) // span >= most:
            raise ValueError(
                f"`num_frames` is at most {(most - 1) * span + 1} for this model, not {num_frames}"
            )
        return channels, (num_frames - 1) // span + 1, height // factor, width // factor

    def frames_per_latent(self, pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the frames per latent frame: 1 for the first, 4 (the temporal factor) for all others."""
        return (1, *[pipe.vae_scale_factor_temporal] * (shape[1] - 1))
