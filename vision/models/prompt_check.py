"""Check for prompts that a model cannot read, from its processor and config, without its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from mmrl.config.registry import find
from mmrl.config.schema import Piece
from mmrl.core.modalities import MODALITIES
from mmrl.core.types import Media, Outcome, Prompt, reading
from mmrl.data.media import upright_size
from mmrl.data.media_root import MediaFile
from mmrl.data.sound import sound_duration
from mmrl.runtime.content_hash import of_tensors
from mmrl.vision.models.listed_tools import QWEN_TOOLS, listed_tools
from mmrl.vision.models.media_arguments import check_images, check_seconds, extractor_of, video_size_options
from mmrl.vision.models.model_families import check_length, check_max_length, check_sounds
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.models.recorded_turns import encode_recorded, recorded_turns

SIZES = 1 << 16  # number of image sizes in the cache
STAMP = 16  # upper bound of the tokens around a video frame, such as `<12.5 seconds>`


class PromptCheck:
    """Raises `PromptError` for a prompt, or a recorded answer, that a model cannot read.

    It avoids encoding and decoding. One prompt per pattern of roles and media is rendered with the chat
    template. Image features are counted from the size in the file header. Video features get an upper bound
    from the file header, if the processor has `get_num_of_video_patches`. A prompt is encoded only if these
    counts and its bytes could exceed the context. The check does not detect videos that are too long
    for other processors, nor faults that only decoding shows, such as truncated files.
    """

    # Options of the policy that change how prompts are rendered.
    rendering = frozenset({"model", "min_pixels", "max_pixels", "chat_template_kwargs"})

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder = encoder
        self.limit = encoder.limit
        self._forms: set[Any] = set()
        self.check_served: Callable[[Any, Prompt], None] | None = None
        self.max_length, self.needs_answers = 0, False
        self.image_features = lru_cache(SIZES)(self._features_of)  # maps (height, width) to a count

    def __call__(self, prompt: Prompt) -> None:
        """Check a prompt and its recorded answers."""
        if self.check_served:
            self.check_served(self.encoder.core.config, prompt)
        with reading(prompt):
            recorded = prompt.answers if type(prompt.answers) is tuple else ()
            if self.needs_answers and prompt.answers == ():
                raise ValueError("it has no recorded answers, and the engine needs them")
            recorded = [one for one in recorded if one.text or one.extra]
            form = (
                json.dumps(prompt.tools),
                tuple(
                    (m.role, tuple(p.media and p.media.kind for p in m.parts), m.extra)
                    for m in prompt.messages
                ),
            )
            answers = [
                text for one in recorded for text in self._texts(prompt, one, plain=form in self._forms)
            ]
            for text in answers:
                self.encoder.check_answer(text)
            self.encoder.check_text(prompt)
            if form not in self._forms:
                self.encoder.written(*listed_tools(self.encoder, prompt))
                self._forms.add(form)
            if self._may_exceed(prompt, max((len(text.encode()) for text in answers), default=0)):
                encoded = self.encoder.encode(prompt)
                longest = max((len(self.encoder.answer(text)) for text in answers), default=1)
                check_length(encoded.next_position + longest - 1, self.limit)
                check_max_length(len(encoded.ids) + longest, self.max_length)
            for one in recorded:
                whole = replace(prompt, messages=(*(one.asked or prompt.messages), *one.turns))
                self.encoder.check_text(whole)
                if whole != prompt and self._may_exceed(whole, len((one.text or "").encode())):
                    read, last = encode_recorded(self.encoder, prompt, one)[1][-1]
                    check_max_length(len(read.ids) + len(last), self.max_length)

    def _texts(self, prompt: Prompt, one: Outcome, plain: bool) -> list[str]:
        """List the rendered texts of an answer's turns; if `plain`, a single turn as it was recorded."""
        if plain and not (one.extra or one.turns or one.asked):
            return [one.text or ""]
        return [text for text, *_ in recorded_turns(self.encoder, prompt, one)]

    def _may_exceed(self, prompt: Prompt, answer_bytes: int) -> bool:
        """Whether an upper bound of the tokens of a prompt and an answer exceeds context or `max_length`.

        A token has at least one byte, so bytes are an upper bound of tokens.
        """
        features = sum(MODALITIES[one.kind].most_tokens(self, one) for one in prompt.media)
        texts = len(prompt.text.encode()) + sum(len(m.extra) for m in prompt.messages)
        around = self._around * len(prompt.messages)
        tools = len(json.dumps(prompt.tools, indent=4)) + len(QWEN_TOOLS) if prompt.tools else 0
        most = features + texts + tools + answer_bytes + around
        return 0 < self.limit <= most or 0 < self.max_length < most

    def check_engine(self, engine: Piece) -> None:
        """Also check what an engine needs: media that its servers support, recorded answers, `max_length`."""
        target = find("engine", engine.name).target
        self.needs_answers = bool(getattr(target, "needs_answers", False))
        check = getattr(target, "check_prompt", None)
        self.check_served = check and partial(check, engine.options)
        self.max_length = int(engine.options.get("max_length") or 0)

    def render(self, prompt: Prompt) -> str:
        """Render a prompt with the chat template; media become `<image: 64 tokens>`."""
        return self.encoder.render(prompt)

    def input_hash(self, prompt: Prompt) -> str:
        """Hash the token ids of a prompt, and its media tensors."""
        return input_hash(self.encoder, prompt)

    @cached_property
    def _around(self) -> int:
        """Number of bytes that the template adds around a user message."""
        message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        return len(self.encoder._render([message]).encode())

    def _features_of(self, height: int, width: int) -> int:
        """Count the features of an image by its size; return the context length if that is not possible."""
        processor = self.encoder.processor.image_processor
        merge = getattr(processor, "merge_size", None)
        if merge and hasattr(processor, "get_number_of_image_patches"):
            pixels = self.encoder.pixels
            limits = {"min_pixels": pixels.get("shortest_edge"), "max_pixels": pixels.get("longest_edge")}
            limits = {name: value for name, value in limits.items() if value}
            return int(processor.get_number_of_image_patches(height, width, limits)) // merge**2
        count = getattr(self.encoder.processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return self.limit  # large, so that `__call__` encodes the prompt
        return int(count(image_sizes=[[height, width]])["num_image_tokens"][0])


def input_hash(encoder: PromptEncoder, prompt: Prompt) -> str:
    """Hash the token ids of a prompt, then its media tensors: two hashes of 16 digits, with a space."""
    encoded = encoder.encode(prompt)
    return f"{of_tensors([encoded.ids])[:16]} {of_tensors(encoded.media.values())[:16]}"


def most_image_tokens(check: PromptCheck, medium: Media) -> int:
    """Count the features of an image; raise ValueError if the processor does not support its size."""
    if getattr(check.encoder.processor, "image_processor", None) is None:
        return 0  # rendering will raise the error
    check_images(check.encoder.processor)
    if isinstance(medium.source, Path) and medium.source.suffix == ".parquet":
        return 0  # unknown: reading the headers of all images inside a parquet file would be slow
    if medium.source is None:
        height, width = medium.load().pixels.shape[-2:]
    else:
        width, height = upright_size(medium.source, medium.name)
    return check.image_features(height, width)


def most_video_tokens(check: PromptCheck, medium: Media) -> int:
    """Return an upper bound of the tokens and positions of a video; 0 if only decoding could tell."""
    processor = getattr(check.encoder.processor, "video_processor", None)
    if processor is None:
        raise ValueError("it shows a video, but this model takes images only")
    count = getattr(processor, "get_num_of_video_patches", None)
    if not check.limit or count is None or not isinstance(medium.load, MediaFile):
        return 0
    frames, height, width, seconds = medium.load.video_size()
    vision = getattr(check.encoder.core.config, "vision_config", None)
    ticks = getattr(vision, "tokens_per_second", None) or 0  # if set, positions grow with time
    patches = count(frames, height, width, video_size_options(processor))
    sampling = medium.load.sampling
    heard = sampling is not None and sampling.load_audio_from_video
    sound = _sound_tokens(check, seconds) if heard else 0
    return patches // processor.merge_size**2 + int(seconds * ticks) + frames * STAMP + sound


def most_audio_tokens(check: PromptCheck, medium: Media) -> int:
    """Count the features of a sound by the seconds in its header; raise ValueError if it cannot be read."""
    extractor_of(check.encoder.processor)
    check_sounds(check.encoder.core.config)
    if isinstance(medium.source, Path) and medium.source.suffix == ".parquet":
        return 0  # unknown, as for images
    source = medium.source if isinstance(medium.source, Path | bytes | None) else medium.source.read()
    if source is None:
        sound = medium.load()
        return _sound_tokens(check, len(sound.samples) / sound.rate)
    return _sound_tokens(check, sound_duration(source))


def _sound_tokens(check: PromptCheck, seconds: float) -> int:
    """Count the features of a sound; return the context length if that is not possible."""
    processor = check.encoder.processor
    count = getattr(processor, "_get_num_multimodal_tokens", None)
    if math.isinf(seconds) or count is None:
        return check.limit
    check_seconds(processor, seconds)
    samples = math.ceil(seconds * extractor_of(processor).sampling_rate)
    return int(count(audio_lengths=[samples])["num_audio_tokens"][0])
