"""Sums, means and extremes over groups of rows, masked means and padding.

A group is not an axis but a column of ids, so group sizes may differ. Shapes: `M` entries, `V` groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_index(columns: Sequence[Tensor]) -> Tensor:
    """Number the groups of entries with equal ids in every column (M,); returns (M,) int64 from 0."""
    return torch.unique(torch.stack(list(columns)), dim=1, return_inverse=True)[1]


def group_sum(values: Tensor, index: Tensor, num_groups: int | None = None) -> Tensor:
    """Sum the values (M, ...) of each group; returns (V, ...)."""
    size = int(index.max()) + 1 if num_groups is None and index.numel() else num_groups or 0
    return values.new_zeros((size, *values.shape[1:])).index_add(0, index, values)


def group_mean(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Compute the mean of each entry's group over valid entries; 0 without any. All are (M, ...)."""
    valid = valid.to(values.dtype)
    total = group_sum(torch.where(valid > 0, values, 0.0), index)  # not a product: NaN * 0 is NaN
    return (total / group_sum(valid, index).clamp(min=1))[index]  # a group without valid entries: 0 / 1


def group_count(index: Tensor, valid: Tensor) -> Tensor:
    """Count the valid entries of each entry's group."""
    return group_sum(valid.double(), index)[index]


def group_std(values: Tensor, index: Tensor, valid: Tensor, *, unbiased: bool = True) -> Tensor:
    """Compute the standard deviation of each entry's group; 0 for fewer than two valid entries.

    With `unbiased`, divides by the count minus 1 (Bessel), otherwise by the count.
    """
    # In two passes, because E[x^2] - E[x]^2 cancels where values differ little.
    centred = torch.where(valid, values - group_mean(values, index, valid), 0.0)
    count = group_sum(valid.to(values.dtype), index)
    divisor = (count - 1 if unbiased else count).clamp(min=1)
    return (group_sum(centred.square(), index) / divisor).sqrt()[index]


def group_extreme(values: Tensor, index: Tensor, valid: Tensor, largest: bool = True) -> Tensor:
    """Find the largest (or smallest) valid value of each entry's group; -inf (or inf) without any."""
    empty = -torch.inf if largest else torch.inf
    filled = torch.where(valid, values, empty)
    size = int(index.max()) + 1 if index.numel() else 0
    best = values.new_full((size, *values.shape[1:]), empty)
    where = index.view(-1, *[1] * (values.dim() - 1)).expand_as(values)  # (M, ...)
    return best.scatter_reduce(0, where, filled, "amax" if largest else "amin")[index]


def group_range(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Compute the range (maximum - minimum) of valid values in each entry's group, shaped like `values`."""
    return group_extreme(values, index, valid) - group_extreme(values, index, valid, largest=False)


def group_rank(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Rank the values (M, R) in their groups, in ascending order from 0; returns (M, R) int64.

    Ties are ranked in the order of entries; invalid entries come after all others.
    """
    by_value = torch.where(valid, values, torch.inf).argsort(dim=0, stable=True)
    order = by_value.gather(0, index[by_value].argsort(dim=0, stable=True))  # sorted by group, then by value
    size = torch.bincount(index)
    first = (size.cumsum(0) - size)[index][:, None]  # total size of the groups before
    places = torch.arange(len(index))[:, None].expand_as(order)
    return torch.empty_like(order).scatter_(0, order, places) - first


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average `values` where `mask` is 1, over one dimension or all; 0 where the mask is empty."""
    return (values * mask).sum(dim) / mask.sum(dim).clamp(min=1)


def rarity(
    rate: Tensor, known: Tensor, *, alpha: float = 1.0, sigma: float = 0.2, eps: float = 1e-6
) -> Tensor:
    """Weight checks of answers: higher if few answers pass, and if few checks have this pass rate (VeRPO).

    In arXiv 2601.03525, check j with the pass rate p_j has the weight exp(-alpha p_j) / (N_j + eps), where
    N_j = sum_l exp(-(p_j - p_l)^2 / (2 sigma^2)) counts checks of similar difficulty. Shapes are (N, J, K)
    for J checks; checks that are not `known` count in no sum.
    """
    apart = rate[:, :, None] - rate[:, None]
    alike = torch.where(known[:, None], (-apart.square() / (2 * sigma**2)).exp(), 0.0).sum(2)
    return (-alpha * rate).exp() / (alike + eps)


def pad_to(values: Tensor, size: int, dim: int, fill: float = 0.0) -> Tensor:
    """Pad a dimension at its end to `size` with `fill`."""
    missing = size - values.shape[dim]
    if missing <= 0:
        return values
    shape = list(values.shape)
    shape[dim] = missing
    return torch.cat([values, values.new_full(shape, fill)], dim)


def cat_padded(tensors: Sequence[Tensor], fill: float = 0.0) -> Tensor:
    """Concatenate tensors along the first dimension, and pad each other dimension to the longest."""
    sizes = [max(t.shape[dim] for t in tensors) for dim in range(tensors[0].dim())]
    for dim in range(1, len(sizes)):
        tensors = [pad_to(t, sizes[dim], dim, fill) for t in tensors]
    return torch.cat(list(tensors))


def linspace_indices(size: int, num: int) -> list[int]:
    """Choose `num` evenly spaced indices from 0 to `size` - 1, or all of them if `num` is larger."""
    return torch.linspace(0, size - 1, min(num, size)).round().long().tolist()
