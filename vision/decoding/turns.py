"""Decoding of conversations: in every turn, rows go on from the keys and values of everything before."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mmrl.vision.decoding.decoding import CachedReader, GenerationRequest, LogitsReader
from mmrl.vision.decoding.image_features import distinct_images
from mmrl.vision.decoding.prefill import MakeCache
from mmrl.vision.decoding.prefix_tree import Line, common_length, media_of
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.model_families import family_of
from mmrl.vision.models.processor import EncodedPrompt

Key = tuple[str, int]  # uid of the prompt, number of the answer to it
Layers = Sequence[Sequence[tuple[Tensor, ...]]]  # of every layer and row: keys and values (h, n, D)
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeptRow:
    """The keys and values of a conversation after a turn.

    Args:
        read: What the model read in that turn, from the beginning.
        shared: How many tokens of it are those of a prompt that rows share; `prompt` is its number.
        ids: Tokens (L,) whose keys and values are kept: those read, and those that came after.
        own: Keys and values (h, n, D) by layer of the tokens that are not shared, at least L - `shared`.
    """

    read: EncodedPrompt
    shared: int
    prompt: int
    ids: Tensor
    own: list[tuple[Tensor, Tensor]]

    def count(self, core: nn.Module, asked: EncodedPrompt) -> int:
        """Count the first tokens of `asked` that are kept, with all that they show; none inside an image."""
        size = min(len(self.ids), len(asked.ids) - 1)  # the last token has to give its logits
        same = self.ids[:size] == asked.ids[:size]
        count = size if same.all() else int(same.long().argmin())
        if count >= len(self.read.ids) and self._begins(asked):
            return count  # the usual case, found without comparing media one by one
        after = self.read.next_position + torch.arange(len(self.ids) - len(self.read.ids))
        positions = torch.cat([self.read.positions, after.expand(len(self.read.positions), -1)], 1)
        kept = Line(self.ids, positions, tuple(media_of(core, self.read.ids, self.read.media)))
        new = Line(asked.ids, asked.positions, tuple(media_of(core, asked.ids, asked.media)))
        return new.outside_media(min(size, common_length(kept, new)))

    def unread(self, core: nn.Module, asked: EncodedPrompt, count: int) -> list[Mapping[str, Tensor]]:
        """List the media of `asked` after its first `count` tokens."""
        if count >= len(self.read.ids):
            media = {name: value[len(self.read.media.get(name, ())) :] for name, value in asked.media.items()}
            return [{name: value for name, value in media.items() if len(value)}]
        found = media_of(core, asked.ids, asked.media)
        return [medium.tensors for medium in found if medium.first >= count]

    def _begins(self, asked: EncodedPrompt) -> bool:
        """Return whether `asked` shows first what was shown."""
        return all(
            name in asked.media and begins_with(asked.media[name], value)
            for name, value in self.read.media.items()
        )


@dataclass(frozen=True, eq=False)
class Chunk:
    """What rows read at once: `ids` (n, t) padded after `length` (n,), `positions` (A, n, t), and media.

    Media are in the order of rows, and of their tokens.
    """

    ids: Tensor
    positions: Tensor
    length: Tensor
    media: Sequence[Mapping[str, Tensor]]


class Turns:
    """Readers for the turns of a batch of conversations, which share their prompts in all turns.

    What a conversation reads anew, replies and their images, is read in bulk after the keys and values of
    what came before; rows that share no prompts (`share_prefix: false`, other attention than sdpa and eager)
    have copies of their own. Where a turn does not begin with all of the turn before, because older images
    left it, the row goes on from the longest beginning that both have. Where keys and values cannot go on,
    everything is read anew, with the same answers up to rounding, which the log says once: with a `cache` of
    lower precision, which codes the visual tokens of replies where it reads them with the prompt; with pruned
    models, which choose among the visual tokens of a prompt as a whole; with other layers than those of
    attention; and where a turn does not begin with the prompt that rows share, which is not known of models
    whose images cannot be told apart (SmolVLM, LLaVA-OneVision) once one of them left.
    """

    def __init__(self, policy: TokenPolicy, make_cache: MakeCache | None = None) -> None:
        self.policy, self.make_cache = policy, make_cache
        self.reader: TurnReader | None = None

    def begin(self, requests: Sequence[GenerationRequest]) -> LogitsReader:
        """Make the reader of the next turn of conversations; those that are not asked for have ended.

        A conversation is known by the uid of its prompt and its number; see `part`.
        """
        kept = self.reader.kept_rows() if self.reader else {}
        rows = [row for request in requests if (row := kept.get(key_of(request)))]
        if self.reader and len(rows) == len(requests):
            core, asked = self.policy.core, [request.encoded for request in requests]
            counts = [row.count(core, encoded) for row, encoded in zip(rows, asked, strict=True)]
            if all(count >= row.shared for count, row in zip(counts, rows, strict=True)):
                self.reader.go_on(requests, rows, counts)
                return self.reader
            _tell("a turn does not begin with the prompt of the turn before it, or its images are one tensor")
        self.reader = None  # its keys and values go before others are made
        reader = CachedReader(self.policy, [request.encoded for request in requests], self.make_cache)
        if why := self._why_anew(reader):
            _tell(why)
        else:
            kind = TurnReader if reader.prefix.shared else CopiesReader
            self.reader = kind(reader, requests)
        return self.reader or reader

    def part(self, parents: Mapping[Key, Key]) -> None:
        """Let conversations go on from what others have read so far: keys of the new ones to those."""
        if self.reader:
            kept = self.reader.kept_rows()
            kept |= {new: kept[old] for new, old in parents.items() if old in kept}

    def _why_anew(self, reader: CachedReader) -> str:
        """Say why the copies of keys and values that rows have cannot go on; empty where they can."""
        from transformers.cache_utils import DynamicLayer

        core = reader.prefix.core
        if family_of(core.config).types:
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
    """Log once a process that turns are read anew."""
    log.warning("every turn of a conversation is read anew, from its beginning: %s", why)


class TurnReader:
    """Reads turns of conversations, and keeps the keys and values of rows that leave until the next turn.

    It takes over a reader that is about to read the first turn.
    """

    def __init__(self, reader: CachedReader, requests: Sequence[GenerationRequest]) -> None:
        self.reader = reader
        self._take_over(requests)

    def _take_over(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin the first turn."""
        cache = self.reader.prefix.cache
        self.prompts = cache.prompts()  # of which later turns make a cache
        shared = [len(request.encoded.ids) - 1 for request in requests]
        self._begin(requests, cache.owners, shared)

    def _begin(
        self, requests: Sequence[GenerationRequest], prompts: Sequence[int], shared: Sequence[int]
    ) -> None:
        """Begin a turn of rows that share the first tokens of the prompts of these numbers."""
        self.rows = [
            KeptRow(request.encoded, size, prompt, request.encoded.ids, [])
            for request, prompt, size in zip(requests, prompts, shared, strict=True)
        ]
        self.keys, self.kept = list(map(key_of, requests)), {}
        self.chunk: Chunk | None = None
        self.begun, self.tokens = False, torch.zeros(len(requests), 0, dtype=torch.int64)
        self.latest: list[Tensor] = []  # tokens (n,) that came after those of `tokens` (n, t)

    def read(self, token: Tensor | None) -> Tensor:
        """Run one token per row; the first time what the turn reads anew, or the last token of the prompt."""
        self.begun = True
        if token is not None:
            self.latest.append(token)
        elif self.chunk is not None:
            return self._read_chunk(self.chunk)
        return self.reader.read(token)

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows; the others wait for their next turn."""
        staying = rows.tolist()
        self._leave(sorted({*range(len(self.rows))} - {*staying}), copy=True)
        self.tokens = self.tokens[rows.cpu()]
        self.rows, self.keys = [self.rows[i] for i in staying], [self.keys[i] for i in staying]
        self.reader.keep(rows)

    def kept_rows(self) -> dict[Key, KeptRow]:
        """End the turn, and get its rows."""
        if self.begun:
            self._leave(range(len(self.rows)))
        return self.kept

    def _leave(self, leaving: Iterable[int], *, copy: bool = False) -> None:
        """Keep rows; without a `copy` they are views of the cache."""
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
        """Begin the next turn: every row has the keys and values of its first `counts` tokens."""
        device = self.reader.prefix.last.device
        sizes = [count - row.shared for row, count in zip(rows, counts, strict=True)]
        self._restore(
            rows,
            [
                [tuple(x[:, :size] for x in own) for own, size in zip(layer, sizes, strict=True)]
                for layer in zip(*(row.own for row in rows), strict=True)
            ],
        )
        asked = [request.encoded for request in requests]

        def padded(new: list[Tensor]) -> Tensor:
            return pad_sequence(new, batch_first=True).to(device)

        pairs = list(zip(asked, counts, strict=True))
        ids = padded([encoded.ids[count:] for encoded, count in pairs])
        positions = padded([encoded.positions[:, count:].T for encoded, count in pairs]).permute(2, 0, 1)
        after = torch.tensor([encoded.next_position for encoded in asked], device=device)
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
        """Read what the turn has of replies, with padding after it: logits (n, V) of the last tokens."""
        prefix, core = self.reader.prefix, self.reader.prefix.core
        with distinct_images(core, chunk.media, chunk.ids.device) as media:
            hidden = prefix.read(chunk.ids, chunk.positions, media)
        self._fill(self._own_tokens([len(row.ids) - row.shared for row in self.rows]))  # without padding
        prefix.length = 1
        return self.reader.logits(hidden[torch.arange(len(hidden)), chunk.length - 1])

    # ---- how keys and values are stored

    def _owners(self) -> Sequence[int]:
        """Number the prompts of the rows."""
        return self.reader.prefix.cache.owners

    def _own_tokens(self, counts: Sequence[int]) -> Layers:
        """View the keys and values (h, n, D) of the first `counts` tokens that rows do not share."""
        return self.reader.prefix.cache.own_tokens(counts)

    def _restore(self, rows: Sequence[KeptRow], own: Layers) -> None:
        """Store what rows kept, after the prompts that they share."""
        cache, device = self.prompts.prompts(), self.reader.prefix.last.device
        cache.batch_select_indices(torch.tensor([row.prompt for row in rows], device=device))
        self.prompts = cache.prompts()  # without those of which every conversation has ended
        self.reader.prefix.cache = cache
        self._fill(own)

    def _fill(self, own: Layers) -> None:
        """Store keys and values (h, n, D) as all that rows have of their own."""
        prefix = self.reader.prefix
        prefix.cache.fill(own)
        prefix.mask = prefix.mask.new_ones(len(own[0]), prefix.cache.get_seq_length())


class CopiesReader(TurnReader):
    """The same where every row has a copy of its prompt, in a DynamicCache with padding on the left."""

    def _take_over(self, requests: Sequence[GenerationRequest]) -> None:
        self._begin(requests, self._owners(), [0] * len(requests))

    def _owners(self) -> Sequence[int]:
        return range(len(self.reader.prefix.mask))

    def _own_tokens(self, counts: Sequence[int]) -> Layers:
        prefix = self.reader.prefix
        places = list(zip(prefix.mask.argmax(1).tolist(), counts, strict=True))  # after the padding
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

        prefix = self.reader.prefix

        def padded(tokens: Sequence[Tensor]) -> Tensor:
            longest = max(x.shape[1] for x in tokens)
            return torch.stack([pad(x, (0, 0, longest - x.shape[1], 0)) for x in tokens])

        made = DynamicCache(config=prefix.core.config)
        for number, layer in enumerate(own):
            made.update(*(padded(side) for side in zip(*layer, strict=True)), number)
        lengths = torch.tensor([keys.shape[1] for keys, _ in own[0]], device=prefix.mask.device)
        places = torch.arange(int(lengths.max()), device=prefix.mask.device)
        prefix.cache = made
        prefix.mask = (places >= lengths.max() - lengths[:, None]).to(prefix.mask.dtype)


def begins_with(whole: Tensor, first: Tensor) -> bool:
    """Return whether a tensor begins with another one, padded on other axes than the first or not."""
    return torch.equal(whole[tuple(map(slice, first.shape))], first)


def key_of(request: GenerationRequest) -> Key:
    """Name the conversation of a request."""
    return request.prompt.uid, request.index
