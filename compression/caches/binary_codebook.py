"""The cache `binary_codebook`: prompts as sums of codebook vectors, one bit per vector (our method)."""

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
    """Recipe that stores prompts as bits of codebooks, which are calibrated or fitted to each prompt."""

    first: int
    newest: int
    rounds: int
    codebooks: list[tuple[CalibratedCodebook, CalibratedCodebook]] | None = None  # (keys, values) per layer
    layer: int = 0

    def for_layer(self, layer: int) -> BinaryCodebookRecipe:
        return replace(self, layer=layer)

    def slots(self, visual: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
        """Return positions (-1: padding) of tokens to store exactly (P, n), and to encode (P, 1, n)."""
        rank = real.cumsum(1) - 1
        coded = real & (rank >= self.first) & (rank < real.sum(1, keepdim=True) - self.newest)
        if self.visual:
            coded &= visual
        if self.codebooks is None:
            # Encode only more tokens than channels: otherwise the codebook would be larger than the tokens.
            coded &= coded.sum(1, keepdim=True) > size
        return {"exact": group_slots(real & ~coded).flatten(1), "coded": group_slots(coded)}

    def encode(self, tokens: Tensor, slots: Tensor, side: Side) -> CodebookBlock:
        """Encode the tokens (P, h, n, D) at the slots (P, 1, n): P prompts, h key heads, D channels."""
        if self.codebooks is not None:
            codebook = self.codebooks[self.layer][side == "values"].for_tokens(tokens)
            return CodebookBlock(encode(tokens, codebook), codebook)
        nbits = self.nbits if side == "keys" else self.value_nbits
        mean, vectors, signs = fit(tokens, nbits, valid=(slots >= 0)[..., None], rounds=self.rounds)
        codebook = quantize_codebook(mean, vectors, tokens.dtype)
        # Choose the signs once more, because rounding to 8 bits has changed the vectors.
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
    """Store prompts, or their visual tokens, as sums of codebook vectors, one bit per vector (our method).

    Without `codebook`, the vectors are fitted to each prompt when it is stored. They take `nbits` * D^2 bytes
    per head of D channels, which pays off only for prompts with many more than D tokens. Prompts with at most
    D tokens to code are not quantised, nor are tokens after the prompt.

    Args:
        config: Configuration of the model.
        visual: Mask of the visual tokens, (P, S) bool for P prompts of S tokens; needed for `of: visual`.
        mask: Mask of the tokens that are not padding, (P, S) bool.
        nbits: Bits per element of the keys, in (0, 8], or 16 for exact keys. For example, 1.5 means 1.5
            vectors per channel. Default: 2.
        value_nbits: Bits per element of the values; by default `nbits`.
        of: Tokens to quantise. `prompt`: the whole prompt. `visual`: only its visual tokens.
        codebook: File of the builder `calibrate_codebook` for similar prompts; `nbits` is read from it.
        first: Number of exact tokens at the start of each row; they get most attention (arXiv 2401.18079).
        newest: Number of exact tokens at the end of each row.
        rounds: Number of alternations between fitting the vectors and choosing the bits.
        fused: Whether attention reads the codes directly; otherwise every step decodes them to dense tensors.
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
