"""Common beginnings of rows, found by content: a tree whose nodes are computed once for all rows below.

Rows share tokens beyond their prompt where an engine lets answers part from each other, and where a
conversation is written as a row per turn: the prompt of a turn holds the turns before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmrl.kv_cache.layout import placeholder_ids
from mmrl.vision.models.model_families import family_of

# A beginning is shared where that saves as many tokens, and such a share of all tokens below it. It costs a
# pass over all layers for its tokens alone, which takes about as long as this many tokens in a longer pass.
SAVED, GAIN = 64, 0.05
ROOT = -1  # the parent of a node that begins rows


@dataclass(frozen=True, eq=False)
class Medium:
    """The tensors of an image or a video, and the range of tokens from its first to its last."""

    tensors: Mapping[str, Tensor]
    first: int
    end: int


@dataclass(frozen=True, eq=False)
class Line:
    """What a model reads of a row: `ids` (L,), `positions` (A, L) and media in the order of their tokens."""

    ids: Tensor
    positions: Tensor
    media: tuple[Medium, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def outside_media(self, at: int) -> int:
        """Find the last place up to `at` that cuts no medium in two."""
        for medium in reversed(self.media):
            if medium.first < at < medium.end:
                at = medium.first
        return at


@dataclass(frozen=True)
class Node:
    """Tokens `begin` to `end` of `row`, and of all rows below; they follow those of the node `parent`."""

    begin: int
    end: int
    row: int
    parent: int = ROOT

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Rows, and the nodes that they consist of; a node comes after its parent.

    `paths` (N) are the nodes of every row; the last of them may go on after the row's end.
    """

    lines: tuple[Line, ...]
    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all nodes."""
        return sum(map(len, self.nodes))

    def pays(self, tokens: int) -> bool:
        """Return whether it is worth its passes, against so many tokens without it."""
        return self.tokens <= (1 - GAIN) * tokens

    def cost(self, rows: Sequence[int]) -> int:
        """Count the tokens of the nodes of rows, each once, with the padding of nodes of one depth."""
        sizes: list[dict[int, int]] = []  # of nodes, by depth
        for row in rows:
            for depth, number in enumerate(self.paths[row]):
                if depth == len(sizes):
                    sizes.append({})
                node = self.nodes[number]
                size = min(node.end, len(self.lines[row])) - node.begin
                sizes[depth][number] = max(size, sizes[depth].get(number, 0))
        return sum(len(level) * max(level.values()) for level in sizes)

    def select(self, rows: Sequence[int]) -> PrefixTree:
        """Keep rows, in this order, with the nodes that they need."""
        below: dict[int, list[int]] = {}  # rows in their new order, by node
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
        """List the nodes by depth, those of one parent together."""
        levels = [[number for number, node in enumerate(self.nodes) if node.parent == ROOT]]
        while levels[-1]:
            children: dict[int, list[int]] = {number: [] for number in levels[-1]}
            for number, node in enumerate(self.nodes):
                if node.parent in children:
                    children[node.parent].append(number)
            levels.append([number for group in children.values() for number in group])
        return levels[:-1]

    def before(self) -> Tensor:
        """Tell which nodes a node reads, itself among them: (n, n) bool."""
        seen = torch.eye(len(self.nodes), dtype=torch.bool)
        for number, node in enumerate(self.nodes):
            if node.parent != ROOT:
                seen[number] |= seen[node.parent]
        return seen

    def ids(self, number: int) -> Tensor:
        """Get the tokens of a node: (L,)."""
        node = self.nodes[number]
        return self.lines[node.row].ids[node.begin : node.end]

    def positions(self, number: int) -> Tensor:
        """Get the positions of a node: (A, L)."""
        node = self.nodes[number]
        return self.lines[node.row].positions[:, node.begin : node.end]

    def media(self, number: int) -> list[Mapping[str, Tensor]]:
        """List the tensors of the media that begin in a node, in the order of their tokens."""
        node = self.nodes[number]
        media = self.lines[node.row].media
        return [medium.tensors for medium in media if node.begin <= medium.first < node.end]

    def places(self, row: int, starts: Sequence[int]) -> Tensor:
        """Find the tokens of a row (L,) among those of nodes, of which each begins at one of `starts`."""
        parts = [torch.arange(len(self.nodes[number])) + starts[number] for number in self.paths[row]]
        return torch.cat(parts)[: len(self.lines[row])]


def find_tree(lines: Sequence[Line]) -> PrefixTree:
    """Make the tree of all common beginnings that are worth a node of their own: see `SAVED`."""
    keys, nodes, ends = keys_of(lines), [], [ROOT] * len(lines)
    waiting = [(list(range(len(lines))), 0, ROOT)]  # rows that agree up to a token, and the node before it
    while waiting:
        members, begin, parent = waiting.pop()
        for same in _equal_at(keys, members, begin):
            longest = max(same, key=lambda row: len(keys[row]))
            parting = [_common(keys[longest], keys[row], begin) for row in same]
            parting = [end for end, row in zip(parting, same, strict=True) if end < len(keys[row])]
            end = lines[longest].outside_media(min(parting, default=len(keys[longest])))
            # Nothing but a part of an image is common: every row has one of its own.
            for group in [same] if end > begin else [[row] for row in same]:
                first = longest if end > begin else group[0]
                nodes.append(Node(begin, end if end > begin else len(keys[first]), first, parent))
                for row in group:
                    ends[row] = len(nodes) - 1
                if more := [row for row in group if len(keys[row]) > nodes[-1].end]:
                    waiting.append((more, end, len(nodes) - 1))
    return shorten(tuple(lines), nodes, ends)


def shorten(lines: tuple[Line, ...], nodes: Sequence[Node], ends: Sequence[int]) -> PrefixTree:
    """Leave short beginnings to what follows them, where sharing saves little: see `SAVED`.

    Nodes come after their parents, and `ends` are the last nodes of rows.
    """
    kept, size = list(nodes), [len(node) for node in nodes]  # size: of a node with all below it
    children: dict[int, list[int]] = {number: [] for number in range(ROOT, len(nodes))}
    for number in reversed(range(len(nodes))):
        parent = nodes[number].parent
        children[parent].insert(0, number)
        if parent != ROOT:
            size[parent] += size[number]
    moved: dict[int, int] = {}
    for number in range(len(nodes)):
        node, after = kept[number], children[number]
        saved = (len(after) - 1) * len(node)
        if not after or (len(after) > 1 and saved >= max(SAVED, GAIN * size[number])):
            continue
        for child in after:
            kept[child] = replace(kept[child], begin=node.begin, parent=node.parent)
            size[child] += len(node)
        children[node.parent].remove(number)
        children[node.parent] += after
        moved[number] = after[0]  # rows that end inside go with any of those that follow
    order = [number for number in range(len(nodes)) if number not in moved]
    new = {ROOT: ROOT} | {number: i for i, number in enumerate(order)}
    paths = []
    for end in ends:
        while end in moved:
            end = moved[end]
        path = [end]
        while (parent := kept[path[-1]].parent) != ROOT:
            path.append(parent)
        paths.append(tuple(new[number] for number in reversed(path)))
    found = tuple(replace(kept[number], parent=new[kept[number].parent]) for number in order)
    return PrefixTree(lines, found, tuple(paths))


def media_of(core: nn.Module, ids: Tensor, media: Mapping[str, Tensor], before: int = 0) -> list[Medium]:
    """Find the images and videos among tokens (L,), which follow `before` others."""
    if not media:
        return []
    family, found, taken = family_of(core.config), [], Counter()
    parts = family.split(media) if family.split else []
    if media.keys() != {name for part in parts for name in part}:  # they stay together
        places = torch.isin(ids, ids.new_tensor(placeholder_ids(core.config))).nonzero()[:, 0].tolist()
        first, last = (places[0], places[-1]) if places else (0, len(ids) - 1)
        return [Medium(media, before + first, before + last + 1)]
    for tensors in parts:
        ((token, number),) = family.features(core, tensors).items()
        places = (ids == token).nonzero()[taken[token] : taken[token] + number, 0] + before
        found.append(Medium(tensors, int(places[0]), int(places[-1]) + 1))
        taken[token] += number
    return sorted(found, key=lambda medium: medium.first)


def keys_of(lines: Sequence[Line]) -> list[Tensor]:
    """Make keys (L, 1 + A) that are equal where tokens are: ids, or what media show, and positions."""
    keys, known = [], _Known()
    for line in lines:
        ids = line.ids.clone()
        for medium in line.media:
            # All tokens from the first to the last, so that nothing inside is taken for another medium.
            ids[medium.first : medium.end] -= (known.number(medium.tensors) + 1) << 32
        keys.append(torch.cat([ids[None], line.positions]).T.contiguous())
    return keys


def common_length(one: Line, other: Line) -> int:
    """Count the first tokens of two rows that are equal, with what they show and their positions."""
    first, second = keys_of([one, other])
    return _common(first, second, 0)


class _Known:
    """Numbers media by what their tensors hold; one that was numbered before is found by identity."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.alike: dict[tuple, list[tuple[int, Mapping[str, Tensor]]]] = {}
        self.count = 0

    def number(self, tensors: Mapping[str, Tensor]) -> int:
        if id(tensors) not in self.seen:
            self.seen[id(tensors)] = self._compare(tensors)
        return self.seen[id(tensors)]

    def _compare(self, tensors: Mapping[str, Tensor]) -> int:
        # A few numbers tell most media apart; all of them are compared where these are equal.
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
    """Group rows by their token at a place."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in members:
        groups.setdefault(tuple(keys[row][at].tolist()), []).append(row)
    return list(groups.values())


def _common(one: Tensor, other: Tensor, begin: int) -> int:
    """Find the first token from `begin` on at which keys differ, or the length of the shorter."""
    size = min(len(one), len(other))
    differ = (one[begin:size] != other[begin:size]).any(1)
    return begin + int(differ.int().argmax()) if differ.any() else size
