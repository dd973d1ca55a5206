"""Base classes of diffusion model families: what differs between pipelines of diffusers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from mmrl.config.registry import pieces
from mmrl.core.plain_text import PlainText, unused_marker, whole
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.schedule import scheduled_times, size_shift

# An encoded request without batch axis: tensors by the names of the network's arguments.
Condition = Mapping[str, Tensor]

# LoRA targets of joint attention: image and text tokens have projections of their own.
JOINT_ATTENTION = (
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
    "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Request:
    """The input of a pipeline for one prompt: a text, images as conditions, and the size of the result.

    Args:
        text: The prompt, or the negative prompt.
        images: Images to edit or to start from, in the order of the prompt: (3, height, width) uint8 each.
        size: Frames, height and width of the result in pixels; (1, height, width) for an image.
    """

    text: str
    images: tuple[Tensor, ...] = ()
    size: tuple[int, int, int] = (1, 0, 0)

    @staticmethod
    def of(prompt: Prompt, size: tuple[int, int, int]) -> Request:
        """Read the text of a prompt, and decode its images."""
        return Request(prompt.text, tuple(medium.load().pixels[0] for medium in prompt.media), size)


class PipelineFamily(ABC):
    """How to run the pipelines of one model family. Letters: `B` rows, `*L` the axes of a latent.

    Times are the noise share `sigma`, from 1 (noise) to 0 (data); a velocity is `noise - data`, whatever the
    network was trained on. What most image models share is the default of a method.
    """

    pipelines: frozenset[str]  # names of the pipeline classes that this family serves
    targets: tuple[str, ...]  # names of the modules that get LoRA
    embedded_guidance: bool = False  # the guidance scale is an input of the network: no second pass
    unguided: float = 1.0  # guidance scale at which the network runs with the prompt alone
    images: tuple[int, int] = (0, 0)  # fewest and most images of a prompt
    refuses_recorded: str = ""  # why recorded images or videos cannot be learned from; empty if they can

    @abstractmethod
    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError for a text that is too long for the encoders; reads the tokenizers alone."""

    @abstractmethod
    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode requests to one condition each, on the CPU; raise if `check_text` does."""

    def encode_negative(self, pipe: Any, request: Request, max_sequence_length: int) -> dict[str, Tensor]:
        """Encode a request whose text is the negative prompt; like a prompt, unless the pipeline differs."""
        return self.encode(pipe, [request], max_sequence_length)[0]

    def check_images(self, prompt: Prompt) -> None:
        """Raise ValueError unless the model takes as many images as the prompt has; reads no file."""
        if other := [medium.kind for medium in prompt.media if medium.kind != "image"]:
            raise ValueError(
                f"the prompt has a medium of the kind '{other[0]}'; flow models take images only"
            )
        self.check_count(len(prompt.media))

    def check_count(self, num_images: int) -> None:
        """Raise ValueError unless the model takes `num_images` images."""
        fewest, most = self.images
        if not fewest <= num_images <= most:
            wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            names = ", ".join(sorted(self.pipelines))
            raise ValueError(f"the prompt has {num_images} images; {names} takes {wanted}")

    def batch_key(self, condition: Condition) -> Hashable:
        """Key of the conditions that `stack` can batch together; by default all conditions have one key."""
        return ()

    def stages(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Name the networks of a pipeline, from noise to data, with the lowest time of each."""
        return {"transformer": 0.0}

    def passes(self, guidance: float) -> int:
        """Count the network calls of one guided velocity: two for `guidance` above 1."""
        return 2 if guidance > 1 and not self.embedded_guidance else 1

    def single_pass(self, pipe: Any) -> bool:
        """Whether this model runs once at any guidance scale, as distilled models do."""
        return False

    def default_length(self, pipe: Any) -> int:
        """Read the default of `max_sequence_length`."""
        return default_of(pipe, "max_sequence_length")

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions. The default wants one length; override it to pad."""
        return {name: torch.stack([row[name] for row in conditions]) for name in conditions[0]}

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Read the number of latent channels, and the side of one token of the network in latents."""
        return pipe.transformer.config.in_channels, pipe.transformer.config.patch_size

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the shape of one latent: (C, h, w), or (C, f, h, w) for video. Sizes are in pixels."""
        if num_frames != 1:
            raise ValueError(f"this model makes images, so `num_frames` must be 1, not {num_frames}")
        channels, patch = self.channels_and_patch(pipe)
        factor = 1 if pipe.vae is None else pipe.vae_scale_factor  # by which the autoencoder shrinks a side
        check_size(height, width, factor * patch, pipe.transformer.config.get("pos_embed_max_size"))
        return channels, height // factor, width // factor

    def frames_per_latent(self, pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Count the video frames that each latent frame of `shape` represents, in order; () for images."""
        return ()

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Run the network: latents (B, *L), sigma (B,), guidance (B,) to velocities (B, *L)."""
        inputs = {name: value.to(network.dtype) for name, value in condition.items()}
        return network(
            hidden_states=latents.to(network.dtype), timestep=1000 * sigma, **inputs, return_dict=False
        )[0]

    def guide(self, with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Guide velocities (B, *L) away from those of the empty text (arXiv 2207.12598)."""
        return without + guidance * (with_text - without)

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode to float32 pixels of about [0, 1]: (B, 3, height, width), or (B, F, 3, height, width).

        Without an autoencoder latents are pixels in [-1, 1].
        """
        vae = pipe.vae
        if vae is None:
            return (latents.float() + 1) / 2
        if vae.config.get("latents_mean") is None:
            scaled = latents / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
            return (vae.decode(scaled.to(vae.dtype), return_dict=False)[0].float() + 1) / 2
        # Autoencoders of videos standardise every channel. To them an image is a video of one frame.
        video = latents if latents.ndim == 5 else latents.unsqueeze(2)  # (B, C, f, h, w)
        mean, std = channel_moments(vae, video)
        frames = vae.decode((video * std + mean).to(vae.dtype), return_dict=False)[0]
        pixels = frames.transpose(1, 2).float() / 2 + 0.5
        return pixels if latents.ndim == 5 else pixels.squeeze(1)

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode pixels in [0, 1] to latents: the mode of the posterior, not a sample."""
        vae, signed = pipe.vae, 2 * pixels - 1
        if vae is None:
            return signed
        if vae.config.get("latents_mean") is None:
            mode = vae.encode(signed.to(vae.dtype), return_dict=False)[0].mode()
            return (mode - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor
        video = (
            signed.transpose(1, 2) if signed.ndim == 5 else signed.unsqueeze(2)
        )  # (B, 3, F, height, width)
        mode = vae.encode(video.to(vae.dtype), return_dict=False)[0].mode()
        mean, std = channel_moments(vae, mode)
        latents = (mode - mean) / std
        return latents if signed.ndim == 5 else latents.squeeze(2)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Compute the (S + 1,) times of the pipeline's own schedule, the last one 0."""
        return scheduled_times(pipe.scheduler, num_steps)


class PackedFamily(PipelineFamily):
    """Base of image families whose pipelines pack 2 x 2 latents into one token, and space times evenly."""

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Read the number of latent channels; a token has the 4 C channels of 2 x 2 latents."""
        return pipe.transformer.config.in_channels // 4, 2

    def batch_key(self, condition: Condition) -> Hashable:
        """Key by the shapes of the images, since the networks cannot pad their tokens."""
        return tuple(tuple(latents.shape) for latents in images_of(condition).values())

    def image_latents(self, pipe: Any, image: Any) -> Tensor:
        """Encode a Pillow image, of the size that the network shall see, to latents (C, h, w) on the CPU."""
        processor = pipe.image_processor
        pixels = processor.numpy_to_pt(processor.pil_to_numpy(image))  # (1, 3, height, width) in [0, 1]
        return self.compress(pipe, pixels.to(pipe.vae.device))[0].cpu()

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly from 1 to 1 / S, and shift them by the image's size, as the pipelines do."""
        even = torch.linspace(1.0, 1.0 / num_steps, num_steps)
        return scheduled_times(
            pipe.scheduler, num_steps, sigmas=even, mu=size_shift(pipe.scheduler, shape, 2)
        )


def family_of(pipeline: str) -> PipelineFamily:
    """Find the family that serves a pipeline class of diffusers."""
    served = {name: entry.target for entry in pieces("family") for name in entry.target.pipelines}
    if pipeline not in served:
        raise ValueError(
            f"no family serves the pipeline '{pipeline}'; there are {', '.join(sorted(served))}. A family is "
            "one file in diffusion/model_families"
        )
    return served[pipeline]()


# ---- texts


@contextmanager
def reading_words(pipe: Any, text: str) -> Iterator[str]:
    """Make the tokenizers and processors of a pipeline read control words in a text as plain words.

    Inside the block the pipeline must get the yielded text instead of the original one.
    """
    mark, marked = unused_marker([text]), whole(text)
    tokenizers = {name: getattr(part, "tokenizer", part) for name, part in pipe.components.items()}
    plain = {
        name: PlainText(tokenizer, mark=mark, any_case=True)
        for name, tokenizer in tokenizers.items()
        if hasattr(tokenizer, "added_tokens_decoder")
    }
    parts = {name: getattr(pipe, name) for name in plain}
    for one in plain.values():
        marked = one.marked(marked)
    if all(one.settled(marked) == whole(text) for one in plain.values()):
        yield whole(text)
        return
    twins = {
        name: one.tokenizer if one.source is parts[name] else one.processor(parts[name])
        for name, one in plain.items()
    }
    vars(pipe).update(twins)  # not as parts to be saved
    try:
        yield marked
    finally:
        vars(pipe).update(parts)


def check_fits(tokenizer: Any, text: str, limit: int, **options: Any) -> None:
    """Raise if an encoder of `limit` tokens would truncate a text; `options` are the tokenizer's."""
    # Most tokenizers use at least one byte per token, plus a few special tokens.
    if text.isascii() and len(text) + 8 <= limit:
        return
    length = len(tokenizer(text, truncation=False, verbose=False, **options).input_ids)
    if length > limit:
        raise ValueError(
            f"it is {length} tokens long, and the encoder '{type(tokenizer).__name__}' takes {limit}; "
            "shorten it, since texts are never truncated silently"
        )


def size_of(outcome: Outcome) -> tuple[int, int, int]:
    """Frames, height and width of an image or a video."""
    pixels = outcome.image if outcome.video is None else outcome.video
    assert pixels is not None, "flow models make images and videos"
    return (1 if pixels.ndim == 3 else len(pixels), *pixels.shape[-2:])


def texts_of(requests: Sequence[Request]) -> list[str]:
    """List the texts of requests."""
    return [request.text for request in requests]


def per_text(**encoded: Tensor) -> list[dict[str, Tensor]]:
    """Split batched encoder outputs (B, ...) into one condition per text, on the CPU."""
    rows = zip(*encoded.values(), strict=True)
    return [{name: value.cpu() for name, value in zip(encoded, row, strict=True)} for row in rows]


def images_of(condition: Condition) -> dict[str, Tensor]:
    """Select the latents of a condition's images, `image_0` and so on, in order."""
    return {name: condition[name] for name in sorted(condition) if name.startswith("image_")}


def default_of(pipe: Any, option: str) -> Any:
    """Read the default value of an option of the pipeline's `__call__`."""
    return inspect.signature(type(pipe).__call__).parameters[option].default


# ---- latents


def check_size(height: int, width: int, multiple: int, most: int | None = None) -> None:
    """Raise unless height and width are 1 to `most` (None: any number) times `multiple` pixels."""
    limit = f" of at most {most * multiple}" if most else ""
    for side in (height, width):
        if side % multiple or side < multiple or (most and side > most * multiple):
            raise ValueError(
                f"an image of this model is a multiple of {multiple} pixels{limit} high and wide, "
                f"not {height} x {width}"
            )


def pack(latents: Tensor) -> Tensor:
    """Pack 2 x 2 latents into one token: (B, C, h, w) to (B, h w / 4, 4 C)."""
    return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Undo `pack`: (B, h w / 4, 4 C) to (B, C, height, width), sizes in latents."""
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=height // 2, w=width // 2, p=2, q=2)


def channel_moments(vae: Any, like: Tensor) -> Tensor:
    """Read mean and standard deviation per latent channel: (2, C, 1, 1, 1)."""
    moments = torch.tensor([vae.config.latents_mean, vae.config.latents_std]).to(like)
    return moments.view(2, -1, 1, 1, 1)  # broadcasts over (B, C, f, h, w)
