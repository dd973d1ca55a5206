"""Base classes of model families: the operations that differ between the pipelines of diffusers."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from mmrl.config.registry import pieces
from mmrl.core.byte_lru import ByteLRU
from mmrl.core.plain_text import PlainText, unused_marker, whole
from mmrl.core.types import Outcome, Prompt
from mmrl.data.text_files import RecordedAnswers
from mmrl.diffusion.schedule import scheduled_times, size_shift

# An encoded request without a batch axis: maps input names of the network to tensors.
Condition = Mapping[str, Tensor]

SHARED_BYTES = 256 << 20  # size of the cache of encoded texts and images that requests share

# Guidance scales: one for all times, or one for each network of `PipelineFamily.stages`.
Guidance = float | tuple[float, ...]

# LoRA targets of joint attention, in which image tokens and text tokens have separate projections.
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
        """Create a request from the text of a prompt and its decoded images."""
        return Request(prompt.text, tuple(medium.load().pixels[0] for medium in prompt.media), size)


class PipelineFamily(ABC):
    """Base class that encodes, denoises and decodes with the pipelines of one model family.

    Shapes: `B` rows, `*L` the axes of one latent. A time `sigma` runs from 1 (noise) to 0 (data). A velocity
    is `noise - data`, whatever the network was trained on. The default methods fit most image models.
    """

    pipelines: frozenset[str]  # names of the pipeline classes that this family serves
    targets: tuple[str, ...]  # names of the modules that get LoRA
    embedded_guidance: bool = False  # the guidance scale is an input of the network: no second pass
    unguided: float = 1.0  # guidance scale at which guidance is off
    images: tuple[int, int] = (0, 0)  # minimum and maximum number of images in a prompt
    refuses_recorded: str = ""  # reason why recorded media cannot be trained on; empty if they can

    def __init__(self) -> None:
        size: Callable[[Condition], int] = lambda encoded: sum(value.nbytes for value in encoded.values())
        self.shared: ByteLRU[Condition] = ByteLRU(SHARED_BYTES, size)

    def once(self, encode: Callable[[], Condition], *key: Hashable) -> dict[str, Tensor]:
        """Return the encoding (of a text or image) cached under `key`; on a miss, call `encode`."""
        return dict(self.shared.get(key, encode))

    @abstractmethod
    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if a text is too long for the text encoders; needs only their tokenizers."""

    @abstractmethod
    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode each request to a condition on the CPU; raises the errors of `check_text`."""

    def encode_negative(self, pipe: Any, request: Request, max_sequence_length: int) -> dict[str, Tensor]:
        """Encode a request whose text is the negative prompt; by default as `encode` does."""
        return self.encode(pipe, [request], max_sequence_length)[0]

    def check_images(self, prompt: Prompt) -> None:
        """Raise ValueError if a prompt has media other than images, or too few or many; reads no file."""
        if other := [medium.kind for medium in prompt.media if medium.kind != "image"]:
            raise ValueError(
                f"the prompt has a medium of the kind '{other[0]}'; flow models take images only"
            )
        self.check_count(len(prompt.media))

    def check_count(self, num_images: int) -> None:
        """Raise ValueError unless a prompt of this model can have `num_images` images."""
        fewest, most = self.images
        if not fewest <= num_images <= most:
            wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            names = ", ".join(sorted(self.pipelines))
            raise ValueError(f"the prompt has {num_images} images; {names} takes {wanted}")

    def check_source(self, pipe: Any, height: int, width: int) -> None:  # noqa: B027  most accept all
        """Raise ValueError if the model does not accept a source image of this size in pixels."""

    def batch_key(self, condition: Condition) -> Hashable:
        """Return a key that is equal for conditions that `stack` can batch; by default all keys are equal."""
        return ()

    def stages(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Map each network's name to the lowest time at which it runs, in order from noise to data."""
        return {"transformer": 0.0}

    def passes(self, guidance: float) -> int:
        """Return the number of network calls per velocity: 2 with classifier-free guidance, otherwise 1."""
        return 2 if guidance > 1 and not self.embedded_guidance else 1

    def single_pass(self, pipe: Any) -> bool:
        """Return whether one network call suffices at any guidance scale, as for distilled models."""
        return False

    def default_length(self, pipe: Any) -> int:
        """Return the pipeline's default of `max_sequence_length`, in tokens."""
        return default_of(pipe, "max_sequence_length")

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions (encoded prompts). The default requires equal lengths; override it to pad."""
        return {name: torch.stack([row[name] for row in conditions]) for name in conditions[0]}

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Return the number of latent channels, and the side of the network's patches in latent pixels."""
        return pipe.transformer.config.in_channels, pipe.transformer.config.patch_size

    def pixels_per_latent(self, pipe: Any) -> int:
        """Return the spatial downsampling factor of the autoencoder; 1 without an autoencoder."""
        return 1 if pipe.vae is None else pipe.vae_scale_factor

    def source_size(self, pipe: Any, height: int, width: int, area: int) -> tuple[int, int]:
        """Compute a result size of about `area` pixels with the aspect ratio of a source image."""
        multiple = self.pixels_per_latent(pipe) * self.channels_and_patch(pipe)[1]
        sides = (math.sqrt(area * height / width), math.sqrt(area * width / height))
        high, wide = (max(1, round(side / multiple)) * multiple for side in sides)
        return high, wide

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the latent shape of a result in pixels: (C, h, w), or (C, f, h, w) for a video."""
        if num_frames != 1:
            raise ValueError(f"this model makes images, so `num_frames` must be 1, not {num_frames}")
        channels, patch = self.channels_and_patch(pipe)
        factor = self.pixels_per_latent(pipe)
        check_size(height, width, factor * patch, pipe.transformer.config.get("pos_embed_max_size"))
        return channels, height // factor, width // factor

    def frames_per_latent(self, pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of video frames that each latent frame represents; () for images."""
        return ()

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities (B, *L) for latents (B, *L), times sigma (B,) and guidance scales (B,)."""
        inputs = {name: value.to(network.dtype) for name, value in condition.items()}
        return network(
            hidden_states=latents.to(network.dtype), timestep=1000 * sigma, **inputs, return_dict=False
        )[0]

    def guide(self, with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Apply classifier-free guidance (arXiv 2207.12598) to velocities with and without text, (B, *L)."""
        return without + guidance * (with_text - without)

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode latents to float32 pixels in about [0, 1]: (B, 3, height, width), (B, F, 3, height, width).

        Without an autoencoder, the latents themselves are pixels in [-1, 1].
        """
        vae = pipe.vae
        if vae is None:
            return (latents.float() + 1) / 2
        if vae.config.get("latents_mean") is None:
            scaled = latents / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
            return (vae.decode(scaled.to(vae.dtype), return_dict=False)[0].float() + 1) / 2
        # Video autoencoders: destandardise every channel; an image is a video of one frame.
        video = latents if latents.ndim == 5 else latents.unsqueeze(2)  # (B, C, f, h, w)
        mean, std = channel_moments(vae, video)
        frames = vae.decode((video * std + mean).to(vae.dtype), return_dict=False)[0]
        pixels = frames.transpose(1, 2).float() / 2 + 0.5
        return pixels if latents.ndim == 5 else pixels.squeeze(1)

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode pixels in [0, 1] to latents. Takes the mode of the autoencoder's posterior, not a sample."""
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
        """Compute the times of the pipeline's own schedule, (`num_steps` + 1,); the last time is 0."""
        return scheduled_times(pipe.scheduler, num_steps)


