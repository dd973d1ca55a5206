"""The model family of Qwen-Image (arXiv 2508.02324)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.registry import family
from mmrl.diffusion.model_family import (
    JOINT_ATTENTION,
    Condition,
    PackedFamily,
    Request,
    check_fits,
    images_of,
    pack,
    per_text,
    texts_of,
    unpack,
)


@family
class QwenImage(PackedFamily):
    """Qwen-Image: a vision-language model encodes the text without padding; the autoencoder is for videos.

    A guided velocity is rescaled, token by token, to the norm of the velocity with the text.
    """

    pipelines = frozenset({"QwenImagePipeline"})
    targets = (
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    )  # fmt: skip

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if a text, with the end of its template, is too long."""
        if max_sequence_length > pipe.tokenizer_max_length:
            raise ValueError(
                f"`max_sequence_length` is at most {pipe.tokenizer_max_length}, not {max_sequence_length}"
            )
        templated = pipe.prompt_template_encode.format(text)
        check_fits(pipe.tokenizer, templated, max_sequence_length + pipe.prompt_template_encode_start_idx)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode templated texts: hidden states (tokens, D), without the beginning of the template."""
        conditions = []
        for text in texts_of(requests):
            self.check_text(pipe, text, max_sequence_length)
            # Encode each text separately, so that the encoder pads no text.
            states, _ = pipe.encode_prompt([text], max_sequence_length=max_sequence_length)
            conditions += per_text(encoder_hidden_states=states)
        return conditions

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions: hidden states (B, tokens, D), a mask if lengths differ, and image latents."""
        texts = [condition["encoder_hidden_states"] for condition in conditions]
        images = super().stack([images_of(condition) for condition in conditions])
        lengths = torch.tensor([len(text) for text in texts])
        states = pad_sequence(texts, batch_first=True)
        if (lengths == lengths[0]).all():
            return {"encoder_hidden_states": states, **images}
        mask = torch.arange(states.shape[1]) < lengths[:, None]  # (B, tokens)
        return {"encoder_hidden_states": states, "encoder_hidden_states_mask": mask, **images}

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities at timestep sigma; tokens of condition images follow the latent tokens."""
        height, width = latents.shape[-2:]
        shown = [latents, *images_of(condition).values()]  # (B, C, h, w) each
        packed = [pack(one) for one in shown]
        tokens = network(
            hidden_states=torch.cat(packed, 1).to(network.dtype),
            timestep=sigma,
            encoder_hidden_states=condition["encoder_hidden_states"].to(network.dtype),
            encoder_hidden_states_mask=condition.get("encoder_hidden_states_mask"),
            # numbers of frames, rows and columns of tokens
            img_shapes=[[(1, one.shape[-2] // 2, one.shape[-1] // 2) for one in shown]] * len(latents),
            return_dict=False,
        )[0]
        return unpack(tokens[:, : packed[0].shape[1]], height, width)

    def guide(self, with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Apply guidance, then rescale every token (2 x 2 latent pixels) to its norm in `with_text`."""
        conditional, combined = pack(with_text), pack(super().guide(with_text, without, guidance))
        scale = conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
        return unpack(combined * scale, *with_text.shape[-2:])
