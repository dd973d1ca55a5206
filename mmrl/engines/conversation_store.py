"""Storage of conversations for replay: turns and replies as JSON, media once by their content hash.

Media of the data set are stored as references to the prompt. The state has only texts and tensors.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from mmrl.core.modalities import digest_of
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Sound, Trajectory, Transcript
from mmrl.runtime.state_tree import flatten, unflatten

CLASSES = {kind.__name__: kind for kind in (Frames, Sound)}


class ConversationStore:
    """The stored conversations of a replay buffer, keyed by the number of the row."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}  # JSON of every row
        self.used: dict[int, list[str]] = {}  # hashes of the media in every row
        self.media: dict[str, Tensor] = {}  # compressed tensors (bytes,) uint8, keyed by hash

    def size(self, number: int) -> int:
        """Count the bytes of a row and its media; 0 for a row without a conversation."""
        held = sum(self.media[digest].nbytes for digest in self.used.get(number, ()))
        return len(self.texts.get(number, "")) + held

    def pack(self, number: int, row: Trajectory, own: Prompt) -> list[Any]:
        """Convert a row to JSON: its number, the conversation as text, and media in base64, keyed by hash.

        Args:
            number: Number of the row.
            row: A rollout with a transcript.
            own: The unchanged prompt of the data set; its media are stored as references.
        """
        assert row.transcript is not None
        media: dict[str, str] = {}
        known, place = [medium.name for medium in own.media], count()

        def reference(medium: Media, of_prompt: bool) -> Any:
            at = next(place) if of_prompt else len(known)
            if known[at : at + 1] == [medium.name]:
                return at
            tensors: dict[str, Tensor] = {}
            tree, digest = flatten(_tree(medium), tensors), digest_of(medium).hex()
            if digest not in media:
                media[digest] = base64.b64encode(_compressed(tensors)).decode()
            return [medium.kind, medium.name, digest, tree]

        def message(turn: Message, of_prompt: bool = False) -> Any:
            parts = [reference(part.media, of_prompt) if part.media else part.text for part in turn.parts]
            marks = [[part.media is not None, part.quoted] for part in turn.parts]
            return [turn.role, turn.extra, parts, marks]

        script = row.transcript
        record = {
            "prompt": [message(turn, True) for turn in row.prompt.messages],
            "tools": script.tools,
            "turns": [ids.tolist() for ids in script.turns],
            "replies": [list(map(message, replies)) for replies in script.replies],
            "first": script.first,
            "outcomes": [[outcome.text, dict(outcome.tags)] for outcome in row.outcomes],
        }
        return [number, json.dumps(record), media]

    def add(self, packed: Iterable[Sequence[Any]]) -> None:
        """Store rows that `pack` converted."""
        for number, text, media in packed:
            self.texts[number], self.used[number] = text, list(media)
            for digest, data in media.items():
                self.media.setdefault(digest, _bytes_tensor(base64.b64decode(data)))

    def read(self, number: int, own: Prompt) -> tuple[Prompt, Transcript, list[Outcome]] | None:
        """Rebuild the prompt, transcript and outcomes of a stored conversation; None if a row has none.

        `own` is the unchanged prompt of the data set.
        """
        if number not in self.texts:
            return None
        record = json.loads(self.texts[number])

        def medium(reference: Any) -> Media:
            if isinstance(reference, int):
                return own.media[reference]
            kind, name, digest, tree = reference
            loaded = _loaded(unflatten(tree, _decompressed(self.media[digest])))
            return Media(kind, name, lambda: loaded)

        def message(stored: Sequence[Any]) -> Message:
            role, extra, parts, marks = stored
            both = zip(parts, marks, strict=True)
            made = (Part(media=medium(x)) if shown else Part(x, quoted=quoted) for x, (shown, quoted) in both)
            return Message(role, tuple(made), extra)

        prompt = replace(own, messages=tuple(map(message, record["prompt"])))
        script = Transcript(
            tuple(record["tools"]),
            tuple(torch.tensor(ids, dtype=torch.int64) for ids in record["turns"]),
            tuple(tuple(map(message, replies)) for replies in record["replies"]),
            record["first"],
        )
        return prompt, script, [Outcome(text=text, tags=tags) for text, tags in record["outcomes"]]

    def keep(self, numbers: Iterable[int]) -> None:
        """Drop all rows except `numbers`, and the media that no row uses."""
        kept = self.texts.keys() & set(numbers)
        self.texts, self.used = ({n: rows[n] for n in sorted(kept)} for rows in (self.texts, self.used))
        used = sorted({digest for digests in self.used.values() for digest in digests})
        self.media = {digest: self.media[digest] for digest in used}

    def state_dict(self) -> dict[str, Any]:
        """Return all rows and media."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore all rows and media."""
        vars(self).update({name: dict(value) for name, value in state.items()})


def _tree(loaded: Any) -> Any:
    """Convert a medium or a decoded medium to a nested dictionary with the name of its class."""
    loaded = loaded.load() if isinstance(loaded, Media) else loaded
    if type(loaded).__name__ not in CLASSES:
        raise TypeError(f"replay cannot store media that are decoded to {type(loaded).__name__}")
    values = {field.name: getattr(loaded, field.name) for field in fields(loaded)}
    values = {name: _tree(value) if is_dataclass(value) else value for name, value in values.items()}
    return {"class": type(loaded).__name__, **values}


def _loaded(tree: Mapping[str, Any]) -> Any:
    values = {name: _loaded(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    return CLASSES[values.pop("class")](**values)


def _compressed(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return zlib.compress(save({name: tensor.contiguous() for name, tensor in tensors.items()}), 1)


def _decompressed(data: Tensor) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load(zlib.decompress(data.numpy().tobytes()))


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
