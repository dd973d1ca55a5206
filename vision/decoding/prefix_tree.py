"""Prefix tree of the rows of a batch: a node is a run of tokens, computed once for all rows below.

Rows share tokens beyond their prompt where an engine branches answers, and where every turn of a conversation
is a row of its own, whose prompt contains the earlier turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmrl.kv_cache.layout import placeholder_ids
from mmrl.vision.models.model_families import family_of

# A prefix gets its own node if that saves at least SAVED tokens and the share GAIN of all tokens below it. A
# node costs a forward pass of its own, which takes about as long as SAVED tokens in a longer pass.
SAVED, GAIN = 64, 0.05
ROOT = -1  # the parent of a root node


@dataclass(frozen=True, eq=False)
class Medium:
    """The tensors of an image or a video, and the range of its tokens."""

    tensors: Mapping[str, Tensor]
    first: int
    end: int


@dataclass(frozen=True, eq=False)
class Line:
    """The model inputs of a row: `ids` (L,), `positions` (A, L), and media in the order of their tokens."""

    ids: Tensor
    positions: Tensor
    media: tuple[Medium, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def outside_media(self, at: int) -> int:
        """Return the last index up to `at` that is not inside an image or video."""
        for medium in reversed(self.media):
            if medium.first < at < medium.end:
                at = medium.first
        return at


@dataclass(frozen=True)
class Node:
    """Tokens `begin` to `end` of `row` and of all rows below, after the tokens of the node `parent`."""

    begin: int
    end: int
    row: int
    parent: int = ROOT

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """A batch of rows, and the nodes that they share; a node comes after its parent.

    `paths[i]` lists the nodes of row i from the root; the last node may be longer than the row.
    """

    lines: tuple[Line, ...]
    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of all nodes."""
        return sum(map(len, self.nodes))

    def pays(self, tokens: int) -> bool:
        """Whether the tree saves enough, compared with `tokens` without it."""
        return self.tokens <= (1 - GAIN) * tokens

    def cost(self, rows: Sequence[int]) -> int:
        """Number of tokens to compute for some rows: every node once, padded to the longest of its depth."""
        sizes: list[dict[int, int]] = []  # by depth, node to its length
        for row in rows:
            for depth, number in enumerate(self.paths[row]):
                if depth == len(sizes):
                    sizes.append({})
                node = self.nodes[number]
                size = min(node.end, len(self.lines[row])) - node.begin
                sizes[depth][number] = max(size, sizes[depth].get(number, 0))
        return sum(len(level) * max(level.values()) for level in sizes)

    def select(self, rows: Sequence[int]) -> PrefixTree:
        """Index rows, with the nodes that they need."""
        below: dict[int, list[int]] = {}  # node to new row numbers
        for place, row in enumerate(rows):
            for number in self.paths[row]:
                below.setdefault(number, []).append(place)
        lines, new = tuple(self.lines[row] for row in rows), {ROOT: ROOT}
        nodes = []
        for number in sorted(below):
            longest, node = max(below[number], key=lambda place: len(lines[place])), self.nodes[number]
            new[number] = len(nodes)
            end = min(node.end, len(lines[longest]))
            nodes.append(replace(node, end=end, row=longest, parent=new[node.parent]))
        ends = [new[self.paths[row][-1]] for row in rows]
        return shorten(lines, nodes, ends)

    def levels(self) -> list[list[int]]:
        """List the nodes by depth, with siblings side by side."""
        levels = [[number for number, node in enumerate(self.nodes) if node.parent == ROOT]]
        while levels[-1]:
            children: dict[int, list[int]] = {number: [] for number in levels[-1]}
            for number, node in enumerate(self.nodes):
                if node.parent in children:
                    children[node.parent].append(number)
            levels.append([number for group in children.values() for number in group])
        return levels[:-1]

    def before(self) -> Tensor:
        """Mask of the nodes that every node attends to, itself included: (n, n) bool."""
        seen = torch.eye(len(self.nodes), dtype=torch.bool)
        for number, node in enumerate(self.nodes):
            if node.parent != ROOT:
                seen[number] |= seen[node.parent]
        return seen

    def ids(self, number: int) -> Tensor:
        """Token ids of a node (L,)."""
        node = self.nodes[number]
        return self.lines[node.row].ids[node.begin : node.end]

    def positions(self, number: int) -> Tensor:
        """Positions of a node (A, L)."""
        node = self.nodes[number]
        return self.lines[node.row].positions[:, node.begin : node.end]

    def media(self, number: int) -> list[Mapping[str, Tensor]]:
        """Tensors of the media that begin in a node, in the order of their tokens."""
        node = self.nodes[number]
        media = self.lines[node.row].media
        return [medium.tensors for medium in media if node.begin <= medium.first < node.end]

    def places(self, row: int, starts: Sequence[int]) -> Tensor:
        """Indices of the tokens of a row (L,) in concatenated nodes, where node i begins at `starts[i]`."""
        parts = [torch.arange(len(self.nodes[number])) + starts[number] for number in self.paths[row]]
        return torch.cat(parts)[: len(self.lines[row])]


