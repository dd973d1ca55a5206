"""Decoding of conversations: every turn reuses the keys and values of the earlier turns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from mmrl.kv_cache.tails import pad_tokens
from mmrl.vision.decoding.decoding import CachedReader, GenerationRequest, LogitsReader
from mmrl.vision.decoding.image_features import distinct_images
from mmrl.vision.decoding.prefill import MakeCache, pad_positions, pad_rows
from mmrl.vision.decoding.prefix_tree import Line, common_length, media_of
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.model_families import types_argument
from mmrl.vision.models.processor import EncodedPrompt

Key = tuple[str, int]  # (uid of the prompt, index of the answer)
Layers = Sequence[Sequence[tuple[Tensor, ...]]]  # [layer][row]: keys and values (h heads, n tokens, D)
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeptRow:
    """The stored keys and values of a conversation after a turn.

    Args:
        read: The input of that turn, from the beginning of the conversation.
        shared: Number of leading tokens that belong to a prompt shared by several rows.
        prompt: Index of the shared prompt in the cache.
        ids: Tokens (L,) with stored keys and values: the input, and the tokens generated after it.
        own: Per layer, keys and values (h heads, n tokens, D) after the shared prompt; n >= L - `shared`.
    """

    read: EncodedPrompt
    shared: int
    prompt: int
    ids: Tensor
    own: list[tuple[Tensor, Tensor]]

    def count(self, core: nn.Module, new: EncodedPrompt) -> int:
        """Count the leading tokens of a new input that are cached; this prefix never ends inside an image."""
        size = min(len(self.ids), len(new.ids) - 1)  # the last token must be read to get logits
        same = self.ids[:size] == new.ids[:size]
        count = size if same.all() else int(same.long().argmin())
        begins = all(
            name in new.media and begins_with(new.media[name], value)
            for name, value in self.read.media.items()
        )
        if count >= len(self.read.ids) and begins:
            return count  # the usual case, in which all media are equal
        after = self.read.next_position + torch.arange(len(self.ids) - len(self.read.ids))
        positions = torch.cat([self.read.positions, after.expand(len(self.read.positions), -1)], 1)
        stored = Line(self.ids, positions, tuple(media_of(core, self.read.ids, self.read.media)))
        line = Line(new.ids, new.positions, tuple(media_of(core, new.ids, new.media)))
        return line.outside_media(min(size, common_length(stored, line)))

    def unread(self, core: nn.Module, new: EncodedPrompt, count: int) -> list[Mapping[str, Tensor]]:
        """List the tensors of the media in a new input after its first `count` tokens."""
        if count >= len(self.read.ids):
            media = {name: value[len(self.read.media.get(name, ())) :] for name, value in new.media.items()}
            return [{name: value for name, value in media.items() if len(value)}]
        media = media_of(core, new.ids, new.media)
        return [medium.tensors for medium in media if medium.first >= count]


@dataclass(frozen=True, eq=False)
class Chunk:
    """The new tokens of a turn, which are read in one forward pass."""

    ids: Tensor  # (n, t), padded on the right
    positions: Tensor  # (A, n, t) on the A rotary axes
    length: Tensor  # (n,) number of tokens without padding
    media: Sequence[Mapping[str, Tensor]]  # media of one row after another, in token order


class Turns:
    """Makes the reader of each turn for a batch of conversations, reusing the KV cache of earlier turns.

    The new tokens of a turn (replies and their images) are read in one pass after the stored keys and values.
    If a turn does not begin with the whole turn before, because older images were removed, the longest common
    prefix is reused. Rows share the cache of their prompt, but have copies with `share_prefix: false` and
    with attention other than sdpa and eager.

    If keys and values cannot be reused, every turn reads the conversation from its beginning. The answers are
    the same up to rounding, and the log gets one warning. This happens with

    - a quantised `cache`, which supports images in the prompt only, not in later replies;
    - pruned models, which select visual tokens of whole prompts;
    - layers other than full or sliding-window attention;
    - a turn that does not begin with the shared prompt, and any turn after an image was removed for models
      whose images are one tensor (SmolVLM, LLaVA-OneVision), because its beginning cannot be compared.
    """

    def __init__(self, policy: TokenPolicy, make_cache: MakeCache | None = None) -> None:
        self.policy, self.make_cache = policy, make_cache
        self.reader: TurnReader | None = None

    def begin(self, requests: Sequence[GenerationRequest]) -> LogitsReader:
        """Make the reader of the next turn; a conversation without a request has ended.

        A conversation is identified by the uid of its prompt and the index of its answer (`Key`).
        """
        stored = self.reader.kept_rows() if self.reader else {}
        rows = [row for request in requests if (row := stored.get(key_of(request)))]
        if self.reader and len(rows) == len(requests):
            counts = [
                row.count(self.policy.core, request.encoded)
                for row, request in zip(rows, requests, strict=True)
            ]
            if all(count >= row.shared for count, row in zip(counts, rows, strict=True)):
                self.reader.go_on(requests, rows, counts)
                return self.reader
            _tell("a turn does not begin with the prompt of the turn before it, or its images are one tensor")
        self.reader = None  # free its keys and values first
        reader = CachedReader(self.policy, [request.encoded for request in requests], self.make_cache)
        if why := self._why_anew(reader):
            _tell(why)
        else:
            kind = TurnReader if reader.prefix.shared else CopiesReader
            self.reader = kind(reader, requests)
        return self.reader or reader

    def part(self, parents: Mapping[Key, Key]) -> None:
        """Branch conversations: `parents` maps each new conversation to the conversation it continues."""
        if self.reader:
            stored = self.reader.kept_rows()
            stored |= {new: stored[old] for new, old in parents.items() if old in stored}

    def _why_anew(self, reader: CachedReader) -> str:
        """Return the reason why the next turn cannot reuse keys and values; empty if it can."""
        from transformers.cache_utils import DynamicLayer

        core = reader.prefix.core
        if types_argument(core.config):
            return "the tokens of an image attend in both directions, which is known of those of a prompt"
        if reader.prefix.shared:
            return ""
        if self.make_cache is not None:
            return "the engine's `cache` codes the images of replies with the prompt"
        if any("forward" in vars(part) for part in (core, core.get_decoder())):
            return "a pruned model chooses among the visual tokens of a prompt as a whole"
        if other := {type(layer).__name__ for layer in reader.prefix.cache.layers} - {DynamicLayer.__name__}:
            return (
                f"the model has layers that keep other things than all keys and values ({', '.join(other)})"
            )
        return ""


@cache
def _tell(why: str) -> None:
    """Warn, once per process and reason, that each turn recomputes the whole conversation."""
    log.warning("every turn of a conversation is read anew, from its beginning: %s", why)


class TurnReader:
    """Reads turns of conversations, and stores the keys and values of finished rows until the next turn.

    Args:
        reader: The reader of the first turn, before its first token.
        requests: The requests of the first turn.
    """

    def __init__(self, reader: CachedReader, requests: Sequence[GenerationRequest]) -> None:
        self.reader = reader
        self._take_over(requests)

    def _take_over(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin the first turn with the prefilled prompts of `self.reader`."""
        cache = self.reader.prefix.cache
        self.prompts = cache.prompts()  # shared prompts, reused by later turns
        shared = [len(request.encoded.ids) - 1 for request in requests]
        self._begin(requests, cache.owners, shared)

    def _begin(
        self, requests: Sequence[GenerationRequest], prompts: Sequence[int], shared: Sequence[int]
    ) -> None:
        """Begin a turn; the first `shared[i]` tokens of row i are in the shared prompt `prompts[i]`."""
        self.rows = [
            KeptRow(request.encoded, size, prompt, request.encoded.ids, [])
            for request, prompt, size in zip(requests, prompts, shared, strict=True)
        ]
        self.keys, self.kept = list(map(key_of, requests)), {}
        self.chunk: Chunk | None = None
        self.begun, self.tokens = False, torch.zeros(len(requests), 0, dtype=torch.int64)
        self.latest: list[Tensor] = []  # tokens (n,) of the latest steps, not yet added to `tokens` (n, t)

    def read(self, token: Tensor | None) -> Tensor:
        """Append one token per row and return logits; the first call (None) runs the turn's new tokens."""
        self.begun = True
        if token is not None:
            self.latest.append(token)
        elif self.chunk is not None:
            return self._read_chunk(self.chunk)
        return self.reader.read(token)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows in the batch; store the keys and values of other rows for the next turn."""
        remaining = rows.tolist()
        self._leave(sorted({*range(len(self.rows))} - {*remaining}), copy=True)
        self.tokens = self.tokens[rows.cpu()]
        self.rows, self.keys = [self.rows[i] for i in remaining], [self.keys[i] for i in remaining]
        self.reader.keep(rows)

    def kept_rows(self) -> dict[Key, KeptRow]:
        """End the turn; return the stored keys and values of all conversations, by conversation."""
        if self.begun:
            self._leave(range(len(self.rows)))
        return self.kept

    def _leave(self, leaving: Iterable[int], *, copy: bool = False) -> None:
        """Store keys and values of rows that leave the batch: copies if `copy`, else views of the cache."""
        if self.latest:
            self.tokens = torch.cat([self.tokens, torch.stack(self.latest, 1).cpu()], 1)
            self.latest = []
        ids = [torch.cat([row.read.ids, read]) for row, read in zip(self.rows, self.tokens, strict=True)]
        counts = [len(x) - row.shared for x, row in zip(ids, self.rows, strict=True)]
        layers = self._own_tokens(counts)
        for i in leaving:
            own = [tuple(x.clone() for x in layer[i]) if copy else layer[i] for layer in layers]
            self.kept[self.keys[i]] = replace(self.rows[i], ids=ids[i], own=own)

    def go_on(
        self, requests: Sequence[GenerationRequest], rows: Sequence[KeptRow], counts: Sequence[int]
    ) -> None:
        """Begin the next turn; reuse the keys and values of the first `counts[i]` tokens of row i."""
        device = self.reader.prefix.last.device
        sizes = [count - row.shared for row, count in zip(rows, counts, strict=True)]
        self._restore(
            rows,
            [
                [tuple(x[:, :size] for x in own) for own, size in zip(layer, sizes, strict=True)]
                for layer in zip(*(row.own for row in rows), strict=True)
            ],
        )
        pairs = [(request.encoded, count) for request, count in zip(requests, counts, strict=True)]
        ids = pad_rows([encoded.ids[count:] for encoded, count in pairs], device, "right")
        unread = [encoded.positions[:, count:] for encoded, count in pairs]
        positions = pad_positions(unread, device, "right")
        after = torch.tensor([encoded.next_position for encoded, _ in pairs], device=device)
        self.reader.prefix = replace(
            self.reader.prefix,
            last=ids[:, 0],
            last_position=positions[..., 0],
            next_position=after.expand(len(positions), -1),
            length=0,
        )
        self._begin(requests, self._owners(), [row.shared for row in rows])
        core = self.reader.prefix.core
        media = [x for row, pair in zip(rows, pairs, strict=True) for x in row.unread(core, *pair)]
        length = torch.tensor([len(encoded.ids) - count for encoded, count in pairs], device=device)
        self.chunk = Chunk(ids, positions, length, media)

    def _read_chunk(self, chunk: Chunk) -> Tensor:
        """Read the new tokens of a turn; return the logits (n, V) after the last token of every row."""
        prefix, core = self.reader.prefix, self.reader.prefix.core
        with distinct_images(core, chunk.media, chunk.ids.device) as media:
            hidden = prefix.read(chunk.ids, chunk.positions, media)
        self._fill(self._own_tokens([len(row.ids) - row.shared for row in self.rows]))  # removes padding
        prefix.length = 1
        return self.reader.logits(hidden[torch.arange(len(hidden)), chunk.length - 1])

    # ---- storage of keys and values, overridden by `CopiesReader`

    def _owners(self) -> Sequence[int]:
        """Return the index of every row's shared prompt."""
        return self.reader.prefix.cache.owners

    def _own_tokens(self, counts: Sequence[int]) -> Layers:
        """View the keys and values (h, n, D) of row i's first `counts[i]` tokens after the shared prompt."""
        return self.reader.prefix.cache.own_tokens(counts)

    def _restore(self, rows: Sequence[KeptRow], own: Layers) -> None:
        """Create a cache from the shared prompts of rows, and the rows' own keys and values."""
        cache, device = self.prompts.prompts(), self.reader.prefix.last.device
        cache.batch_select_indices(torch.tensor([row.prompt for row in rows], device=device))
        self.prompts = cache.prompts()  # drops prompts whose conversations have all ended
        self.reader.prefix.cache = cache
        self._fill(own)

    def _fill(self, own: Layers) -> None:
        """Replace the keys and values (h, n, D) of all tokens after the shared prompts."""
        prefix = self.reader.prefix
        prefix.cache.fill(own)
        prefix.mask = prefix.mask.new_ones(len(own[0]), prefix.cache.get_seq_length())


