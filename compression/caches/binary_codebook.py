"""Prompts, or their visual tokens, as sums of vectors, one bit each (ours)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from mmrl.compression.contrib.binary_codebook import MOST, encode, fit, hold
from mmrl.compression.contrib.codebook_block import Signed
from mmrl.compression.contrib.codebook_calibration import Lent, read_books
from mmrl.config.ranges import NonNegativeInt, Range
from mmrl.config.registry import cache
from mmrl.kv_cache.blocks import ExactBlock, collect
from mmrl.kv_cache.hf_cache import make_cache
from mmrl.kv_cache.layers import GrowingTail, Recipe, Stored
from mmrl.kv_cache.layout import Part, PromptLayout
from mmrl.kv_cache.row_groups import group_slots


@dataclass(frozen=True, kw_only=True)
class BinaryCodebookRecipe(Recipe):
    """How the tokens of a prompt are held. `books` of keys and of values; without, every prompt fits its
    own."""

    nbits: float
    value_nbits: float
    visual: bool
    first: int
    newest: int
    rounds: int
    books: tuple[Lent, Lent] | None = None

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Part a prompt (P, h, S, D) into what stays as it came and what becomes bits."""
        places = self._places(layout, keys)
        exact, coded = places["exact"], places["coded"]

        def side(x: Tensor, number: int, nbits: float) -> list[Part]:
            parts = [Part(ExactBlock(collect(x, exact)), exact, name="exact")]
            if coded.shape[1]:
                block = self._block(collect(x, coded), coded, number, nbits)
                parts.append(Part(block, coded, visual=self.visual, name="coded"))
            return parts

        tail = GrowingTail(layout.length)
        return side(keys, 0, self.nbits), side(values, 1, self.value_nbits), tail

    def _block(self, tokens: Tensor, slots: Tensor, number: int, nbits: float) -> ExactBlock | Signed:
        if nbits == 16:
            return ExactBlock(tokens)
        if self.books is not None:
            book = self.books[number].book(tokens)
            return Signed(encode(tokens, book), book)
        mean, vectors, signs = fit(tokens, nbits, valid=(slots >= 0)[:, None, :, None], rounds=self.rounds)
        book = hold(mean, vectors, tokens.dtype)
        return Signed(encode(tokens, book, signs=signs, sweeps=1), book)

    def _places(self, layout: PromptLayout, keys: Tensor) -> Mapping[str, Tensor]:
        """Find the slots of what stays and of what becomes bits, (P, n) each, once for all layers."""
        if not layout.made:
            real = layout.real.cpu()
            rank = real.cumsum(1) - 1
            coded = real & (rank >= self.first) & (rank < real.sum(1, keepdim=True) - self.newest)
            coded &= layout.visual.cpu() if self.visual else True
            if self.books is None:
                # A book of fewer tokens than channels would take more than they do.
                coded &= coded.sum(1, keepdim=True) > keys.shape[-1]
            one = torch.zeros_like(rank)
            for name, flags in (("exact", real & ~coded), ("coded", coded)):
                layout.made[name] = group_slots(flags, one).flatten(1).to(keys.device)
        return layout.made


@cache
def binary_codebook(
    config: Any,
    visual: Tensor | None,
    mask: Tensor | None,
    *,
    nbits: Annotated[float, Range(0, 16, above=True)] | None = None,
    value_nbits: Annotated[float, Range(0, 16, above=True)] | None = None,
    of: Literal["prompt", "visual"] = "prompt",
    book: str = "",
    first: NonNegativeInt = 8,
    newest: NonNegativeInt = 0,
    rounds: NonNegativeInt = 3,
    fused: bool = True,
) -> Any:
    """Hold prompts, or their visual tokens, in any number of bits, as sums of vectors, for one batch (ours).

    A bit says whether a vector is in the sum, so `nbits` of 1.5 are one and a half times as many vectors as
    channels; 2 by default. `value_nbits` gives values other bits than keys; 16 leaves a side as it is. Every
    prompt fits vectors of its own while it is stored, which take `nbits` bytes for every channel squared and
    head: they are for prompts of many more tokens than a head has channels, and rows with fewer stay as they
    came. `book` is a file of `calibrate_codebook` instead, fitted once, for prompts like those it was fitted
    on; it says how many bits there are. The `first` and the `newest` tokens of every row stay as they came
    (the first ones are outliers that everything attends to, arXiv 2401.18079), and so does what comes behind
    the prompt.
    """
    if book and (nbits, value_nbits) != (None, None):
        raise ValueError(
            f"the book '{book}' says how many bits there are; leave `nbits` and `value_nbits` out"
        )
    nbits = 2.0 if nbits is None else nbits
    value_nbits = nbits if value_nbits is None else value_nbits
    for name, number in (("nbits", nbits), ("value_nbits", value_nbits)):
        if not 0 < number <= MOST and number != 16:
            raise ValueError(f"`{name}` must be above 0 and at most {MOST}, or 16, not {number}")
    if of not in ("prompt", "visual"):
        raise ValueError(f"`of` must be prompt or visual, not '{of}'")
    if of == "visual" and visual is None:
        raise ValueError("`visual` must say which tokens are visual; `find_visual` reads it off the ids")
    if min(first, newest, rounds) < 0:
        raise ValueError(f"`first`, `newest` and `rounds` count: 0 or more, not {first}, {newest}, {rounds}")
    recipe = BinaryCodebookRecipe(
        nbits=nbits,
        value_nbits=value_nbits,
        visual=of == "visual",
        first=first,
        newest=newest,
        rounds=rounds,
    )
    if not book:
        return make_cache(config, PromptLayout(visual, mask), recipe, fused=fused)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    recipes = [replace(recipe, books=books) for books in read_books(book, layers)]
    return make_cache(config, PromptLayout(visual, mask), recipes, fused=fused)
