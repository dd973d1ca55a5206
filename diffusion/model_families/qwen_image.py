"""Qwen-Image (arXiv 2508.02324)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.registry import family
from mmrl.diffusion.latents import check_still, compress_film, decode_film, guided, pack, unpack
from mmrl.diffusion.model_family import Condition
from mmrl.diffusion.pixels import check_fits, check_size, dynamic_mu, even_sigmas, num_patches
from mmrl.diffusion.schedule import scheduled_times


@family
class QwenImage:
    """Texts of any length read by a vision-language model, and the autoencoder of a video model.

    A guided velocity keeps the norm that it has with the text alone, token by token.
    """

    pipelines = frozenset({"QwenImagePipeline"})
    targets = (
        "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
        "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    )  # fmt: skip
    embedded_guidance = False

    def encode(self, pipe: Any, texts: Sequence[str], max_sequence_length: int) -> list[dict[str, Tensor]]:
        """Read texts: "states" (S, D). A text stands in a frame of words whose beginning is left out again,
        but whose end counts for its length."""
        if max_sequence_length > pipe.tokenizer_max_length:
            raise ValueError(
                f"`max_sequence_length` is at most {pipe.tokenizer_max_length}, not {max_sequence_length}"
            )
        conditions = []
        for text in texts:
            framed = pipe.prompt_template_encode.format(text)
            check_fits(pipe.tokenizer, framed, max_sequence_length + pipe.prompt_template_encode_start_idx)
            # One by one, so that no text is padded inside the encoder.
            states, _ = pipe.encode_prompt([text], max_sequence_length=max_sequence_length)
            conditions.append({"states": states[0].cpu()})
        return conditions

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions: "states" (B, S, D), and a "mask" (B, S) where lengths differ."""
        lengths = torch.tensor([len(one["states"]) for one in conditions])
        states = pad_sequence([one["states"] for one in conditions], batch_first=True)
        if (lengths == lengths[0]).all():
            return {"states": states}
        return {"states": states, "mask": torch.arange(states.shape[1]) < lengths[:, None]}

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        """Give (C, h, w); the network takes latents two by two."""
        check_still(num_frames)
        factor = pipe.vae_scale_factor
        check_size(height, width, 2 * factor)
        return pipe.transformer.config.in_channels // 4, height // factor, width // factor

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Ask the network, which is told sigma."""
        height, width = latents.shape[-2:]
        tokens = network(
            hidden_states=pack(latents).to(network.dtype),
            timestep=sigma,
            encoder_hidden_states=condition["states"].to(network.dtype),
            encoder_hidden_states_mask=condition.get("mask"),
            img_shapes=[[(1, height // 2, width // 2)]] * len(latents),
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)

    def guide(self, with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Guide, then give every token of two by two latents the norm that it has with the text alone."""
        wanted, led = pack(with_text), pack(guided(with_text, without, guidance))
        length = wanted.norm(dim=-1, keepdim=True) / led.norm(dim=-1, keepdim=True)
        return unpack(led * length, *with_text.shape[-2:])

    def decode(self, pipe: Any, latents: Tensor) -> Tensor:
        """Make pixels: a film of one frame."""
        return decode_film(pipe.vae, latents.unsqueeze(2)).squeeze(1)

    def compress(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Make latents."""
        return compress_film(pipe.vae, pixels.unsqueeze(1)).squeeze(2)

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        """Space times evenly, and shift them as the pipeline's scheduler does for pictures of this size."""
        mu = dynamic_mu(pipe.scheduler, num_patches(shape, 2))
        return scheduled_times(pipe.scheduler, num_steps, sigmas=even_sigmas(num_steps), mu=mu)
