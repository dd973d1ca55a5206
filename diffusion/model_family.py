"""What a flow policy needs to know of a model family, and how a family is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from mmrl.config.registry import pieces

Condition = Mapping[str, Tensor]  # what the network sees of one text, without batch axis


class Family(Protocol):
    """What differs between pipelines of diffusers. Letters: `B` rows, `*L` the axes of a latent.

    Times are the noise share `sigma`, from 1 (noise) to 0 (data); a velocity is `noise - data`, whatever the
    network was trained on.
    """

    pipelines: frozenset[str]  # names of the pipeline classes it serves
    targets: tuple[str, ...]  # names of the modules that LoRA goes on
    embedded_guidance: bool  # the guidance scale is an input of the network, and there is no second pass

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> list[dict[str, Tensor]]:
        """Read texts: one condition each, on the CPU. A text longer than the encoder takes is an error."""

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions, padding ragged ones."""

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Find the shape of one latent: (C, h, w), or (C, f, h, w) for video. Sizes are pixels."""

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Ask the network: latents (B, *L), sigma (B,), guidance (B,) to velocities (B, *L)."""

    def guide(self, with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Lead velocities (B, *L) away from those of the empty text."""

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Make pixels of about [0, 1] in float32: (B, 3, height, width), or (B, F, 3, height, width)."""

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Make latents of pixels in [0, 1]: the mode of the encoder, not a draw."""

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Give the (S + 1,) times of the pipeline's own schedule, the last one 0."""


class VideoFamily(Family, Protocol):
    """What is asked of families of video models besides."""

    def frames_per_latent(self, pipe: Any, num_latents: int) -> tuple[int, ...]:
        """Count the pixel frames that every latent frame stands for, in order: `num_latents` of them."""


def frames_per_latent(family: Family, pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Count the pixel frames that every frame of a latent (C, f, h, w) stands for; () for images."""
    return family.frames_per_latent(pipe, shape[1]) if len(shape) == 4 else ()


def family_of(pipeline: str) -> Family:
    """Find the family that serves a pipeline class."""
    found = [entry.target() for entry in pieces("family") if pipeline in entry.target.pipelines]
    if not found:
        served = sorted(name for entry in pieces("family") for name in entry.target.pipelines)
        raise ValueError(
            f"no family serves the pipeline '{pipeline}'; there are {', '.join(served)}. A family is one "
            "file in diffusion/families"
        )
    return found[0]
