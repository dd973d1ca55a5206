"""Prefix tree of a batch of rows: a node is a run of tokens, computed once for all its rows.

Rows share tokens beyond their prompt if an engine branches answers, or if every turn of a conversation is a
separate row, whose prompt contains the earlier turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmrl.kv_cache.layout import placeholder_ids
from mmrl.vision.models.model_families import family_of

# A prefix gets its own node if this saves at least SAVED tokens, and at least the fraction GAIN of the tokens
# in and below the node. A node costs one more forward pass, which takes the time of SAVED tokens.
SAVED, GAIN = 64, 0.05
ROOT = -1  # the `parent` of root nodes


@dataclass(frozen=True, eq=False)
class Medium:
    """The tensors of an image or a video, and the range [`first`, `end`) of its tokens in a row."""

    tensors: Mapping[str, Tensor]
    first: int
    end: int


@dataclass(frozen=True, eq=False)
class Line:
    """Model inputs of a row: `ids` (L,), `positions` (A, L) on A axes, and media in token order."""

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
    """Tokens [`begin`, `end`) of `row`, shared by all rows in the node's subtree; `parent` precedes them."""

    begin: int
    end: int
    row: int
    parent: int = ROOT

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """A batch of rows as a prefix tree of tokens; in `nodes`, a parent comes before its children.

    `paths[i]` lists the node indices of row i from the root. The last node may be longer than the row, if the
    row is a prefix of another row.
    """

    lines: tuple[Line, ...]
    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Total number of tokens in all nodes."""
        return sum(map(len, self.nodes))

    def pays(self, tokens: int) -> bool:
        """Return whether the tree saves at least the fraction `GAIN` of the `tokens` computed without it."""
        return self.tokens <= (1 - GAIN) * tokens

    def cost(self, rows: Sequence[int], *, padded: bool = True) -> int:
        """Count the tokens computed for some rows: a node once, padded to the longest node at its depth."""
        sizes: list[dict[int, int]] = []  # for each depth, maps a node to its length
        for row in rows:
            for depth, number in enumerate(self.paths[row]):
                if depth == len(sizes):
                    sizes.append({})
                node = self.nodes[number]
                size = min(node.end, len(self.lines[row])) - node.begin
                sizes[depth][number] = max(size, sizes[depth].get(number, 0))
        if not padded:
            return sum(sum(level.values()) for level in sizes)
        return sum(len(level) * max(level.values()) for level in sizes)

    def select(self, rows: Sequence[int]) -> PrefixTree:
        """Return the subtree of the selected rows, without unused nodes."""
        below: dict[int, list[int]] = {}  # maps a node to the new indices of its rows
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
        """List the node indices of every depth, root nodes first; siblings are adjacent."""
        levels = [[number for number, node in enumerate(self.nodes) if node.parent == ROOT]]
        while levels[-1]:
            children: dict[int, list[int]] = {number: [] for number in levels[-1]}
            for number, node in enumerate(self.nodes):
                if node.parent in children:
                    children[node.parent].append(number)
            levels.append([number for group in children.values() for number in group])
        return levels[:-1]

    def before(self) -> Tensor:
        """Return the mask (n, n) of the nodes that each of n nodes attends to: itself and its ancestors."""
        seen = torch.eye(len(self.nodes), dtype=torch.bool)
        for number, node in enumerate(self.nodes):
            if node.parent != ROOT:
                seen[number] |= seen[node.parent]
        return seen

    def ids(self, number: int) -> Tensor:
        """Return the token ids (L,) of a node."""
        node = self.nodes[number]
        return self.lines[node.row].ids[node.begin : node.end]

    def positions(self, number: int) -> Tensor:
        """Return the positions (A, L) of a node's tokens."""
        node = self.nodes[number]
        return self.lines[node.row].positions[:, node.begin : node.end]

    def media(self, number: int) -> list[Mapping[str, Tensor]]:
        """Return the tensors of the media that begin in a node, in token order."""
        node = self.nodes[number]
        media = self.lines[node.row].media
        return [medium.tensors for medium in media if node.begin <= medium.first < node.end]

    def places(self, row: int, starts: Sequence[int]) -> Tensor:
        """Return the indices (L,) of a row's tokens in concatenated nodes; node i begins at `starts[i]`."""
        parts = [torch.arange(len(self.nodes[number])) + starts[number] for number in self.paths[row]]
        return torch.cat(parts)[: len(self.lines[row])]


