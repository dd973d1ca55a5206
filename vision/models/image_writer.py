"""Images as answer tokens: their token layout, and conversion to pixels by the VQ autoencoder."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder

IMAGE = -1  # marks an image token in a layout
NOTHING = Prompt("", ())


class ImageWriter:
    """Converts between images and the tokens with which a model writes them.

    Image tokens, and the control tokens inside an image, become placeholders of the prompt encoder, so that
    texts cannot contain these tokens.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        rules = encoder.family.images
        if rules is None:
            raise ConfigError(f"a model of type '{encoder.core.config.model_type}' writes no images")
        self.rules, self.encoder, self.core = rules, encoder, encoder.core
        self.ids = rules.tokens(self.core.config)  # (C,) ids of the image tokens
        self.begin = self.layout(1, 1)[0]  # id of the begin-of-image token
        control = encoder.special_tokens() & set(self.layout(1, 1)) - {self.begin, encoder.end[0]}
        encoder.placeholders = sorted({*encoder.placeholders, *self.ids.tolist(), *control})

    @staticmethod
    def of(encoder: PromptEncoder) -> ImageWriter | None:
        """Create the writer of a model; None if the model writes no images."""
        return ImageWriter(encoder) if encoder.family.images else None

    def size(self, height: int, width: int, prompt: Prompt = NOTHING) -> tuple[int, int]:
        """Return height and width in pixels; see `ImageRules.size_for`."""
        return self.rules.size_for(self.core.config, height, width, prompt)

    def layout(self, rows: int, columns: int) -> list[int]:
        """Return an image's layout: control tokens, `IMAGE` for each image token, and the end token."""
        texts = self.rules.layout(self.encoder.processor, self.core.config, rows, columns)
        first, after_row, last = (
            self.encoder.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            for text in texts
        )
        return [*first, *([IMAGE] * columns + after_row) * rows, *last, self.encoder.end[0]]

    def unconditional(self, text: str) -> EncodedPrompt:
        """Encode a negative prompt for classifier-free guidance."""
        return self.encoder.encode(Prompt("negative prompt", (Message("user", (Part(text),)),)))

    def layout_of(self, height: int, width: int) -> Tensor:
        """Return the token layout (L,) of an image with this height and width in pixels."""
        side = self.rules.side(self.core.config)
        return torch.tensor(self.layout(height // side, width // side))

    def start(self, ids: Tensor) -> int:
        """Return the index of begin-of-image in an answer (T,); T for an answer without an image."""
        places = (ids == self.begin).nonzero()[:, 0].tolist()
        return places[-1] if places else len(ids)

    def size_of(self, ids: Tensor) -> tuple[int, int]:
        """Return height and width in pixels of the image in an answer (T,), read from its layout."""
        if self.rules.fixed:
            return self.size(0, 0)
        inside, side = torch.isin(ids, self.ids), self.rules.side(self.core.config)
        found, count = ids.masked_fill(inside, IMAGE)[self.start(ids) :].tolist(), int(inside.sum())
        grids = ((rows, count // rows) for rows in range(1, count + 1) if count % rows == 0)
        rows, columns = next(grid for grid in grids if self.layout(*grid) == found)
        return rows * side, columns * side

    def outcome(self, ids: Tensor, chosen: Tensor) -> Outcome:
        """Decode an answer (T,): its image, and its text, which is None if no text was asked for.

        `chosen` (T,) marks the sampled tokens. If begin-of-image is first and was sampled, the text is empty.
        """
        start = self.start(ids)
        text = self.encoder.text(ids[:start]) if start or chosen[0] else None
        return Outcome(text, self.decode(ids, *self.size_of(ids)), end=len(ids))

    @torch.no_grad()
    def decode(self, ids: Tensor, height: int, width: int) -> Tensor:
        """Decode the image tokens of an answer (T,) to an image (3, height, width) uint8."""
        device, side = self.core.get_input_embeddings().weight.device, self.rules.side(self.core.config)
        tokens = ids[torch.isin(ids, self.ids)]
        ordered, codes = self.ids.sort()
        codes = codes[torch.searchsorted(ordered, tokens)].view(height // side, width // side)
        values = self.rules.decode(self.core, codes.to(device)).float().cpu()
        mean, std, scale = self._normalisation
        # Truncate fractions, as the image processors of transformers do.
        return ((values * std + mean) / scale).clamp(0, 255).to(torch.uint8)

    @torch.no_grad()
    def encode(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Encode an image (3, H, W) uint8 to the tokens (L,) of an answer, and the mask of image tokens."""
        height, width = self.rules.check_size(self.core.config, *image.shape[1:])
        mean, std, scale = self._normalisation
        weight = next(self.core.get_submodule(self.encoder.family.frozen).parameters())
        values = ((image.float() * scale - mean) / std)[None].to(weight)
        ids = self.layout_of(height, width)
        places = ids == IMAGE
        ids[places] = self.ids[self.rules.encode(self.core, values).flatten().cpu()]
        return ids, places

    def recorded(self, outcome: Outcome) -> tuple[Tensor, Tensor]:
        """Encode a recorded text (if any) and image to tokens (T,), with a mask of sampled tokens."""
        assert outcome.image is not None
        ids, chosen = self.encode(outcome.image)
        if not outcome.text:
            return ids, chosen
        self.encoder.check_answer(outcome.text)
        words = torch.tensor(self.encoder.plain.ids(outcome.text))
        chosen[0] = True  # begin-of-image, which the model samples to end a text
        return torch.cat([words, ids]), torch.cat([torch.ones_like(words, dtype=torch.bool), chosen])

    @property
    def _normalisation(self) -> tuple[Tensor, Tensor, float]:
        images = self.encoder.processor.image_processor
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in (images.image_mean, images.image_std))
        return mean, std, images.rescale_factor
