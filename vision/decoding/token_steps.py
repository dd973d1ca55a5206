"""Batches of answers with shared prompts, and their forward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.types import Unit
from mmrl.kv_cache.attention_interface import BASES, attention_of
from mmrl.kv_cache.hf_cache import only_attends
from mmrl.vision.decoding.prefill import merge_media, pad_positions, pad_rows, prefill, squeeze_axes
from mmrl.vision.decoding.prefix_tree import Line, Medium, Node, PrefixTree, find_tree, media_of
from mmrl.vision.decoding.tree_reading import read_tree
from mmrl.vision.models.model_families import type_arguments, types_argument
from mmrl.vision.models.processor import EncodedPrompt

# Logit of a token with probability 0; its product with 0 is finite, unlike that of minus infinity.
FORBIDDEN = -1e30


@dataclass(frozen=True, eq=False)
class Suffix:
    """Tokens of a conversation after its prompt: sampled tokens, and the replies between them."""

    ids: Tensor  # (L,); ends with a sampled token, not with a reply
    positions: Tensor  # (A, L) rotary positions on A axes
    chosen: Tensor  # (T,) indices of the sampled tokens in `ids`
    media: Mapping[str, Tensor] = field(default_factory=dict)  # tensors of images and videos in replies

    @staticmethod
    def answer(prompt: EncodedPrompt, ids: Tensor) -> Suffix:
        """Create the suffix of a single answer with token ids (T,), without replies."""
        after = torch.arange(len(ids))
        return Suffix(ids, (prompt.next_position + after).expand(len(prompt.positions), -1), after)


def continued(prompt: EncodedPrompt, ids: Tensor) -> EncodedPrompt:
    """Append the tokens (T,) of an answer to a prompt."""
    if not len(ids):
        return prompt
    positions = torch.cat([prompt.positions, Suffix.answer(prompt, ids).positions], 1)
    return EncodedPrompt(prompt.uid, torch.cat([prompt.ids, ids]), positions, prompt.media)


@dataclass(frozen=True, eq=False)
class TokenRow:
    """The tokens of one rollout; every sampled token is a step.

    Args:
        prompt: The encoded prompt.
        ids: The tokens of the policy (T,), one per step.
        temperature: The sampling temperature.
        chosen: (T,) bool, False for tokens that an engine inserted into the answer, which are not trained on;
            None: the policy sampled all tokens.
        suffix: All tokens after the prompt, for conversations with replies between the sampled tokens;
            tokens of replies are not steps. None: there are no replies.
    """

    prompt: EncodedPrompt
    ids: Tensor
    temperature: float = 1.0
    chosen: Tensor | None = None
    suffix: Suffix | None = None

    @staticmethod
    def of_turns(turns: Sequence[tuple[EncodedPrompt, Tensor]], temperature: float = 1.0) -> TokenRow:
        """Create the row of a conversation from the input and the answer (T,) of every turn.

        Each input begins with the previous turn's input and answer, as from `PromptEncoder.extend`.
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
    """Steps of a batch: the answers of `N` rows, padded to `T` tokens, and their distinct prompts.

    `suffixes[i]` is the suffix of row i, None without replies; `suffixes` is empty if no row has replies.
    `tree` holds the prefixes that rows share beyond their prompts; None if sharing saves too few tokens.
    `unconditional` holds the image parts after the negative prompt (`guidance.py`); None without guidance.
    With `packing`, rows are computed in one sequence without padding (`packed.py`).
    """

    prompts: tuple[EncodedPrompt, ...]
    which: Tensor  # (N,) index of the prompt of every row
    ids: Tensor  # (N, T) token ids of the answers
    length: Tensor  # (N,) number of tokens of every answer
    temperature: Tensor  # (N,) sampling temperature
    suffixes: tuple[Suffix | None, ...] = ()
    tree: PrefixTree | None = None
    unconditional: Any = None
    unit: Unit = Unit.ROW
    packing: bool = False

    def cost(self, rows: Tensor) -> int:
        """Count the tokens computed for some rows, padding included; a shared prefix counts once."""
        apart = self._cost_apart(rows)
        own = min(apart, self.tree.cost(rows.tolist(), padded=not self.packing)) if self.tree else apart
        return own + (self.unconditional.cost(rows) if self.unconditional else 0)

    def _cost_apart(self, rows: Tensor) -> int:
        """Count the tokens computed without a tree: each distinct prompt once, and all answers."""
        distinct = set(self.which[rows].tolist())
        longest = max(len(self.prompts[i].ids) for i in distinct)
        length = self.length[rows]
        if self.suffixes:
            length = torch.tensor([len(self.suffix(row).ids) for row in rows.tolist()])
        if self.packing:
            return sum(len(self.prompts[i].ids) for i in distinct) + int(length.sum())
        return len(distinct) * longest + len(rows) * int(length.max())

    def __getitem__(self, cut: tuple[Tensor, slice]) -> TokenSteps:
        rows, columns = cut
        distinct, which = torch.unique(self.which[rows], return_inverse=True)
        prompts = tuple(self.prompts[i] for i in distinct.tolist())
        suffixes = tuple(self.suffixes[row] for row in rows.tolist()) if self.suffixes else ()
        return TokenSteps(
            prompts,
            which,
            self.ids[rows][:, columns],
            self.length[rows],
            self.temperature[rows],
            suffixes if any(suffixes) else (),
            self.tree and self.tree.select(rows.tolist()),
            self.unconditional and self.unconditional.select(rows),
            packing=self.packing,
        )

    def with_tree(self, core: nn.Module) -> TokenSteps:
        """Add the tree of prefixes that rows share beyond their prompts, if it saves enough tokens.

        `core` is the model without its head.
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
        """The prefix tree if it computes fewer tokens, with padding, than separate prompts; else None."""
        rows = torch.arange(len(self.ids))
        tree = self.tree
        return tree if tree and tree.cost(rows.tolist()) < self._cost_apart(rows) else None

    def distinct_steps(self, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Deduplicate the steps that rows of a tree share, so that their logits are computed once.

        `inside` (N, longest) is the mask of the M steps, False for padding. Returns the index of the first
        occurrence of each of D distinct steps (D,), and for every step the index of its distinct step (M,).
        """
        assert self.tree is not None
        sizes = torch.tensor([0, *map(len, self.tree.nodes)])
        place = where_read(self, self.tree, sizes.cumsum(0).tolist())[inside]
        temperature = self.temperature.unique(return_inverse=True)[1][:, None].expand(inside.shape)[inside]
        key = torch.stack([place, self.ids[:, : self.longest][inside], temperature])
        distinct, each = key.unique(dim=1, return_inverse=True)
        number = torch.arange(len(each))
        first = torch.full((distinct.shape[1],), len(each)).scatter_reduce_(0, each, number, "amin")
        return first, each

    @property
    def longest(self) -> int:
        """Length of the longest answer, at least 1; later columns are padding."""
        return max(1, int(self.length.max()))

    def suffix(self, row: int) -> Suffix:
        """Return the tokens after the prompt of a row, with positions and media."""
        ids = self.ids[row, : int(self.length[row])]
        suffix = self.suffixes[row] if self.suffixes else None
        return suffix or Suffix.answer(self.prompts[int(self.which[row])], ids)

    @property
    def media(self) -> list[Mapping[str, Tensor]]:
        """Media tensors of all prompts and replies."""
        inside = [suffix.media for suffix in self.suffixes if suffix]
        return [*(prompt.media for prompt in self.prompts), *inside]


