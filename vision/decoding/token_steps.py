"""Batches of answers to shared prompts, and the ways of running them through a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.core.types import Unit
from mmrl.kv_cache.attention_interface import BASES, attention_of
from mmrl.kv_cache.hf_cache import attention_types, only_attends
from mmrl.vision.decoding.prefill import merge_media, prefill, squeeze_axes
from mmrl.vision.decoding.prefix_tree import (
    ROOT,
    Line,
    Medium,
    Node,
    PrefixTree,
    find_tree,
    media_of,
)
from mmrl.vision.decoding.tree_reading import pad_nodes, read_tree
from mmrl.vision.models.model_families import family_of, type_arguments
from mmrl.vision.models.processor import EncodedPrompt

# A logit of probability 0; unlike minus infinity, its product with that probability is finite.
FORBIDDEN = -1e30


@dataclass(frozen=True, eq=False)
class Suffix:
    """The tokens after the prompt of a conversation: those that the policy chose, and replies between them.

    `ids` (L,) end with a chosen token, rotary `positions` are (A, L), `chosen` (T,) are the indices of the
    policy's tokens, `media` are the tensors of the replies' images and videos.
    """

    ids: Tensor
    positions: Tensor
    chosen: Tensor
    media: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def answer(prompt: EncodedPrompt, ids: Tensor) -> Suffix:
        """Make the suffix of an answer (T,) without replies."""
        after = torch.arange(len(ids))
        return Suffix(ids, (prompt.next_position + after).expand(len(prompt.positions), -1), after)


@dataclass(frozen=True, eq=False)
class TokenRow:
    """The steps of one rollout: its encoded prompt, its tokens (T,), and the sampling temperature.

    `chosen` (T,) is False for tokens that an engine wrote into the answer, which are not learned; None: all
    are the policy's. In a conversation, `suffix` has the replies that stand between the tokens; they are no
    steps.
    """

    prompt: EncodedPrompt
    ids: Tensor
    temperature: float = 1.0
    chosen: Tensor | None = None
    suffix: Suffix | None = None

    @staticmethod
    def of_turns(turns: Sequence[tuple[EncodedPrompt, Tensor]], temperature: float = 1.0) -> TokenRow:
        """Make the row of a conversation from its turns: what the policy read, and the tokens it then chose.

        What is read in a turn starts with all of the turn before it, as `PromptEncoder.extend` makes it.
        """
        (prompt, _), (read, last) = turns[0], turns[-1]
        ids, before = torch.cat([ids for _, ids in turns]), len(prompt.ids)
        if len(turns) == 1:
            return TokenRow(prompt, ids, temperature)
        end = Suffix.answer(read, last)
        media = {name: value[len(prompt.media.get(name, ())) :] for name, value in read.media.items()}
        suffix = Suffix(
            torch.cat([read.ids[before:], last]),
            torch.cat([read.positions[:, before:], end.positions], 1),
            torch.cat([len(read.ids) - before + torch.arange(len(ids)) for read, ids in turns]),
            {name: value for name, value in media.items() if len(value)},
        )
        return TokenRow(prompt, ids, temperature, suffix=suffix)


@dataclass(frozen=True, eq=False)
class TokenSteps:
    """The steps of a batch: the answers of `N` rows, padded to `T` tokens, and their distinct prompts.

    `suffixes` (N) are those of the rows' conversations; it is empty where no row has one. `tree` has the
    beginnings that rows share beyond their prompts, None where there are few: see `with_tree`.
    """

    prompts: tuple[EncodedPrompt, ...]
    which: Tensor  # (N,) index of the prompt of every row
    ids: Tensor  # (N, T)
    length: Tensor  # (N,)
    temperature: Tensor  # (N,) sampling temperature
    suffixes: tuple[Suffix | None, ...] = ()
    tree: PrefixTree | None = None
    unit: Unit = Unit.ROW

    def cost(self, rows: Tensor) -> int:
        """Count tokens with padding: what rows share once, every answer with the replies inside it."""
        apart = self._cost_apart(rows)
        return min(apart, self.tree.cost(rows.tolist())) if self.tree else apart

    def _cost_apart(self, rows: Tensor) -> int:
        """Count tokens without a tree: every distinct prompt once, and answers."""
        distinct = set(self.which[rows].tolist())
        longest = max(len(self.prompts[i].ids) for i in distinct)
        length = self.length[rows]
        if self.suffixes:
            length = torch.tensor([len(self.suffix(row).ids) for row in rows.tolist()])
        return len(distinct) * longest + len(rows) * int(length.max())

    def __getitem__(self, cut: tuple[Tensor, slice]) -> TokenSteps:
        rows, columns = cut
        distinct, which = torch.unique(self.which[rows], return_inverse=True)
        prompts = tuple(self.prompts[i] for i in distinct.tolist())
        kept = tuple(self.suffixes[row] for row in rows.tolist()) if self.suffixes else ()
        return TokenSteps(
            prompts,
            which,
            self.ids[rows][:, columns],
            self.length[rows],
            self.temperature[rows],
            kept if any(kept) else (),
            self.tree and self.tree.select(rows.tolist()),
        )

    def with_tree(self, core: nn.Module) -> TokenSteps:
        """Find the beginnings that rows share beyond their prompts, for a model without its head.

        They are kept where they save a good part of the tokens that are computed.
        """
        media = [media_of(core, prompt.ids, prompt.media) for prompt in self.prompts]
        lines = []
        for row, number in enumerate(self.which.tolist()):
            prompt, suffix = self.prompts[number], self.suffix(row)
            shown = media_of(core, suffix.ids, suffix.media, len(prompt.ids))
            lines.append(_line(prompt, suffix, (*media[number], *shown)))
        sizes = [len(prompt.ids) for prompt in self.prompts]
        answers = (len(line) - sizes[i] for line, i in zip(lines, self.which.tolist(), strict=True))
        tree = find_tree(lines)
        return replace(self, tree=tree if tree.pays(sum(sizes) + sum(answers)) else None)

    @property
    def cheaper_tree(self) -> PrefixTree | None:
        """The tree, where its nodes have fewer tokens than prompts and answers, with the padding of both."""
        rows = torch.arange(len(self.ids))
        return self.tree if self.tree and self.cost(rows) < self._cost_apart(rows) else None

    def distinct_steps(self, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Find the steps that rows of a tree share: the first of each (D,), and which each step is (M,).

        `inside` (N, longest) marks the M steps.
        """
        assert self.tree is not None
        sizes = torch.tensor([0, *map(len, self.tree.nodes)])
        place = _where(self, self.tree, sizes.cumsum(0).tolist())[inside]
        temperature = self.temperature.unique(return_inverse=True)[1][:, None].expand(inside.shape)[inside]
        key = torch.stack([place, self.ids[:, : self.longest][inside], temperature])
        distinct, each = key.unique(dim=1, return_inverse=True)
        number = torch.arange(len(each))
        first = torch.full((distinct.shape[1],), len(each)).scatter_reduce_(0, each, number, "amin")
        return first, each

    @property
    def longest(self) -> int:
        """Length of the longest answer; later columns are padding."""
        return max(1, int(self.length.max()))

    def suffix(self, row: int) -> Suffix:
        """Get what follows the prompt in a row."""
        ids = self.ids[row, : int(self.length[row])]
        known = self.suffixes[row] if self.suffixes else None
        return known or Suffix.answer(self.prompts[int(self.which[row])], ids)

    @property
    def media(self) -> list[Mapping[str, Tensor]]:
        """The media tensors of prompts and of replies."""
        inside = [suffix.media for suffix in self.suffixes if suffix]
        return [*(prompt.media for prompt in self.prompts), *inside]


