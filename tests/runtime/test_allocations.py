"""Bytes of tensors that a computation allocates."""

from __future__ import annotations

import torch
from torch import nn

from mmrl.runtime.allocations import Allocations


def test_what_is_freed_counts_in_the_peak_only_and_views_count_nothing():
    x = torch.ones(1000)  # there before
    with Allocations() as counted:
        y = x * 2  # 4000 bytes
        z = y + 1  # and 4000
        del y
        w = z.view(-1)[:10]
        z.add_(1)
    assert (counted.live, counted.peak) == (4000, 8000)
    del w, z


def test_what_the_backward_pass_needs_lives_until_it_is_done():
    layer, x = nn.Linear(100, 50), torch.ones(20, 100)
    with Allocations() as counted:
        loss = layer(x).relu().sum()
        kept = counted.live
        loss.backward()
        del loss
    assert kept == 4 * 20 * 50 + 4  # the result of relu, and the loss
    assert counted.live == 4 * (100 * 50 + 50)  # gradients
    assert counted.peak >= kept + counted.live - 4
