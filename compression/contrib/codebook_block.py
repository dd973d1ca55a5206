"""Tokens as sums of vectors, one bit each, as a block of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from mmrl.compression.contrib.binary_codebook import Book, decode
from mmrl.kv_cache.packed_matmul import dots, mix


@dataclass(frozen=True)
class Signed:
    """Tokens in bits (R, h, n, bytes) of a book. Vectors never meet tokens: queries are multiplied with them
    once, or what bits add up to is."""

    packed: Tensor
    book: Book

    @property
    def nbytes(self) -> int:
        """Measure what is held."""
        return self.packed.numel() + self.book.nbytes

    def dots(self, query: Tensor) -> Tensor:
        """Multiply with queries."""
        low, vectors = self.book.dense(query.dtype)
        found = dots((query @ vectors.mT).flatten(0, 1), self.packed.flatten(0, 1), 1)
        # One number per query: its product with what a token without any bit stands for.
        return found.view(*query.shape[:3], -1).add_(query @ low.mT)

    def mix(self, weights: Tensor) -> Tensor:
        """Add up by weights."""
        low, vectors = self.book.dense(weights.dtype)
        found = mix(weights.flatten(0, 1), self.packed.flatten(0, 1), 1, self.book.many)
        return found.view(*weights.shape[:3], -1) @ vectors + weights.sum(-1, keepdim=True) * low

    def dense(self) -> Tensor:
        """Give back the tokens as near as bits are."""
        return decode(self.packed, self.book)

    def select(self, rows: Tensor) -> Signed:
        """Keep rows, in this order."""
        return replace(self, packed=self.packed[rows], book=self.book.select(rows))