def distinct_prompts(prompts: Sequence[EncodedPrompt]) -> tuple[tuple[EncodedPrompt, ...], Tensor]:
    """Deduplicate prompts by identity: the distinct ones, and (N,) the index of every entry among them."""
    distinct = {id(prompt): prompt for prompt in prompts}
    place = {key: i for i, key in enumerate(distinct)}
    return tuple(distinct.values()), torch.tensor([place[id(prompt)] for prompt in prompts])


def read_cached(core: nn.Module, steps: TokenSteps, *, share_prefix: bool = True) -> Tensor:
    """Prefill the prompts, then run all answers: (N, longest, width) states, each predicting a token.

    Where the steps have a tree that is cheaper, its nodes are run instead.
    """
    device = core.get_input_embeddings().weight.device
    if (tree := steps.cheaper_tree) and (found := read_tree(core, tree)):
        states, starts = found
        return states[_where(steps, tree, starts).to(device)]
    prefix = prefill(core, steps.prompts, share_prefix=share_prefix).select(steps.which.to(device))
    # The inputs are shifted by one: the last token of the prompt predicts the first of the answer.
    if not steps.suffixes:
        return prefix.read(torch.cat([prefix.last[:, None], steps.ids[:, : steps.longest - 1].to(device)], 1))
    rows = [steps.suffix(row) for row in range(len(steps.ids))]

    def padded(sequences: list[Tensor]) -> Tensor:
        return pad_sequence(sequences, batch_first=True).to(device)

    ids, chosen = padded([row.ids for row in rows]), padded([row.chosen for row in rows])
    positions = padded([row.positions.T for row in rows]).permute(2, 0, 1)  # (A, N, L)
    hidden = prefix.read(
        torch.cat([prefix.last[:, None], ids[:, :-1]], 1),
        torch.cat([prefix.last_position[..., None], positions[..., :-1]], 2),
        merge_media([row.media for row in rows], device),
    )
    return hidden[torch.arange(len(rows), device=device)[:, None], chosen]


