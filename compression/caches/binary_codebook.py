"""The cache `binary_codebook`: prompts as sums of codebook vectors, one bit per vector (ours)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from torch import Tensor

from mmrl.compression.contrib.binary_codebook import (
    MAX_BITS,
    CodebookBlock,
    encode,
    fit,
    quantize_codebook,
)
from mmrl.compression.contrib.codebook_calibration import CalibratedCodebook, read_codebooks
from mmrl.config.ranges import NonNegativeInt, Range
from mmrl.config.registry import cache
from mmrl.kv_cache.hf_cache import make_cache
from mmrl.kv_cache.layers import SplitRecipe
from mmrl.kv_cache.quantization import Side
from mmrl.kv_cache.row_groups import group_slots


@dataclass(frozen=True, kw_only=True)
class BinaryCodebookRecipe(SplitRecipe):
    """Binary codes of a prompt, with calibrated `codebooks` per layer, or codebooks fitted to each prompt."""

    first: int
    newest: int
    rounds: int
    codebooks: list[tuple[CalibratedCodebook, CalibratedCodebook]] | None = None  # of keys and of values
    layer: int = 0

    def for_layer(self, layer: int) -> BinaryCodebookRecipe:
        return replace(self, layer=layer)

    def slots(self, visual: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
        """Find the slots of exact tokens (P, n) and of coded ones, one group (P, 1, n)."""
        rank = real.cumsum(1) - 1
        coded = real & (rank >= self.first) & (rank < real.sum(1, keepdim=True) - self.newest)
        if self.visual:
            coded &= visual
        if self.codebooks is None:
            # A codebook for fewer tokens than channels would be larger than the tokens.
            coded &= coded.sum(1, keepdim=True) > size
        return {"exact": group_slots(real & ~coded).flatten(1), "coded": group_slots(coded)}

    def encode(self, tokens: Tensor, slots: Tensor, side: Side) -> CodebookBlock:
        """Encode the tokens (P, h, n, D) of slots (P, 1, n)."""
        if self.codebooks is not None:
            codebook = self.codebooks[self.layer][side == "values"].for_tokens(tokens)
            return CodebookBlock(encode(tokens, codebook), codebook)
        nbits = self.nbits if side == "keys" else self.value_nbits
        mean, vectors, signs = fit(tokens, nbits, valid=(slots >= 0)[..., None], rounds=self.rounds)
        codebook = quantize_codebook(mean, vectors, tokens.dtype)
        # One more sweep over the fitted signs, because the vectors are rounded to 8 bits.
        return CodebookBlock(encode(tokens, codebook, signs=signs, sweeps=1), codebook)


@cache
def binary_codebook(
    config: Any,
    visual: Tensor | None,
    mask: Tensor | None,
    *,
    nbits: Annotated[float, Range(0, 16, above=True)] | None = None,
    value_nbits: Annotated[float, Range(0, 16, above=True)] | None = None,
    of: Literal["prompt", "visual"] = "prompt",
    codebook: str = "",
    first: NonNegativeInt = 8,
    newest: NonNegativeInt = 0,
    rounds: NonNegativeInt = 3,
    fused: bool = True,
) -> Any:
    """Store prompts, or their visual tokens, as sums of codebook vectors, one bit per vector (ours).

    Without `codebook` the vectors are fitted to each prompt when it is stored. They take `nbits` bytes per
    head and squared channel, so this pays for prompts with many more tokens than a head has channels; shorter
    rows stay exact. Tokens after the prompt are exact.

    Args:
        config: Config of the model.
        visual: Which tokens are visual, (P, S) bool; needed for `of: visual`.
        mask: Which tokens are not padding, (P, S) bool.
        nbits: Bits per number of keys, in (0, 8], or 16 for exact keys; 1.5 means 1.5 vectors per channel. 2
            by default.
        value_nbits: Bits per number of values; `nbits` by default.
        of: Quantise the whole prompt, or its visual tokens only.
        codebook: File of the builder `calibrate_codebook`, fitted on similar prompts; it fixes the bits.
        first: Exact tokens at the start of each row, which get most of the attention (arXiv 2401.18079).
        newest: Exact tokens at the end of each row.
        rounds: Alternations between fitting vectors and bits.
        fused: Attention reads the codes; otherwise every step decodes them to dense tensors.
    """
    if codebook and (nbits, value_nbits) != (None, None):
        raise ValueError(
            f"the codebook '{codebook}' fixes the number of bits; leave `nbits` and `value_nbits` out"
        )
    nbits = 2.0 if nbits is None else nbits
    value_nbits = nbits if value_nbits is None else value_nbits
    for name, number in (("nbits", nbits), ("value_nbits", value_nbits)):
        if not 0 < number <= MAX_BITS and number != 16:
            raise ValueError(f"`{name}` must be above 0 and at most {MAX_BITS}, or 16, not {number}")
    if of == "visual" and visual is None:
        raise ValueError("`of: visual` needs `visual`, the visual tokens; `find_visual` finds them")
    layers = config.get_text_config(decoder=True).num_hidden_layers
    recipe = BinaryCodebookRecipe(
        nbits=nbits, value_nbits=value_nbits, visual=of == "visual", first=first, newest=newest,
        rounds=rounds, codebooks=read_codebooks(codebook, layers) if codebook else None,
    )  # fmt: skip
    return make_cache(config, visual, mask, recipe, fused=fused)
