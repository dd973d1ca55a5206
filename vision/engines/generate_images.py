"""Generation of images as tokens by a vision-language model, after an optional text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveShare, ShareBelowOne
from mmrl.config.registry import engine
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts, Trajectory, reading
from mmrl.vision.decoding.decoding import CachedReader, GenerationRequest
from mmrl.vision.decoding.image_reader import ImageReader
from mmrl.vision.decoding.token_steps import TokenRow, continued
from mmrl.vision.engines.generate import Generate
from mmrl.vision.models import loading
from mmrl.vision.models.image_writer import IMAGE, ImageWriter
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.model_families import check_length, family_of
from mmrl.vision.models.processor import EncodedPrompt


class ImagePolicy(TokenPolicy, Protocol):
    """A token policy with the options of classifier-free guidance."""

    guidance_scale: float
    negative_prompt: str


@engine(sets_tags={"finish"})
@dataclass(eq=False)
class GenerateImages:
    """Sample a text and then an image, token by token, from a model that writes images, such as Emu3.

    The text ends with a begin-of-image token, an end token (which stays) or `max_text_length`. Then comes the
    image in the layout of the model: control tokens are inserted and not trained on, and the other tokens are
    sampled among the image tokens. The VQ autoencoder of the model decodes them to the image of the outcome,
    whose text is None without a text. Guidance is an option of the policy (`guidance_scale`); the
    unconditional row reads the image after the negative prompt, without the text (our reading).

    Args:
        policy: The policy.
        height: Height in pixels, unless the prompt sets one; 0: the model's default.
        width: Width in pixels, unless the prompt sets one; 0: the model's default.
        max_text_length: Maximal number of tokens of the text before the image; 0: no text.
        temperature: Divides the logits; 0: greedy decoding.
        top_p: Nucleus sampling: keeps the most likely tokens up to this total probability.
        top_k: Keeps the k most likely tokens; 0: all.
        min_p: Keeps tokens with at least this fraction of the highest probability.
        batch_size: Number of answers sampled together; 0: all.
    """

    policy: ImagePolicy
    _: KW_ONLY
    stream: Stream
    height: NonNegativeInt = 0
    width: NonNegativeInt = 0
    max_text_length: NonNegativeInt = 0
    temperature: NonNegativeFloat = 1.0
    top_p: PositiveShare = 1.0
    top_k: NonNegativeInt = 0
    min_p: ShareBelowOne = 0.0
    batch_size: NonNegativeInt = 0
    notes: ClassVar[frozenset[str]] = frozenset({"logp", "entropy", "token", "temperature"})
    makes: ClassVar[str] = "images"  # kind of outcomes, for commands that write them

    def __post_init__(self) -> None:
        self.writer = self.policy.images or ImageWriter(self.policy.prompt_encoder)
        self.writer.size(self.height, self.width)

    @staticmethod
    def check_learning(policy: Piece, options: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless the policy's model can write images of the size in `options`."""
        model = str(policy.options.get("model", ""))
        if not Path(model).expanduser().is_dir():
            return  # the model may not be downloaded yet
        encoder = loading.load_encoder(model)
        try:
            ImageWriter(encoder).size(int(options.get("height", 0)), int(options.get("width", 0)))
        except ValueError as error:
            raise ConfigError(f"rollout.engine: {error}") from error

    @staticmethod
    def check_prompt(options: Mapping[str, Any], config: Any, prompt: Prompt) -> None:
        """Raise `PromptError` for a prompt that asks for a size that the model cannot write."""
        if rules := family_of(config).images:
            with reading(prompt):
                rules.size_for(config, int(options.get("height", 0)), int(options.get("width", 0)), prompt)

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample a text and an image for every entry of `prompts`, in order."""
        counters: dict[str, count[int]] = defaultdict(count)
        encoder, rows = self.policy.prompt_encoder, []
        for prompt in prompts:
            index, encoded = next(counters[prompt.uid]), encoder.encode(prompt)
            with reading(prompt):
                size = self.writer.size(self.height, self.width, prompt)
                layout = self.writer.layout_of(*size)
                room = self.max_text_length + len(layout)
                check_length(encoded.next_position + room - 1, encoder.limit)
            uniform = torch.rand(room, generator=self.stream.generator(prompt.uid, index))
            rows.append(_Row(prompt, index, encoded, uniform, layout=layout))
        sampler = Generate(
            self.policy,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            batch_size=self.batch_size,
        )
        sampler.more_ends = [self.writer.begin]
        texts = self._texts(sampler, rows) if self.max_text_length else [None] * len(rows)
        begun: dict[int, EncodedPrompt] = {}  # maps id(prompt) to its image input
        requests = []
        for row, text in zip(rows, texts, strict=True):
            if text is not None:
                encoded = continued(row.encoded, text["token"])
            elif (encoded := begun.get(id(row.encoded))) is None:
                encoded = continued(row.encoded, torch.tensor([self.writer.begin]))
                begun[id(row.encoded)] = encoded
            uniform = row.uniform[self.max_text_length + 1 :]
            requests.append(_Row(row.prompt, row.index, encoded, uniform, layout=row.layout[1:]))
        images = sampler.answer(requests, self._begin)
        return tuple(map(self._finish, rows, texts, images))

    def _texts(self, sampler: Generate, rows: Sequence[_Row]) -> list[dict[str, Tensor] | None]:
        """Sample the texts; return their per-token values, ending with a begin-of-image token."""
        asked = [
            GenerationRequest(row.prompt, row.index, row.encoded, row.uniform[: self.max_text_length])
            for row in rows
        ]
        return [self._begun(row.notes) for row in sampler.answer(asked)]

    def _begun(self, notes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Append a begin-of-image token to a text's per-token values, unless it ends with one."""
        missing = int(notes["token"][-1]) != self.writer.begin
        added = {"token": torch.tensor([self.writer.begin] * missing, dtype=torch.int64)}
        zero = torch.zeros(int(missing))
        text = {
            name: torch.cat([notes[name], added.get(name, zero)]) for name in ("token", "logp", "entropy")
        }
        return text | {"chosen": torch.arange(len(text["token"])) < len(notes["token"])}

    def _begin(self, rows: Sequence[_Row]) -> ImageReader:
        """Create the reader of a batch of images, with a second reader if the policy uses guidance."""
        second = None
        if self.policy.guidance_scale != 1:
            negative = self.writer.unconditional(self.policy.negative_prompt)
            after = continued(negative, torch.tensor([self.writer.begin]))
            second = CachedReader(self.policy, [after] * len(rows))
        reader = CachedReader(self.policy, [row.encoded for row in rows])
        return ImageReader(
            reader, second, self.policy.guidance_scale, self.writer.ids, [r.layout for r in rows]
        )

    def _finish(self, row: _Row, text: dict[str, Tensor] | None, image: Trajectory) -> Trajectory:
        """Join text and image to one row, and decode the image."""
        forced = {"token": torch.tensor([self.writer.begin]), "chosen": torch.zeros(1, dtype=torch.bool)}
        before = text or forced | {name: torch.zeros(1) for name in ("logp", "entropy")}
        after = {**image.notes, "chosen": row.layout[1:] == IMAGE}
        notes = {name: torch.cat([before[name], after[name]]) for name in before}
        ids, chosen = notes["token"], notes.pop("chosen")
        outcome = replace(self.writer.outcome(ids, chosen), tags={"finish": "stop"})
        temperature = self.temperature or 1.0
        notes["temperature"] = temperature * chosen.double()  # 0 marks inserted tokens
        steps = TokenRow(row.encoded, ids, temperature, chosen)
        return Trajectory(row.prompt, row.prompt.uid, (outcome,), steps, len(ids), notes)


@dataclass
class _Row(GenerationRequest):
    """An image to generate, with its layout (L,)."""

    layout: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