def find_tree(lines: Sequence[Line]) -> PrefixTree:
    """Build the prefix tree of rows; only prefixes that save enough tokens (`SAVED`) get a node."""
    keys, nodes, ends = keys_of(lines), [], [ROOT] * len(lines)
    waiting = [(list(range(len(lines))), 0, ROOT)]  # (rows, length of their common prefix, its last node)
    while waiting:
        members, begin, parent = waiting.pop()
        for same in _equal_at(keys, members, begin):
            longest = max(same, key=lambda row: len(keys[row]))
            parting = [_common(keys[longest], keys[row], begin) for row in same]
            parting = [end for end, row in zip(parting, same, strict=True) if end < len(keys[row])]
            end = lines[longest].outside_media(min(parting, default=len(keys[longest])))
            # Without a common prefix that ends outside of images, every row gets its own node.
            for group in [same] if end > begin else [[row] for row in same]:
                first = longest if end > begin else group[0]
                nodes.append(Node(begin, end if end > begin else len(keys[first]), first, parent))
                for row in group:
                    ends[row] = len(nodes) - 1
                if more := [row for row in group if len(keys[row]) > nodes[-1].end]:
                    waiting.append((more, end, len(nodes) - 1))
    return shorten(tuple(lines), nodes, ends)


def shorten(lines: tuple[Line, ...], nodes: Sequence[Node], ends: Sequence[int]) -> PrefixTree:
    """Merge every node that saves too few tokens (`SAVED`) into its children.

    In `nodes`, a parent comes before its children. `ends[i]` is the last node of row i.
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
        moved[number] = after[0]  # rows that end in this node now end in its first child
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
    """Locate the images and videos in tokens (L,), which follow `before` earlier tokens of their row."""
    if not media:
        return []
    family, located, used = family_of(core.config), [], Counter()
    parts = family.split(media) if family.split else []
    if media.keys() != {name for part in parts for name in part}:  # unsplittable tensors are one medium
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
    """Compute keys (L, 1 + A) per row: token id or medium, then position. Equal keys mean equal inputs."""
    keys, contents = [], _MediaContents()
    for line in lines:
        ids = line.ids.clone()
        for medium in line.media:
            # Use the medium's number as the key of all its tokens, including texts between placeholders.
            ids[medium.first : medium.end] -= (contents.number(medium.tensors) + 1) << 32
        where = line.positions
        if where.is_floating_point():  # view the bits as integers, like the ids
            where = where.double().view(torch.int64)
        keys.append(torch.cat([ids[None], where]).T.contiguous())
    return keys


def common_length(one: Line, other: Line) -> int:
    """Return the length of the common prefix of two rows; compare tokens, media and positions."""
    return _common(*keys_of([one, other]), 0)


class _MediaContents:
    """Assigns a number to every medium; media with equal tensors get the same number."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}  # maps `id(tensors)` to the medium's number
        self.alike: dict[tuple, list[tuple[int, Mapping[str, Tensor]]]] = {}
        self.count = 0

    def number(self, tensors: Mapping[str, Tensor]) -> int:
        if id(tensors) not in self.seen:
            self.seen[id(tensors)] = self._compare(tensors)
        return self.seen[id(tensors)]

    def _compare(self, tensors: Mapping[str, Tensor]) -> int:
        # A sample of the values distinguishes most media; only media with equal samples are compared fully.
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
    """Group the rows `members` by the key (token and position) at index `at`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in members:
        groups.setdefault(tuple(keys[row][at].tolist()), []).append(row)
    return list(groups.values())


def _common(one: Tensor, other: Tensor, begin: int) -> int:
    """Return the first index from `begin` on where two key sequences differ, or the shorter length."""
    size = min(len(one), len(other))
    differ = (one[begin:size] != other[begin:size]).any(1)
    return begin + int(differ.int().argmax()) if differ.any() else size
