"""The model family of HunyuanImage 2.1 (https://github.com/Tencent-Hunyuan/HunyuanImage-2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.registry import family
from mmrl.diffusion.model_families.hunyuan_video15 import cast_inputs, encode_text, pad_texts
from mmrl.diffusion.model_family import JOINT_ATTENTION, Condition, PipelineFamily, Request, check_fits
from mmrl.diffusion.schedule import scheduled_times


@family
class HunyuanImage(PipelineFamily):
    """HunyuanImage 2.1: Qwen2.5-VL reads the text in a template, ByT5 the words in quotes.

    Texts are not padded; the pipeline pads them, and the network masks the padding. Guidance is
    classifier-free at all steps, with the engine's scale. The pipeline's own `AdaptiveProjectedMixGuidance`
    adds predictions of earlier steps from the seventh step on, so its velocity depends on more than (x, t);
    to get images as in training, set `pipe.guider = ClassifierFreeGuidance(...)`. The distilled checkpoint,
    which reads the time of the next step (`use_meanflow`), is refused. The pipeline has no
    `load_lora_weights`; load a saved adapter by `pipe.transformer.load_lora_adapter`.
    """

    pipelines = frozenset({"HunyuanImagePipeline"})
    targets = JOINT_ATTENTION

    def default_length(self, pipe: Any) -> int:
        """Return the pipeline's maximum number of text tokens; its `__call__` has no option for it."""
        return pipe.tokenizer_max_length

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if an encoder would truncate the templated text or the words in quotes."""
        from diffusers.pipelines.hunyuan_image.pipeline_hunyuanimage import extract_glyph_text

        if max_sequence_length > pipe.tokenizer_max_length:
            raise ValueError(
                f"`max_sequence_length` is at most {pipe.tokenizer_max_length}, not {max_sequence_length}"
            )
        template, start = pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx
        check_fits(pipe.tokenizer, template.format(text), max_sequence_length + start)
        check_fits(pipe.tokenizer_2, extract_glyph_text(text) or "", pipe.tokenizer_2_max_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts to hidden states: (tokens, D) of Qwen2.5-VL and (G, E) of ByT5 for G quoted tokens."""
        conditions = []
        for request in requests:
            self.check_text(pipe, request.text, max_sequence_length)
            conditions.append(encode_text(pipe, request.text))
        return conditions

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions with padded texts: hidden states (B, tokens, D), masks (B, tokens) per encoder."""
        return pad_texts(conditions)

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Return the number of latent channels, and the side of the network's patches in latent pixels."""
        return pipe.transformer.config.in_channels, pipe.transformer.config.patch_size[0]

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Compute the latent shape (C, h, w); raises ValueError for a distilled network."""
        if pipe.transformer.config.use_meanflow or pipe.transformer.config.guidance_embeds:
            raise ValueError(
                "this network was distilled: it reads the time of the next step (`use_meanflow`) or a "
                "guidance scale (`guidance_embeds`), which a likelihood does not give it; take the base model"
            )
        return super().latent_shape(pipe, height, width, num_frames)

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities at timestep 1000 sigma; masks in the condition stay boolean."""
        return network(
            hidden_states=latents.to(network.dtype),
            timestep=(1000 * sigma).to(network.dtype),  # as the pipeline rounds it
            **cast_inputs(condition, network),
            return_dict=False,
        )[0]

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly from 1 to 1 / `num_steps`, and let the scheduler shift them."""
        even = torch.linspace(1.0, 0.0, num_steps + 1)[:-1]
        return scheduled_times(pipe.scheduler, num_steps, sigmas=even)
