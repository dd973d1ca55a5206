"""The model families of LTX-2, text to video and image to video (arXiv 2601.03233)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.model_family import (
    Condition,
    PipelineFamily,
    Request,
    check_fits,
    check_size,
    per_text,
)
from mmrl.diffusion.schedule import scheduled_times, size_shift

FRAME_RATE = 24.0  # default of the pipeline


@family
class Ltx2(PipelineFamily):
    """LTX-2, text to video: Gemma 3 and connectors read the text; video and sound are denoised together.

    Sound and video attend to each other, so one latent holds both. Its first frames hold the latents of the
    sound, one per position; the remaining positions stay zero. Log-probabilities cover sound and video, and
    the sound belongs to the first segment. The sound is not decoded. Recorded videos are refused, because
    they are loaded without sound.

    Video and sound have classifier-free guidance with the engine's scale. By default the pipeline also guides
    away from predictions with skipped blocks (`stg_scale`) and without attention between video and sound
    (`modality_scale`), rescales (`guidance_rescale`), and has another scale for the sound. To compare, call
    the pipeline with `stg_scale=0, modality_scale=1, guidance_rescale=0`, and the same for audio. The network
    is given a rate of 24 frames per second.
    """

    pipelines = frozenset({"LTX2Pipeline"})
    refuses_recorded = (
        "LTX-2 denoises video and sound together, and recorded videos have no sound here; learn from videos "
        "that the model makes itself"
    )
    targets = ("to_k", "to_out.0", "to_q", "to_v")

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if Gemma would truncate a text, or the connectors cannot pad to this length."""
        registers = pipe.connectors.config.video_connector_num_learnable_registers
        if registers and max_sequence_length % registers:
            raise ValueError(
                f"`max_sequence_length` must be a multiple of {registers}, not {max_sequence_length}"
            )
        check_fits(pipe.tokenizer, text.strip(), max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts: hidden states (tokens, D) for video, (tokens, E) for sound, and a mask (tokens,)."""
        conditions = []
        for request in requests:
            text = (request.text, max_sequence_length)
            self.check_text(pipe, *text)
            read = self.once(partial(self._read, pipe, *text), *text)
            conditions.append(read | self._encode_images(pipe, request))
        return conditions

    def _read(self, pipe: Any, text: str, max_sequence_length: int) -> Condition:
        """Encode one text to a condition."""
        states, mask, _, _ = pipe.encode_prompt(
            [text], do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        video, sound, mask = pipe.connectors(states, mask, padding_side=pipe.tokenizer.padding_side)
        return per_text(
            encoder_hidden_states=video, audio_encoder_hidden_states=sound, encoder_attention_mask=mask
        )[0]

    def _encode_images(self, pipe: Any, request: Request) -> dict[str, Tensor]:
        """Return the image condition of text to video, which is empty."""
        return {}

    def pixels_per_latent(self, pipe: Any) -> int:
        """Return the spatial downsampling factor of the autoencoder."""
        return pipe.vae_spatial_compression_ratio

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the latent shape (C, f, h, w), where f counts latent frames of sound and of video."""
        config, factor = pipe.transformer.config, self.pixels_per_latent(pipe)
        check_pipe(pipe)
        check_size(height, width, factor)
        span = pipe.vae_temporal_compression_ratio
        if num_frames < 1 or (num_frames - 1) % span:  # the first frame has its own latent frame
            raise ValueError(f"`num_frames` must be one more than a multiple of {span}, not {num_frames}")
        height, width = height // factor, width // factor
        frames = (num_frames - 1) // span + 1
        filled = math.ceil(sound_length(config, frames) / (height * width))
        return config.in_channels, filled + frames, height, width

    def frames_per_latent(self, pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the frames per latent frame: 0 for sound, 1 for the first of the video, 8 for all others."""
        frames, _ = split(pipe.transformer.config, shape[1:])
        return (*[0] * (shape[1] - frames), 1, *[pipe.vae_temporal_compression_ratio] * (frames - 1))

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict the velocities of video and sound together, at timestep 1000 sigma."""
        frames, length = split(network.config, latents.shape[2:])
        filled, height, width = latents.shape[2] - frames, *latents.shape[3:]
        entries = latents[:, :, :filled].flatten(2)  # (B, C, entries): sound, then zeros
        mask = condition["encoder_attention_mask"]
        time = (1000 * sigma).to(network.dtype)
        noisy, times = latents[:, :, filled:], {"timestep": time}
        if (first := condition.get("first_latent")) is not None:  # clean first frame, at time 0
            first = first.to(noisy)
            noisy = torch.cat([first, noisy[:, :, 1:]], 2)
            clean = torch.arange(frames * height * width, device=time.device) < height * width
            times = {"timestep": time[:, None] * ~clean, "audio_timestep": time}
        video, sound = network(
            hidden_states=noisy.flatten(2).transpose(1, 2).to(network.dtype),
            audio_hidden_states=entries[..., :length].transpose(1, 2).to(network.dtype),
            encoder_hidden_states=condition["encoder_hidden_states"].to(network.dtype),
            audio_encoder_hidden_states=condition["audio_encoder_hidden_states"].to(network.dtype),
            **times,
            sigma=time,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            fps=FRAME_RATE,
            audio_num_frames=length,
            use_cross_timestep=True,
            return_dict=False,
        )
        # Velocity of entries with a fixed value: (latent - value) / sigma; padding is fixed at 0.
        zeros = entries[..., length:] / sigma.view(-1, 1, 1)
        sound = torch.cat([sound.transpose(1, 2).to(zeros), zeros], 2).unflatten(2, (filled, height, width))
        video = video.transpose(1, 2).to(zeros).unflatten(2, (frames, height, width))
        if first is not None:
            given = (latents[:, :, filled : filled + 1] - first) / sigma.view(-1, 1, 1, 1, 1)
            video = torch.cat([given, video[:, :, 1:]], 2)
        return torch.cat([sound, video], 2)

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode the video to pixels (B, F, 3, height, width)."""
        vae, (frames, _) = pipe.vae, split(pipe.transformer.config, latents.shape[2:])
        mean, std = (value.to(latents).view(1, -1, 1, 1, 1) for value in (vae.latents_mean, vae.latents_std))
        scaled = latents[:, :, latents.shape[2] - frames :] * std / vae.config.scaling_factor + mean
        time = torch.zeros(len(latents)).to(scaled) if vae.config.timestep_conditioning else None
        pixels = vae.decode(scaled.to(vae.dtype), time, return_dict=False)[0]
        return pixels.transpose(1, 2).float() / 2 + 0.5

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Raise ValueError: recorded videos are loaded without sound, which the network also needs."""
        raise ValueError(self.refuses_recorded)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly from 1 to 1 / `num_steps`, and shift them for the number of video tokens."""
        even = torch.linspace(1.0, 1.0 / num_steps, num_steps)
        frames, _ = split(pipe.transformer.config, shape[1:])
        mu = size_shift(pipe.scheduler, (frames * math.prod(shape[2:]), 1), 1)
        return scheduled_times(pipe.scheduler, num_steps, sigmas=even, mu=mu)


@family
class Ltx2ImageToVideo(Ltx2):
    """LTX-2, image to video: as `Ltx2`, but the first latent frame is fixed to the encoded image.

    As in the pipeline, the image is compressed by H.264 as training images were, then resized.
    """

    pipelines = frozenset({"LTX2ImageToVideoPipeline"})
    images = (1, 1)

    def _encode_images(self, pipe: Any, request: Request) -> dict[str, Tensor]:
        """Encode the image to one latent frame (C, 1, h, w)."""
        from diffusers.pipelines.ltx2.pipeline_ltx2_image2video import (
            apply_image_conditioning_crf,
            resolve_default_image_crf,
        )
        from PIL.Image import fromarray

        _, height, width = request.size
        pixels = request.images[0].permute(1, 2, 0).numpy()
        if crf := resolve_default_image_crf(pipe.text_encoder):
            pixels = apply_image_conditioning_crf(pixels, crf)
        image = pipe.video_processor.preprocess(fromarray(pixels), height=height, width=width)
        device, dtype = pipe._execution_device, pipe.vae.dtype
        channels, _, *sides = self.latent_shape(pipe, height, width, 1)
        tokens, _ = pipe.prepare_latents(
            image.to(device, dtype), 1, channels, height, width, 1, dtype=dtype, device=device
        )
        return {"first_latent": tokens[0].cpu().T.reshape(channels, 1, *sides)}


def sound_length(config: Any, frames: int) -> int:
    """Count the sound latents that belong to a video of `frames` latent frames."""
    seconds = ((frames - 1) * config.vae_scale_factors[0] + 1) / FRAME_RATE
    rate = config.audio_sampling_rate / config.audio_hop_length / config.audio_scale_factor
    return round(seconds * rate)


def split(config: Any, shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of latent video frames and of sound latents in a joint latent of shape (f, h, w)."""
    total, height, width = shape
    for frames in range(1, total + 1):  # the sum grows with `frames`, so one number fits
        length = sound_length(config, frames)
        if frames + math.ceil(length / (height * width)) == total:
            return frames, length
    raise ValueError(f"no video with its sound fills {total} frames of {height} x {width} latents")


def check_pipe(pipe: Any) -> None:
    """Raise ValueError unless the network's video and audio settings fit each other and the autoencoders."""
    config, sound = pipe.transformer.config, pipe.audio_vae.config
    pairs = {
        "in_channels": (config.in_channels, config.audio_in_channels),
        "patch sizes": ((config.patch_size, config.patch_size_t), (1, 1)),
        "vae_scale_factors": (config.vae_scale_factors[0], pipe.vae_temporal_compression_ratio),
        "audio_sampling_rate": (config.audio_sampling_rate, sound.sample_rate),
        "audio_hop_length": (config.audio_hop_length, sound.mel_hop_length),
        "audio_scale_factor": (config.audio_scale_factor, pipe.audio_vae_temporal_compression_ratio),
    }
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise ValueError(f"this network has {name} {found}, but {wanted} is needed to read the pipeline")
