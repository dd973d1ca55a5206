"""Base class of diffusion model families: what differs between pipelines of diffusers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import pieces
from mmrl.diffusion.latents import decode_images, encode_images, guided
from mmrl.diffusion.schedule import scheduled_times

Condition = Mapping[str, Tensor]  # encoded text as the network takes it, without batch axis

# LoRA targets of joint attention: image and text tokens have projections of their own.
JOINT_ATTENTION = (
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
    "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
)  # fmt: skip


class PipelineFamily(ABC):
    """How to run the pipelines of one model family. Letters: `B` rows, `*L` the axes of a latent.

    Times are the noise share `sigma`, from 1 (noise) to 0 (data); a velocity is `noise - data`, whatever the
    network was trained on. What most image models share is the default of a method.
    """

    pipelines: frozenset[str]  # names of the pipeline classes that this family serves
    targets: tuple[str, ...]  # names of the modules that get LoRA
    embedded_guidance: bool = False  # the guidance scale is an input of the network: no second pass

    @abstractmethod
    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> list[dict[str, Tensor]]:
        """Encode texts to one condition each, on the CPU; raise if a text is too long for the encoder."""

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions. The default wants one length; override it to pad."""
        return {name: torch.stack([row[name] for row in conditions]) for name in conditions[0]}

    @abstractmethod
    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the shape of one latent: (C, h, w), or (C, f, h, w) for video. Sizes are in pixels."""

    def frames_per_latent(self, pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Count the video frames that each latent frame of `shape` represents, in order; () for images."""
        return ()

    @abstractmethod
    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Run the network: latents (B, *L), sigma (B,), guidance (B,) to velocities (B, *L)."""

    def guide(self, with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Guide velocities (B, *L) away from those of the empty text."""
        return guided(with_text, without, guidance)

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode to float32 pixels of about [0, 1]: (B, 3, height, width), or (B, F, 3, height, width)."""
        return decode_images(pipe.vae, latents)

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode pixels in [0, 1] to latents: the mode of the posterior, not a sample."""
        return encode_images(pipe.vae, pixels)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Compute the (S + 1,) times of the pipeline's own schedule, the last one 0."""
        return scheduled_times(pipe.scheduler, num_steps)


def family_of(pipeline: str) -> PipelineFamily:
    """Find the family that serves a pipeline class of diffusers."""
    served = {name: entry.target for entry in pieces("family") for name in entry.target.pipelines}
    if pipeline not in served:
        raise ValueError(
            f"no family serves the pipeline '{pipeline}'; there are {', '.join(sorted(served))}. A family is "
            "one file in diffusion/model_families"
        )
    return served[pipeline]()


def check_fits(tokenizer: Any, text: str, limit: int) -> None:
    """Raise if an encoder of `limit` tokens would truncate a text."""
    length = len(tokenizer(text, truncation=False, verbose=False).input_ids)
    if length > limit:
        raise ValueError(
            f"it is {length} tokens long, and the encoder '{type(tokenizer).__name__}' takes {limit}; "
            "shorten it, since texts are never truncated silently"
        )


def per_text(**encoded: Tensor) -> list[dict[str, Tensor]]:
    """Split batched encoder outputs (B, ...) into one condition per text, on the CPU."""
    rows = zip(*encoded.values(), strict=True)
    return [{name: value.cpu() for name, value in zip(encoded, row, strict=True)} for row in rows]


def default_of(pipe: Any, option: str) -> Any:
    """Read the default value of an option of the pipeline's `__call__`."""
    return inspect.signature(type(pipe).__call__).parameters[option].default
