"""Conversion of conversations to the dictionaries of chat templates and TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmrl.core.episodes import TURN
from mmrl.core.modalities import MODALITIES
from mmrl.core.tool_calls import Call, CallError, parse_calls, without_calls
from mmrl.core.types import Frames, Media, Message, Prompt, Trajectory


def to_pil(image: Tensor) -> Any:
    """Convert an image (3, height, width) uint8 to PIL."""
    from PIL import Image

    return Image.fromarray(image.cpu().permute(1, 2, 0).contiguous().numpy())


def blocks_of(message: Message) -> list[dict[str, Any]]:
    """Convert a message to content blocks: texts, PIL images, and videos as lists of PIL images."""
    blocks: list[dict[str, Any]] = []
    for part in message.parts:
        if part.media is None:
            blocks.append({"type": "text", "text": part.text})
            continue
        kind = part.media.kind
        blocks.append({"type": kind, kind: _decoded(part.media)})
    return blocks


class _Decoded(Sequence[Any]):
    """The media of each prompt, decoded at the first access, since most rewards read no media."""

    def __init__(self, media: Sequence[tuple[Media, ...]], one: bool) -> None:
        self.media, self.one = media, one
        self._known: dict[tuple[Media, ...], Any] = {}  # decoded media; rows of a group share them

    def __len__(self) -> int:
        return len(self.media)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        shown = self.media[at]
        if shown not in self._known:
            decoded = [_decoded(medium) for medium in shown]
            self._known[shown] = (decoded[0] if decoded else None) if self.one else decoded
        return self._known[shown]


def _decoded(medium: Media) -> Any:
    return MODALITIES[medium.kind].shown(medium.load())


def first_frame(frames: Frames) -> Any:
    """Convert an image, stored as `Frames` with one frame, to PIL."""
    return to_pil(frames.pixels[0])


def all_frames(frames: Frames) -> list[Any]:
    """Convert the frames of a video to PIL."""
    return list(map(to_pil, frames.pixels))


def shown_media(prompts: Sequence[Prompt]) -> dict[str, Sequence[Any]]:
    """Convert the media of prompts to the keyword columns that TRL passes to reward functions.

    `images` has a list of PIL images per prompt, `videos` a list of lists of frames. If no prompt has more
    than one image, `image` has this image or None per prompt, and likewise for other kinds of media.
    """
    columns: dict[str, Sequence[Any]] = {}
    for kind, modality in MODALITIES.items():
        media = [tuple(m for m in prompt.media if m.kind == kind) for prompt in prompts]
        if any(media):
            single, several = modality.columns
            columns[several] = _Decoded(media, one=False)
            if max(map(len, media)) == 1:
                columns[single] = _Decoded(media, one=True)
    return columns


def turns_of_outcomes(row: Trajectory) -> list[Sequence[Message]]:
    """Return, for every outcome of a row, the conversation up to the turn of that outcome.

    Raises `ValueError` if more outcomes have the tag `turn` than the conversation has turns.
    """
    ends = [place for place, message in enumerate(row.turns, 1) if message.role == "assistant"]
    numbered = [TURN in outcome.tags for outcome in row.outcomes]
    if row.turns and sum(numbered) > len(ends):
        raise ValueError(
            f"a rollout of prompt '{row.prompt.uid}' has {sum(numbered)} outcomes with the tag `turn`, but "
            f"its conversation has {len(ends)} turns of the policy"
        )
    # Outcomes with the tag `turn` belong to the last turns of the conversation, in order. The number in the
    # tag is not an index into the conversation: in a game it counts the turns of all players.
    return [
        row.turns[: ends[-sum(numbered[place:])]] if row.turns and is_turn else row.turns
        for place, is_turn in enumerate(numbered)
    ]


def completion_of(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert a conversation to TRL's format for rewards: messages of the roles `assistant` and `tool`.

    Tool calls of a turn go into `tool_calls`, the other text into `content`; a turn with an unreadable call
    stays plain text. A reply has the `name` of its tool if it is known. The `content` of a reply is a text,
    or a list of blocks if the reply has media.
    """
    written: list[dict[str, Any]] = []
    calls: list[Call | CallError] = []  # calls of the latest turn that have no reply yet, in order
    for message in turns:
        if message.role == "tool":
            call = calls.pop(0) if calls else None
            name = {"name": call.name} if isinstance(call, Call) else {}
            has_media = any(part.media for part in message.parts)
            content = blocks_of(message) if has_media else message.text
            written.append({"role": "tool", **name, "content": content})
            continue
        text = message.text
        calls = parse_calls(text) if message.calls is None else list(message.calls)
        valid = [call for call in calls if isinstance(call, Call)]
        if not valid or len(valid) < len(calls):
            written.append({"role": message.role, "content": text})
            continue
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in valid]
        listed = [{"type": "function", "function": function} for function in functions]
        written.append({"role": message.role, "content": without_calls(text), "tool_calls": listed})
    return written