def find_tree(lines: Sequence[Line]) -> PrefixTree:
    """Find all common prefixes of rows that are long enough for a node of their own, see `SAVED`."""
    keys, nodes, ends = keys_of(lines), [], [ROOT] * len(lines)
    waiting = [(list(range(len(lines))), 0, ROOT)]  # rows, the length of their common prefix, its last node
    while waiting:
        members, begin, parent = waiting.pop()
        for same in _equal_at(keys, members, begin):
            longest = max(same, key=lambda row: len(keys[row]))
            parting = [_common(keys[longest], keys[row], begin) for row in same]
            parting = [end for end, row in zip(parting, same, strict=True) if end < len(keys[row])]
            end = lines[longest].outside_media(min(parting, default=len(keys[longest])))
            # If only a part of an image is common, every row gets its own node.
            for group in [same] if end > begin else [[row] for row in same]:
                first = longest if end > begin else group[0]
                nodes.append(Node(begin, end if end > begin else len(keys[first]), first, parent))
                for row in group:
                    ends[row] = len(nodes) - 1
                if more := [row for row in group if len(keys[row]) > nodes[-1].end]:
                    waiting.append((more, end, len(nodes) - 1))
    return shorten(tuple(lines), nodes, ends)


def shorten(lines: tuple[Line, ...], nodes: Sequence[Node], ends: Sequence[int]) -> PrefixTree:
    """Merge nodes into their children where sharing saves too little, see `SAVED`.

    Nodes come after their parents; `ends` are the last nodes of rows.
    """
    changed, size = list(nodes), [len(node) for node in nodes]  # size: tokens of a node and all below it
    children: dict[int, list[int]] = {number: [] for number in range(ROOT, len(nodes))}
    for number in reversed(range(len(nodes))):
        parent = nodes[number].parent
        children[parent].insert(0, number)
        if parent != ROOT:
            size[parent] += size[number]
    moved: dict[int, int] = {}
    for number in range(len(nodes)):
        node, after = changed[number], children[number]
        saved = (len(after) - 1) * len(node)
        if not after or (len(after) > 1 and saved >= max(SAVED, GAIN * size[number])):
            continue
        for child in after:
            changed[child] = replace(changed[child], begin=node.begin, parent=node.parent)
            size[child] += len(node)
        children[node.parent].remove(number)
        children[node.parent] += after
        moved[number] = after[0]  # rows that end inside go to any child
    order = [number for number in range(len(nodes)) if number not in moved]
    new = {ROOT: ROOT} | {number: i for i, number in enumerate(order)}
    paths = []
    for end in ends:
        while end in moved:
            end = moved[end]
        path = [end]
        while (parent := changed[path[-1]].parent) != ROOT:
            path.append(parent)
        paths.append(tuple(new[number] for number in reversed(path)))
    remaining = (changed[number] for number in order)
    merged = tuple(replace(node, parent=new[node.parent]) for node in remaining)
    return PrefixTree(lines, merged, tuple(paths))


def media_of(core: nn.Module, ids: Tensor, media: Mapping[str, Tensor], before: int = 0) -> list[Medium]:
    """Locate the images and videos of tokens (L,) that follow `before` other tokens of their row."""
    if not media:
        return []
    family, located, used = family_of(core.config), [], Counter()
    parts = family.split(media) if family.split else []
    if media.keys() != {name for part in parts for name in part}:  # they cannot be split
        places = torch.isin(ids, ids.new_tensor(placeholder_ids(core.config))).nonzero()[:, 0].tolist()
        first, last = (places[0], places[-1]) if places else (0, len(ids) - 1)
        return [Medium(media, before + first, before + last + 1)]
    for tensors in parts:
        ((token, number),) = family.features(core, tensors).items()
        places = (ids == token).nonzero()[used[token] : used[token] + number, 0] + before
        located.append(Medium(tensors, int(places[0]), int(places[-1]) + 1))
        used[token] += number
    return sorted(located, key=lambda medium: medium.first)


def keys_of(lines: Sequence[Line]) -> list[Tensor]:
    """Content keys (L, 1 + A): token id or media content, then position. Equal keys, equal model input."""
    keys, contents = [], _MediaContents()
    for line in lines:
        ids = line.ids.clone()
        for medium in line.media:
            # All tokens of the range, so that two media never differ only outside their placeholders.
            ids[medium.first : medium.end] -= (contents.number(medium.tensors) + 1) << 32
        keys.append(torch.cat([ids[None], line.positions]).T.contiguous())
    return keys


def common_length(one: Line, other: Line) -> int:
    """Length of the common prefix of two rows, compared by tokens, media and positions."""
    return _common(*keys_of([one, other]), 0)


class _MediaContents:
    """Numbers media by content; equal tensors get equal numbers."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}  # by identity
        self.alike: dict[tuple, list[tuple[int, Mapping[str, Tensor]]]] = {}
        self.count = 0

    def number(self, tensors: Mapping[str, Tensor]) -> int:
        if id(tensors) not in self.seen:
            self.seen[id(tensors)] = self._compare(tensors)
        return self.seen[id(tensors)]

    def _compare(self, tensors: Mapping[str, Tensor]) -> int:
        # A sample of the numbers tells most media apart; tensors with equal samples are compared.
        sample = tuple(
            (name, tuple(x.shape), tuple(x.flatten()[:: max(1, x.numel() // 64)].tolist()))
            for name, x in sorted(tensors.items())
        )
        alike = self.alike.setdefault(sample, [])
        for number, others in alike:
            if all(torch.equal(value, others[name]) for name, value in tensors.items()):
                return number
        self.count += 1
        alike.append((self.count, tensors))
        return self.count


def _equal_at(keys: Sequence[Tensor], members: Sequence[int], at: int) -> list[list[int]]:
    """Group rows by their key at an index."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in members:
        groups.setdefault(tuple(keys[row][at].tolist()), []).append(row)
    return list(groups.values())


def _common(one: Tensor, other: Tensor, begin: int) -> int:
    """First index from `begin` on at which two keys differ, or the length of the shorter."""
    size = min(len(one), len(other))
    differ = (one[begin:size] != other[begin:size]).any(1)
    return begin + int(differ.int().argmax()) if differ.any() else size