def distinct_prompts(prompts: Sequence[EncodedPrompt]) -> tuple[tuple[EncodedPrompt, ...], Tensor]:
    """Deduplicate prompts by identity; return distinct prompts, and each prompt's index (N,) among them."""
    distinct = {id(prompt): prompt for prompt in prompts}
    place = {key: i for i, key in enumerate(distinct)}
    return tuple(distinct.values()), torch.tensor([place[id(prompt)] for prompt in prompts])


def read_cached(core: nn.Module, steps: TokenSteps, *, share_prefix: bool = True) -> Tensor:
    """Prefill prompts, run answers, and return the hidden states (N, longest, width) before each token.

    If the steps have a prefix tree that computes fewer tokens, the tree is run instead.
    """
    device = core.get_input_embeddings().weight.device
    if (tree := steps.cheaper_tree) and (result := read_tree(core, tree)):
        states, starts = result
        return states[where_read(steps, tree, starts).to(device)]
    prefix = prefill(core, steps.prompts, share_prefix=share_prefix).select(steps.which.to(device))
    # Inputs are shifted by one: the last token of the prompt predicts the first token of the answer.
    if not steps.suffixes:
        return prefix.read(torch.cat([prefix.last[:, None], steps.ids[:, : steps.longest - 1].to(device)], 1))
    rows = [steps.suffix(row) for row in range(len(steps.ids))]
    ids, chosen = (pad_rows(x, device, "right") for x in ([r.ids for r in rows], [r.chosen for r in rows]))
    positions = pad_positions([row.positions for row in rows], device, "right")  # (A, N, L)
    hidden = prefix.read(
        torch.cat([prefix.last[:, None], ids[:, :-1]], 1),
        torch.cat([prefix.last_position[..., None], positions[..., :-1]], 2),
        merge_media(core, [row.media for row in rows], device),
    )
    return hidden[torch.arange(len(rows), device=device)[:, None], chosen]


