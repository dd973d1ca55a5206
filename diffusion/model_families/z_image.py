"""The model family of Z-Image and Z-Image-Turbo (arXiv 2511.22699)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.registry import family
from mmrl.diffusion.model_family import Condition, PackedFamily, Request, check_fits, per_text, texts_of

MULTIPLE = 32  # the network pads text tokens to a multiple of this


@family
class ZImage(PackedFamily):
    """Z-Image: Qwen3 reads the text as a user turn with thinking; one stream for text and image tokens.

    As in the pipeline, a guided velocity is v(text) + s (v(text) - v(negative)), and guidance is on for a
    scale s above 0. So scale 4 of other models is scale 3 here, and Turbo needs scale 0. The options
    `cfg_normalization` and `cfg_truncation` are off.
    """

    pipelines = frozenset({"ZImagePipeline"})
    unguided = 0.0
    targets = (
        "attention.to_k", "attention.to_out.0", "attention.to_q", "attention.to_v",
        "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
    )  # fmt: skip

    def check_text(self, pipe: Any, text: str, max_sequence_length: int) -> None:
        """Raise ValueError if a text, with its chat template, is too long."""
        # Reserve a position: text starts at 1 (padded), and the image takes the position after it.
        most = (pipe.transformer.config.axes_lens[0] - 2) // MULTIPLE * MULTIPLE
        if max_sequence_length > most:
            raise ValueError(f"`max_sequence_length` is at most {most}, not {max_sequence_length}")
        turn = [{"role": "user", "content": text}]
        rendered = pipe.tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        check_fits(pipe.tokenizer, rendered, max_sequence_length)

    def encode(
        self, pipe: Any, requests: Sequence[Request], max_sequence_length: int
    ) -> list[dict[str, Tensor]]:
        """Encode texts: hidden states (tokens, D) of the second-to-last layer, without padding."""
        conditions = []
        for text in texts_of(requests):
            self.check_text(pipe, text, max_sequence_length)
            states, _ = pipe.encode_prompt(
                text, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
            )
            conditions += per_text(states=states[0][None])
        return conditions

    def stack(self, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Batch conditions: padded hidden states (B, tokens, D), and text lengths (B,)."""
        texts = [condition["states"] for condition in conditions]
        lengths = torch.tensor([len(text) for text in texts])
        return {"states": pad_sequence(texts, batch_first=True), "lengths": lengths}

    def passes(self, guidance: float) -> int:
        """Return the number of network calls per velocity: 2 for `guidance` above 0, otherwise 1."""
        return 2 if guidance > 0 else 1

    def guide(self, with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
        """Apply classifier-free guidance to velocities (B, *L), with a scale at which 0 means no guidance."""
        return with_text + guidance * (with_text - without)

    def channels_and_patch(self, pipe: Any) -> tuple[int, int]:
        """Return the number of latent channels, and the side of the network's patches in latent pixels."""
        return pipe.transformer.config.in_channels, pipe.transformer.config.all_patch_size[0]

    def velocity(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, condition: Condition, guidance: Tensor
    ) -> Tensor:
        """Predict velocities: run the network, which predicts data - noise, at timestep 1 - sigma."""
        rows = zip(condition["states"].to(network.dtype), condition["lengths"].tolist(), strict=True)
        predicted = network(
            list(latents.to(network.dtype).unsqueeze(2)),  # (C, 1, h, w) each
            1 - sigma,
            [states[:length] for states, length in rows],
            return_dict=False,
        )[0]
        return -torch.stack(predicted).squeeze(2)