class CopiesReader(TurnReader):
    """A `TurnReader` whose rows have copies of their prompts, in a left-padded DynamicCache."""

    def _take_over(self, requests: Sequence[GenerationRequest]) -> None:
        self._begin(requests, self._owners(), [0] * len(requests))

    def _owners(self) -> Sequence[int]:
        return range(len(self.reader.prefix.mask))

    def _own_tokens(self, counts: Sequence[int]) -> Layers:
        prefix = self.reader.prefix
        places = list(zip(prefix.mask.argmax(1).tolist(), counts, strict=True))  # (first index, count)
        return [
            [
                (x.keys[row, :, at : at + n], x.values[row, :, at : at + n])
                for row, (at, n) in enumerate(places)
            ]
            for x in prefix.cache.layers
        ]

    def _restore(self, rows: Sequence[KeptRow], own: Layers) -> None:
        self._fill(own)

    def _fill(self, own: Layers) -> None:
        from transformers import DynamicCache

        prefix, filled = self.reader.prefix, DynamicCache(config=self.reader.prefix.core.config)
        for number, layer in enumerate(own):
            filled.update(*(pad_tokens(side) for side in zip(*layer, strict=True)), number)
        lengths = torch.tensor([keys.shape[1] for keys, _ in own[0]], device=prefix.mask.device)
        places = torch.arange(int(lengths.max()), device=prefix.mask.device)
        prefix.cache = filled
        prefix.mask = (places >= lengths.max() - lengths[:, None]).to(prefix.mask.dtype)


def begins_with(whole: Tensor, first: Tensor) -> bool:
    """Return whether `whole` begins with `first`, ignoring padding of `whole` at the end of any axis."""
    return torch.equal(whole[tuple(map(slice, first.shape))], first)


def key_of(request: GenerationRequest) -> Key:
    """Return the key of a request's conversation: the uid of its prompt and the index of the answer."""
    return request.prompt.uid, request.index