def read_whole(core: nn.Module, steps: TokenSteps) -> Tensor:
    """Compute hidden states before each token, with a copy of the prompt per row; works for any model."""
    device = core.get_input_embeddings().weight.device
    lines, where, media = [], [], []
    for row, number in enumerate(steps.which.tolist()):
        prompt, suffix = steps.prompts[number], steps.suffix(row)
        lines.append(_line(prompt, suffix, ()))
        where.append(len(prompt.ids) - 1 + suffix.chosen)
        media += [prompt.media, suffix.media]
    ids, places = (pad_rows(parts, device, "right") for parts in ([x.ids for x in lines], where))
    positions = pad_positions([line.positions for line in lines], device, "right")
    sizes = torch.tensor([len(prompt.ids) for prompt in steps.prompts])[steps.which]
    after = torch.arange(ids.shape[1]) >= sizes[:, None]
    hidden = core(
        input_ids=ids,
        attention_mask=pad_rows([torch.ones_like(line.ids) for line in lines], device, "right"),
        use_cache=False,
        position_ids=squeeze_axes(positions),
        **type_arguments(core.config, ids, after),
        **merge_media(core, media, device),
    ).last_hidden_state
    return hidden[torch.arange(len(lines), device=device)[:, None], places]


def shares_prompts(core: nn.Module, steps: TokenSteps, *, packed: bool) -> bool:
    """Return whether a model can run a prompt once for all its rows: `packed`, or else with a KV cache.

    Packing needs attention with arbitrary masks, which excludes recurrent layers and FlashAttention. Models
    whose mask depends on token types (text or image) support neither packing nor images after the prompt.
    """
    if types_argument(core.config) and (packed or any(suffix.media for suffix in steps.suffixes if suffix)):
        return False
    return not packed or (
        attention_of(core.config) in BASES
        and only_attends(core.config.get_text_config(decoder=True))
        and core._supports_attention_backend
    )


def _line(prompt: EncodedPrompt, suffix: Suffix, media: tuple[Medium, ...]) -> Line:
    """Concatenate a prompt and its suffix without the last token, which is never an input."""
    length = len(prompt.ids) + max(1, len(suffix.ids)) - 1
    ids, positions = torch.cat([prompt.ids, suffix.ids]), torch.cat([prompt.positions, suffix.positions], 1)
    return Line(ids[:length], positions[:, :length], media)


def prompts_and_answers(steps: TokenSteps) -> PrefixTree:
    """Create a tree of depth 2: prompts without their last token, then answers after that token."""
    lines, nodes, paths = [], [], []
    roots: dict[int, int] = {}
    for row, number in enumerate(steps.which.tolist()):
        prompt, suffix = steps.prompts[number], steps.suffix(row)
        before = len(prompt.ids) - 1
        # The range of the media is the whole prompt or answer, because these nodes are not divided further.
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


def where_read(steps: TokenSteps, tree: PrefixTree, starts: Sequence[int]) -> Tensor:
    """Return the index (N, longest) of the state that predicts each token of a row; 0 after the row's end."""
    where = torch.zeros(len(steps.ids), steps.longest, dtype=torch.int64)
    for row, number in enumerate(steps.which.tolist()):
        chosen = steps.suffix(row).chosen
        places = tree.places(row, starts)[len(steps.prompts[number].ids) - 1 :]
        where[row, : len(chosen)] = places[chosen]
    return where