class PackedFamily(PipelineFamily):
    """Base of image families that pack 2 x 2 latent pixels into one token and use evenly spaced times."""

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Return the number C of latent channels, and the patch side 2; a token has 4 C channels."""
        return pipe.transformer.config.in_channels // 4, 2

    def batch_key(self, condition: Condition) -> Hashable:
        """Return the latent shapes of a condition's images, because the networks cannot pad image tokens."""
        return tuple(tuple(latents.shape) for latents in images_of(condition).values())

    def image_latents(self, pipe: Any, image: Any) -> Tensor:
        """Encode a Pillow image, without resizing it, to latents (C, h, w) on the CPU."""
        processor = pipe.image_processor
        pixels = processor.numpy_to_pt(processor.pil_to_numpy(image))  # (1, 3, height, width) in [0, 1]
        return self.compress(pipe, pixels.to(pipe.vae.device))[0].cpu()

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly from 1 to 1 / `num_steps`, and shift them for the image's size."""
        even = torch.linspace(1.0, 1.0 / num_steps, num_steps)
        return scheduled_times(
            pipe.scheduler, num_steps, sigmas=even, mu=size_shift(pipe.scheduler, shape, 2)
        )


def family_of(pipeline: str) -> PipelineFamily:
    """Create the model family that serves a pipeline class of diffusers, given the class name."""
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
    """Let a pipeline tokenize control tokens that occur in a prompt text as plain text.

    Yields the text that must be passed to the pipeline inside the block, in place of the original text.
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
    vars(pipe).update(twins)  # not by `__setattr__`, which would register components
    try:
        yield marked
    finally:
        vars(pipe).update(parts)


def check_fits(tokenizer: Any, text: str, limit: int, **options: Any) -> None:
    """Raise ValueError if a text has more than `limit` tokens; `options` are passed to the tokenizer."""
    # Skip the tokenizer if the text surely fits: tokens cover at least a byte; 8 are for special tokens.
    if text.isascii() and len(text) + 8 <= limit:
        return
    length = len(tokenizer(text, truncation=False, verbose=False, **options).input_ids)
    if length > limit:
        raise ValueError(
            f"it is {length} tokens long, and the encoder '{type(tokenizer).__name__}' takes {limit}; "
            "shorten it, since texts are never truncated silently"
        )


def size_of(outcome: Outcome) -> tuple[int, int, int]:
    """Return frames, height and width of an image or a video; an image has 1 frame."""
    pixels = outcome.image if outcome.video is None else outcome.video
    assert pixels is not None, "flow models make images and videos"
    return (1 if pixels.ndim == 3 else len(pixels), *pixels.shape[-2:])


def sizes_of(answers: Sequence[Outcome]) -> list[tuple[int, ...]]:
    """Return frames, height and width of each recorded image and video."""
    if isinstance(answers, RecordedAnswers):
        return answers.sizes()
    return [size_of(answer) for answer in answers if answer.image is not None or answer.video is not None]


def texts_of(requests: Sequence[Request]) -> list[str]:
    """List the texts of requests."""
    return [request.text for request in requests]


def per_text(**encoded: Tensor) -> list[dict[str, Tensor]]:
    """Split batched encoder outputs (B, ...) into one condition per text, on the CPU."""
    rows = zip(*encoded.values(), strict=True)
    return [{name: value.cpu() for name, value in zip(encoded, row, strict=True)} for row in rows]


def images_of(condition: Condition) -> dict[str, Tensor]:
    """Return the image latents in a condition, the entries `image_0`, `image_1` and so on, in order."""
    return {name: condition[name] for name in sorted(condition) if name.startswith("image_")}


def default_of(pipe: Any, option: str) -> Any:
    """Read the default value of an option of the pipeline's `__call__`."""
    return inspect.signature(type(pipe).__call__).parameters[option].default


# ---- latents


def check_size(height: int, width: int, multiple: int, most: int | None = None) -> None:
    """Raise ValueError unless both sides are k * `multiple` pixels, 1 <= k <= `most` (None: no limit)."""
    limit = f" of at most {most * multiple}" if most else ""
    for side in (height, width):
        if side % multiple or side < multiple or (most and side > most * multiple):
            raise ValueError(
                f"an image of this model is a multiple of {multiple} pixels{limit} high and wide, "
                f"not {height} x {width}"
            )


def pack(latents: Tensor) -> Tensor:
    """Pack each 2 x 2 block of latents (B, C, h, w) into one token: (B, h w / 4, 4 C)."""
    return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Convert packed tokens (B, h w / 4, 4 C) back to latents (B, C, height, width)."""
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=height // 2, w=width // 2, p=2, q=2)


def channel_moments(vae: Any, like: Tensor) -> Tensor:
    """Return mean and standard deviation of each latent channel of a VAE, stacked: (2, C, 1, 1, 1)."""
    moments = torch.tensor([vae.config.latents_mean, vae.config.latents_std]).to(like)
    return moments.view(2, -1, 1, 1, 1)  # broadcasts over (B, C, f, h, w)
