"""Classifier-free guidance of image tokens: the unconditional rows of a batch, and their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.vision.decoding.token_steps import FORBIDDEN, TokenSteps
from mmrl.vision.models import loading
from mmrl.vision.models.image_writer import ImageWriter
from mmrl.vision.models.model_families import family_of
from mmrl.vision.models.processor import EncodedPrompt


@dataclass(frozen=True, eq=False)
class Unconditional:
    """Inputs of the unconditional pass: image parts of N answers after the negative prompt."""

    steps: TokenSteps
    begin: Tensor  # (N,) index of begin-of-image

    @staticmethod
    def of(writer: ImageWriter, prompt: EncodedPrompt, answers: Sequence[Tensor]) -> Unconditional:
        """Cut the image parts from answers (T,), and put them after the negative prompt `prompt`."""
        begin = [writer.start(ids) for ids in answers]
        parts = [ids[at:] for ids, at in zip(answers, begin, strict=True)]
        length = torch.tensor([len(part) for part in parts])
        ids = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        which, temperature = torch.zeros(len(parts), dtype=torch.int64), torch.ones(len(parts))
        return Unconditional(TokenSteps((prompt,), which, ids, length, temperature), torch.tensor(begin))

    def select(self, rows: Tensor) -> Unconditional:
        """Select rows by index."""
        return Unconditional(self.steps[rows, slice(None)], self.begin[rows])

    def cost(self, rows: Tensor) -> int:
        """Count the tokens that are computed for the rows with the indices `rows`."""
        return self.steps.cost(rows)


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """The image tokens of a vocabulary, and their guidance scale.

    The probability of an image token is a softmax over the image tokens alone. The probability of any other
    token is a softmax over all tokens that are not forbidden.
    """

    ids: Tensor  # (C,) ids of the image tokens
    scale: float = 1.0

    def weights(self, ids: Tensor) -> Tensor:
        """Return the guidance scale (M,) of tokens (M,); 1 for text tokens, which have no guidance."""
        return torch.where(torch.isin(ids, self.ids.to(ids.device)), self.scale, 1.0)

    def masked(self, logits: Tensor, ids: Tensor, forbidden: list[int]) -> Tensor:
        """Mask logits (M, V): for each token in `ids` (M,), those that its softmax leaves out."""
        own = self.ids.to(ids.device)
        blocked = torch.zeros(2, logits.shape[-1], dtype=torch.bool, device=ids.device)
        blocked[0, torch.tensor(forbidden, dtype=torch.int64, device=ids.device)] = True
        blocked[1] = True
        blocked[1, own] = False
        return logits.masked_fill(blocked[torch.isin(ids, own).long()], FORBIDDEN)


def check_guidance(model: str, scale: float, negative_prompt: str) -> None:
    """Raise `ConfigError` for guidance of a model without images, or a negative prompt without guidance."""
    if scale == 1:
        if negative_prompt:
            raise ConfigError("`negative_prompt` is read by guidance only; set `guidance_scale` above 1")
        return
    config = loading.load_encoder(model).core.config  # loads no weights
    if family_of(config).images is None:
        raise ConfigError(
            f"`guidance_scale` is {scale:g}, but a model of type '{config.model_type}' writes no images; "
            "leave it out"
        )


def guide(conditional: Tensor, unconditional: Tensor, scale: Tensor | float) -> Tensor:
    """Return u + scale (c - u) for conditional logits c and unconditional u; exactly c for a scale of 1."""
    return torch.lerp(unconditional, conditional, scale)
