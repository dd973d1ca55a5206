"""The model families of HunyuanVideo 1.5, text to video and image to video (arXiv 2511.18870)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.registry import family
from mmrl.diffusion.model_family import (
    JOINT_ATTENTION,
    Condition,
    PipelineFamily,
    Request,
    check_fits,
    check_size,
)
from mmrl.diffusion.schedule import scheduled_times

# Settings that the pipeline's guider must have (its defaults); the engine sets the guidance scale.
GUIDER = {"guidance_rescale": 0.0, "start": 0.0, "stop": 1.0, "use_original_formulation": False}


@family
class HunyuanVideo15(PipelineFamily):
    """HunyuanVideo 1.5, text to video: Qwen2.5-VL reads the text in a template, ByT5 the words in quotes.

    Texts are not padded; the pipeline pads them, and the network masks the padding. The engine's guidance
    scale replaces the scale of the component `guider`, which must be plain classifier-free guidance at all
    steps. Networks that read the time of the next step (`use_meanflow`) are refused. The pipeline has no
    `load_lora_weights`; load a saved adapter by `pipe.transformer.load_lora_adapter`.
    """

    pipelines = frozenset({"HunyuanVideo15Pipeline"})
    targets = JOINT_ATTENTION

    def default_length(self, pipe: Any) -> int:
        """Return the pipeline's maximum number of text tokens; its `__call__` has no option for it."""
        return pipe.tokenizer_max_length

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if an encoder would truncate the templated text or the words in quotes."""
        from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import (
            extract_glyph_texts,
            format_text_input,
        )

        if max_sequence_length > pipe.tokenizer_max_length:
            raise ValueError(
                f"`max_sequence_length` is at most {pipe.tokenizer_max_length}, not {max_sequence_length}"
            )
        (chat,) = format_text_input([text], pipe.system_message)
        words = pipe.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        check_fits(pipe.tokenizer, words, max_sequence_length + pipe.prompt_template_encode_start_idx)
        check_fits(pipe.tokenizer_2, extract_glyph_texts(text) or "", pipe.tokenizer_2_max_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts to hidden states: (tokens, D) of Qwen2.5-VL and (G, E) of ByT5 for G quoted tokens."""
        conditions = []
        for request in requests:
            self.check_text(pipe, request.text, max_sequence_length)
            text = self.once(partial(encode_text, pipe, request.text), request.text)
            conditions.append(text | self._encode_images(pipe, request))
        return conditions

    def _encode_images(self, pipe: Any, request: Request) -> dict[str, Tensor]:
        """Return the image condition of text to video: no image tokens."""
        return {"image_embeds": torch.zeros(0, pipe.transformer.config.image_embed_dim)}

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions with padded texts: hidden states (B, tokens, D), masks (B, tokens) per encoder."""
        others = [
            {name: value for name, value in condition.items() if not name.startswith("encoder_")}
            for condition in conditions
        ]
        return {**super().stack(others), **pad_texts(conditions)}

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Return the number of latent channels, and the side of a patch, which covers one latent frame."""
        return pipe.transformer.config.out_channels, pipe.transformer.config.patch_size

    def pixels_per_latent(self, pipe: Any) -> int:
        """Return the spatial downsampling factor of the autoencoder."""
        return pipe.vae_scale_factor_spatial

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the latent shape (C, f, h, w): 1 latent frame for frame 1, then 1 for every 4 frames."""
        self._check_pipe(pipe)
        factor, span = self.pixels_per_latent(pipe), pipe.vae_scale_factor_temporal
        channels, patch = self.channels_and_patch(pipe)
        check_size(height, width, factor * patch)
        if num_frames < 1 or (num_frames - 1) % span:  # the first frame has its own latent frame
            raise ValueError(f"`num_frames` must be one more than a multiple of {span}, not {num_frames}")
        return channels, (num_frames - 1) // span + 1, height // factor, width // factor

    def _check_pipe(self, pipe: Any) -> None:
        """Raise ValueError if the network uses mean flow, or the pipeline's guider is not supported."""
        if pipe.transformer.config.use_meanflow:
            raise ValueError(
                "this network reads the time of the next step (`use_meanflow`), which a likelihood does not "
                "give it; take a model that was not distilled into few steps"
            )
        settings = pipe.guider.config
        other = {name: settings.get(name, usual) for name, usual in GUIDER.items()}
        if type(pipe.guider).__name__ != "ClassifierFreeGuidance" or other != GUIDER:
            raise ValueError(
                f"the pipeline's guider is {type(pipe.guider).__name__} with {other}; give it "
                "`ClassifierFreeGuidance()` of diffusers, whose other settings are the default ones"
            )

    def frames_per_latent(self, pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the frames per latent frame: 1 for the first, 4 (the temporal factor) for all others."""
        return (1, *[pipe.vae_scale_factor_temporal] * (shape[1] - 1))

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities from latents, the given first latent frame and its mask, joined as channels."""
        given, mask = torch.zeros_like(latents), torch.zeros_like(latents[:, :1])
        inputs = cast_inputs(condition, network)
        if (first := inputs.pop("first_latent", None)) is not None:
            given[:, :, :1], mask[:, :, :1] = first, 1.0
        return network(
            hidden_states=torch.cat([latents, given, mask], 1).to(network.dtype),
            timestep=(1000 * sigma).to(network.dtype),  # as the pipeline rounds it
            **inputs,
            return_dict=False,
        )[0]

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode to pixels (B, F, 3, height, width), row by row: the autoencoder fails on batches."""
        return torch.cat([super(HunyuanVideo15, self).decode(pipe, row[None]) for row in latents]).transpose(
            1, 2
        )

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode pixels (B, F, 3, height, width) in [0, 1] to latents, row by row."""
        compress = super().compress
        return torch.cat([compress(pipe, row.transpose(0, 1)[None]) for row in pixels])

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly from 1 to 1 / `num_steps`, and let the scheduler shift them."""
        even = torch.linspace(1.0, 0.0, num_steps + 1)[:-1]
        return scheduled_times(pipe.scheduler, num_steps, sigmas=even)


@family
class HunyuanVideo15ImageToVideo(HunyuanVideo15):
    """HunyuanVideo 1.5, image to video: SigLIP and the autoencoder read the first frame.

    The image is resized and cropped to the engine's size. The pipeline has no option for the size: its videos
    have about `target_size` squared pixels, a network setting, in nearly the aspect ratio of the image.
    """

    pipelines = frozenset({"HunyuanVideo15ImageToVideoPipeline"})
    images = (1, 1)

    def _encode_images(self, pipe: Any, request: Request) -> dict[str, Tensor]:
        """Encode the image to N SigLIP tokens (N, D), and to one latent frame (C, 1, h, w)."""
        from PIL.Image import fromarray

        _, height, width = request.size
        image = fromarray(request.images[0].permute(1, 2, 0).numpy())
        image = pipe.video_processor.resize(image, height=height, width=width, resize_mode="crop")
        on = {"device": pipe._execution_device, "dtype": pipe.text_encoder.dtype}
        tokens = pipe.encode_image(image, 1, **on)
        shape = self.latent_shape(pipe, height, width, 1)
        latent, _ = pipe.prepare_cond_latents_and_mask(
            torch.zeros(1, *shape), image, 1, height, width, on["dtype"], on["device"]
        )
        return {"image_embeds": tokens[0].cpu(), "first_latent": latent[0].cpu()}


def encode_text(pipe: Any, text: str) -> dict[str, Tensor]:
    """Encode a text without padding to hidden states (tokens, D) of Qwen2.5-VL and (G, E) of ByT5."""
    states, mask, glyphs, glyph_mask = pipe.encode_prompt([text])
    return {
        "encoder_hidden_states": states[mask.bool()].cpu(),
        "encoder_hidden_states_2": glyphs[glyph_mask.bool()].cpu(),
    }


def cast_inputs(condition: Condition, network: nn.Module) -> dict[str, Tensor]:
    """Convert the tensors of a condition, except masks, to the dtype of a network."""
    dtype: Any = network.dtype
    return {name: x if x.dtype == torch.bool else x.to(dtype) for name, x in condition.items()}


def pad_texts(conditions: Sequence[Condition]) -> dict[str, Tensor]:
    """Pad and batch the texts of both encoders: hidden states (B, tokens, D), masks (B, tokens) of text."""
    padded = {}
    for suffix in ("", "_2"):
        texts = [condition[f"encoder_hidden_states{suffix}"] for condition in conditions]
        states, lengths = pad_sequence(texts, batch_first=True), torch.tensor([len(one) for one in texts])
        padded[f"encoder_hidden_states{suffix}"] = states
        padded[f"encoder_attention_mask{suffix}"] = torch.arange(states.shape[1]) < lengths[:, None]
    return padded
