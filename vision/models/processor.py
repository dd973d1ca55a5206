"""From messages to what a model reads: ids, positions, pixels; and which tokens an answer may not hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.byte_lru import Kept
from mmrl.core.types import Frames, Prompt
from mmrl.vision.models.model_families import family_of

CACHE_BYTES = 2 << 30
TICKS = 1000  # frame times are handed to processors in milliseconds


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt as a model reads it: `ids` is (S,), `positions` is (A, S), `media` are the tensors that its
    processor made."""

    uid: str
    ids: Tensor
    positions: Tensor
    media: dict[str, Tensor]

    @property
    def next_position(self) -> int:
        """Find the position of the first token of an answer: one more than the largest of all axes."""
        return int(self.positions.max()) + 1

    @property
    def bytes(self) -> int:
        """Measure the tensors."""
        return sum(t.numel() * t.element_size() for t in (self.ids, self.positions, *self.media.values()))


class PromptEncoder:
    """Speaks the language of one processor. Encoded prompts are kept while there is room, so a group shares
    one."""

    def __init__(self, processor: Any, core: nn.Module, *, pixels: dict[str, int] | None = None) -> None:
        self.processor, self.tokenizer, self.core = processor, processor.tokenizer, core
        self.pixels = self._pixel_limits(pixels) if pixels else {}
        self.placeholders = self._placeholders()
        self.end = self._end_tokens()
        self.kept: Kept[EncodedPrompt] = Kept(CACHE_BYTES, lambda encoded: encoded.bytes)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Encode a prompt, and count its media features against its placeholder tokens."""
        return self.kept.get((prompt.uid, prompt.messages), lambda: self._encode(prompt))

    def answer(self, text: str) -> Tensor:
        """Tokenize an answer and end it."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        for token in set(self.placeholders) & set(ids):
            raise ValueError(
                f"the recorded answer {text[:80]!r} holds the media placeholder "
                f"{self.tokenizer.decode(token)!r}, which no answer may hold"
            )
        return torch.tensor([*ids, self.end[0]])

    def text(self, ids: Tensor) -> str:
        """Turn the tokens of an answer into text."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        self._refuse_placeholders(prompt)
        messages = [
            {
                "role": message.role,
                "content": [
                    {"type": part.media.kind} if part.media else {"type": "text", "text": part.text}
                    for part in message.parts
                ],
            }
            for message in prompt.messages
        ]
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        shown = [(medium.kind, medium.load()) for medium in prompt.media]
        images = [frames.pixels[0] for kind, frames in shown if kind == "image"]
        clips = [frames for kind, frames in shown if kind == "video"]
        if clips and getattr(self.processor, "video_processor", None) is None:
            raise ValueError(f"prompt '{prompt.uid}' shows a clip, but this model looks at pictures only")
        try:
            inputs = dict(
                self.processor(text=[text], return_tensors="pt", **self._media_arguments(images, clips))
            )
        except (ValueError, IndexError, StopIteration) as error:
            raise ValueError(f"cannot encode prompt '{prompt.uid}': {error}") from error
        inputs = {name: torch.as_tensor(value) for name, value in inputs.items() if name not in _UNUSED}
        self._count(prompt, inputs)
        positions = family_of(self.core.config).positions(self.core, inputs)
        ids = inputs.pop("input_ids")[0]
        for name in ("attention_mask", "mm_token_type_ids"):
            inputs.pop(name, None)
        return EncodedPrompt(prompt.uid, ids, positions, inputs)

    def _media_arguments(self, images: list[Tensor], clips: list[Frames]) -> dict[str, Any]:
        from transformers.video_utils import VideoMetadata

        arguments: dict[str, Any] = {}
        if images:
            arguments |= {"images": [images], "images_kwargs": dict(self.pixels and {"size": self.pixels})}
        if clips:
            # Frames were chosen when the clip was decoded; the processor only learns their times.
            metadata = [
                VideoMetadata(
                    total_num_frames=_ticks(clip),
                    fps=TICKS,
                    frames_indices=[round(t * TICKS) for t in clip.times.tolist()],
                    duration=clip.duration,
                )
                for clip in clips
            ]
            arguments |= {
                "videos": [clip.pixels for clip in clips],
                "videos_kwargs": {
                    "video_metadata": metadata,
                    "do_sample_frames": False,
                    "return_metadata": True,
                    **self._clip_limits(),
                },
            }
        return arguments

    def _count(self, prompt: Prompt, inputs: dict[str, Tensor]) -> None:
        for token, features in family_of(self.core.config).features(self.core, inputs).items():
            found = int((inputs["input_ids"] == token).sum())
            if found != features:
                raise ValueError(
                    f"prompt '{prompt.uid}' has {found} placeholder tokens "
                    f"({self.tokenizer.decode(token)!r}) for {features} media features; "
                    "do its messages, template and media agree?"
                )

    def _refuse_placeholders(self, prompt: Prompt) -> None:
        words = [self.tokenizer.decode(token) for token in self.placeholders]
        # Processors look for words of their own, which need not be those of the model.
        words += [getattr(self.processor, f"{kind}_token", None) for kind in ("image", "video")]
        for word in words:
            if word and word in prompt.text:
                raise ValueError(
                    f"the text of prompt '{prompt.uid}' holds the media placeholder {word!r}; "
                    "add the picture or clip as a part of the message instead"
                )

    def _pixel_limits(self, pixels: dict[str, int]) -> dict[str, int]:
        """Fill in the limit that was not given. Only processors that keep the shape of a picture have
        both."""
        size = {name: value for name, value in dict(self.processor.image_processor.size).items() if value}
        if set(size) != {"shortest_edge", "longest_edge"}:
            raise ValueError(
                f"`min_pixels` and `max_pixels` do not fit this model: it makes pictures of the size {size}"
            )
        return {**size, **pixels}

    def _clip_limits(self) -> dict[str, Any]:
        """Keep processors from enlarging frames: how large they are is the data set's budget, and Qwen's
        would undo it. Its own upper limit stays."""
        clips = self.processor.video_processor
        size = {name: value for name, value in dict(clips.size).items() if value}
        if set(size) != {"shortest_edge", "longest_edge"}:
            return {}
        smallest = (clips.patch_size * clips.merge_size) ** 2
        return {"size": {**size, "shortest_edge": min(size["shortest_edge"], smallest)}}

    def _placeholders(self) -> list[int]:
        """List the tokens that stand for media, or fence them in; no answer may hold one."""
        config = self.core.config
        named = [
            getattr(config, f"{kind}_token_id", None)
            for kind in ("image", "video", "vision_start", "vision_end")
        ]
        return sorted({token for token in named if token is not None})

    def _end_tokens(self) -> list[int]:
        """List what ends an answer, first what the chat template puts behind one. A checkpoint's
        generation_config is not asked."""
        said = [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "\x02"}]},
        ]
        rendered = self.processor.apply_chat_template(said, tokenize=False)
        behind = self.tokenizer(rendered.rpartition("\x02")[2], add_special_tokens=False)["input_ids"]
        # Not only those that the tokenizer has a name for.
        added = self.tokenizer.added_tokens_decoder
        special = {*self.tokenizer.all_special_ids, *(id for id, token in added.items() if token.special)}
        ends = [token for token in behind[:2] if token in special][:1] + [self.tokenizer.eos_token_id]
        found = list(dict.fromkeys(token for token in ends if token is not None))
        if not found:
            raise ValueError("the tokenizer names no token that ends an answer; set its eos_token")
        return found


def _ticks(clip: Frames) -> int:
    """Count the milliseconds that the frames stand for. It is the whole clip, or the window that was looked
    at: processors divide it by the number of frames."""
    times = clip.times.tolist()
    seconds = len(times) * (times[1] - times[0]) if len(times) > 1 else clip.duration
    return max(1, round(seconds * TICKS))


_UNUSED = ("video_metadata", "timestamps")