def read_packed(core: nn.Module, steps: TokenSteps) -> Tensor:
    """Run every prompt packed with all its answers in one sequence, without a cache.

    Gradient checkpointing needs it: a layer that is computed anew must not write to a cache again. The mask
    lets a token attend to those before it in its own row, so the result is that of `read_cached`; states
    after the end of a row are arbitrary.
    """
    device = core.get_input_embeddings().weight.device
    tree = steps.tree or _prompts_and_answers(steps)
    roots = list(range(len(tree.nodes)))  # of every node
    for number, node in enumerate(tree.nodes):
        roots[number] = number if node.parent == ROOT else roots[node.parent]
    packs: dict[int, list[int]] = {}
    for number, root in enumerate(roots):
        packs.setdefault(root, []).append(number)
    sizes = [sum(len(tree.nodes[number]) for number in pack) for pack in packs.values()]
    starts = [0] * len(tree.nodes)
    for place, (size, pack) in enumerate(zip(sizes, packs.values(), strict=True)):
        at = (place + 1) * max(sizes) - size  # padded on the left
        for number in pack:
            starts[number], at = at, at + len(tree.nodes[number])

    def packed(part: Callable[[int], Tensor]) -> Tensor:
        return pad_nodes([torch.cat([part(number) for number in pack]) for pack in packs.values()], device)

    ids, positions = packed(tree.ids), packed(lambda number: tree.positions(number).T).permute(2, 0, 1)
    owner = packed(lambda number: torch.full((len(tree.nodes[number]),), number))
    index = packed(lambda number: torch.arange(tree.nodes[number].begin, tree.nodes[number].end))
    mask = packed(lambda number: torch.ones(len(tree.nodes[number]), dtype=torch.bool))
    media = [tensors for pack in packs.values() for number in pack for tensors in tree.media(number)]
    hidden = core(
        input_ids=ids,
        attention_mask=_masks(
            layer_windows(core.config), tree.before().to(device), owner, index, mask, _added_to(core)
        ),
        use_cache=False,
        position_ids=squeeze_axes(positions.contiguous()),
        **merge_media(media, device),
    ).last_hidden_state
    return hidden.flatten(0, 1)[_where(steps, tree, starts).to(device)]


def read_whole(core: nn.Module, steps: TokenSteps) -> Tensor:
    """Run every row with a copy of its prompt, without a cache: for any model, at the cost of all tokens."""
    device = core.get_input_embeddings().weight.device
    lines, where, media = [], [], []
    for row, number in enumerate(steps.which.tolist()):
        prompt, suffix = steps.prompts[number], steps.suffix(row)
        lines.append(_line(prompt, suffix, ()))
        where.append(len(prompt.ids) - 1 + suffix.chosen)
        media += [prompt.media, suffix.media]
    ids, places = (pad_nodes(parts, device, "right") for parts in ([x.ids for x in lines], where))
    positions = pad_nodes([line.positions.T for line in lines], device, "right").permute(2, 0, 1)
    hidden = core(
        input_ids=ids,
        attention_mask=pad_nodes([torch.ones_like(line.ids) for line in lines], device, "right"),
        use_cache=False,
        position_ids=squeeze_axes(positions.contiguous()),
        **type_arguments(core.config, ids),
        **merge_media(media, device),
    ).last_hidden_state
    return hidden[torch.arange(len(lines), device=device)[:, None], places]


def shares_prompts(core: nn.Module, steps: TokenSteps, *, packed: bool) -> bool:
    """Whether a model reads the rows of a prompt after one copy of it, `packed` with them or with a cache.

    Only layers that attend by a mask of any form can be packed, which those with a recurrent state and
    FlashAttention do not; and images after the prompt need the types of tokens.
    """
    if family_of(core.config).types and (packed or any(suffix.media for suffix in steps.suffixes if suffix)):
        return False
    return not packed or (
        attention_of(core.config) in BASES
        and only_attends(core.config.get_text_config(decoder=True))
        and core._supports_attention_backend
    )


def _line(prompt: EncodedPrompt, suffix: Suffix, media: tuple[Medium, ...]) -> Line:
    """Join a prompt and what follows it; its last token is predicted, but never an input."""
    length = len(prompt.ids) + max(1, len(suffix.ids)) - 1
    ids, positions = torch.cat([prompt.ids, suffix.ids]), torch.cat([prompt.positions, suffix.positions], 1)
    return Line(ids[:length], positions[:, :length], media)


def _prompts_and_answers(steps: TokenSteps) -> PrefixTree:
    """Make a tree of prompts, and of answers that each start with the prompt's last token."""
    lines, nodes, paths = [], [], []
    roots: dict[int, int] = {}
    for row, number in enumerate(steps.which.tolist()):
        prompt, suffix = steps.prompts[number], steps.suffix(row)
        before = len(prompt.ids) - 1
        # All media of a prompt are in its own node, wherever.
        media = (
            Medium(prompt.media, 0, before),
            Medium(suffix.media, before + 1, before + 1 + len(suffix.ids)),
        )
        lines.append(_line(prompt, suffix, media))
        if number not in roots:
            roots[number] = len(nodes)
            nodes.append(Node(0, before, row))
        paths.append((roots[number], len(nodes)))
        nodes.append(Node(before, len(lines[-1]), row, roots[number]))
    return PrefixTree(tuple(lines), tuple(nodes), tuple(paths))


def _where(steps: TokenSteps, tree: PrefixTree, starts: Sequence[int]) -> Tensor:
    """Find the states that predict the tokens of rows: (N, longest), 0 after the end of a row."""
    where = torch.zeros(len(steps.ids), steps.longest, dtype=torch.int64)
    for row, number in enumerate(steps.which.tolist()):
        chosen = steps.suffix(row).chosen
        places = tree.places(row, starts)[len(steps.prompts[number].ids) - 1 :]
        where[row, : len(chosen)] = places[chosen]
    return where


def _masks(
    windows: dict[str, int | None],
    before: Tensor,
    owner: Tensor,
    index: Tensor,
    mask: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor | dict[str, Tensor]:
    """Make the attention mask (P, 1, S, S), by type of layer where there are several.

    Owners (nodes), indices and padding are (P, S); `before` (n, n) says which nodes a node reads. A token
    attends to earlier tokens of those, within the window of the layer.
    """
    size = owner.shape[1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=owner.device).tril()
    seen = before[owner[:, :, None], owner[:, None, :]]  # (P, S, S): query, key
    # A padded token attends to itself: the softmax of a row without any key would be NaN.
    alone = torch.eye(size, dtype=torch.bool, device=owner.device) & ~mask[:, :, None]
    allowed = (earlier & seen & mask[:, None, :]) | alone
    distance = index[:, :, None] - index[:, None, :]  # (P, S, S), as if each row stood alone
    masks = {
        name: (allowed if window is None else allowed & (distance < window))[:, None]
        for name, window in windows.items()
    }
    if dtype is not None:  # eager attention adds the mask
        lowest = torch.finfo(dtype).min
        masks = {
            name: torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, lowest)
            for name, allowed in masks.items()
        }
    return masks if len(masks) > 1 else masks.popitem()[1]


def _added_to(core: nn.Module) -> torch.dtype | None:
    """The type of attention scores that a mask is added to; None: a mask says what is attended to."""
    return core.dtype if attention_of(core.config) == "eager" else None


def layer_windows(config: Any) -> dict[str, int | None]:
    """Map the types of layers, full and sliding attention, to their windows in tokens; None: unlimited."""
    text = config.get_text_config(decoder=True)
    types = attention_types(text)
    window = text.sliding_window if "sliding_attention" in types else None
    windows = {"full_attention": None, "sliding_attention": window}
    return {name: windows[name] for name in types}
