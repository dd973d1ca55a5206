"""Operations are counted where they are made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from mmrl.core.flop_counter import CountOperations
from mmrl.core.onednn import onednn


def counted(call):
    with torch.no_grad(), CountOperations() as count:
        call()
    return count.total["all"]


def test_matrices_count_two_for_every_product():
    # (3, 4) times (4, 5): 15 numbers of 4 products and 4 additions each.
    assert counted(lambda: torch.ones(3, 4) @ torch.ones(4, 5)) == 2 * 15 * 4
    # The same seven times over, with a bias, which is not counted.
    assert counted(lambda: nn.Linear(4, 5)(torch.ones(7, 3, 4))) == 7 * 120
    assert counted(lambda: torch.ones(7, 3, 5).baddbmm_(torch.ones(7, 3, 4), torch.ones(7, 4, 5))) == 840
    assert counted(lambda: torch.ones(3, 4) * 2) == 0


def test_attention_counts_what_rows_see():
    # 2 rows, 4 heads of 8 channels, 5 queries on 6 keys: 30 pairs, of 8 products for a score and 8 for a sum.
    q, kv = torch.ones(2, 4, 5, 8), torch.ones(2, 4, 6, 8)
    assert counted(lambda: scaled_dot_product_attention(q, kv, kv)) == 2 * 4 * 30 * 2 * 16
    # Causal over 5 keys: 1 + 2 + 3 + 4 + 5 = 15 pairs.
    assert counted(lambda: scaled_dot_product_attention(q, q, q, is_causal=True)) == 2 * 4 * 15 * 2 * 16
    mask = torch.zeros(5, 6)
    assert counted(lambda: scaled_dot_product_attention(q, kv, kv, mask)) == 2 * 4 * 30 * 2 * 16


@pytest.mark.parametrize(("groups", "wanted"), [(1, 2 * 36 * 2 * 9 * 6), (2, 2 * 36 * 9 * 6)])
def test_convolutions_count_their_weights_at_every_place(groups, wanted):
    # 6 channels out of 2, windows of 3 by 3, at 6 by 6 places.
    layer = nn.Conv2d(2, 6, 3, groups=groups)
    assert counted(lambda: layer(torch.ones(1, 2, 8, 8))) == wanted


def test_a_transposed_convolution_spreads_every_number_it_reads():
    # 4 by 4 numbers of 2 channels, each spread over 3 by 3 places of 6 channels.
    layer = nn.ConvTranspose2d(2, 6, 3)
    assert counted(lambda: layer(torch.ones(1, 2, 4, 4))) == 2 * 16 * 2 * 9 * 6


def test_the_innermost_name_gets_the_count():
    where = ["outside"]
    with CountOperations(where) as count:
        torch.ones(1, 1) @ torch.ones(1, 1)
        where.append("inside")
        torch.ones(1, 2) @ torch.ones(2, 1)
    assert count.total == {"outside": 2, "inside": 4}


def test_layers_through_onednn_count_as_others_do():
    layer = nn.Linear(256, 300)
    with onednn(layer, pack=True):
        assert counted(lambda: layer(torch.ones(2, 5, 256))) == 2 * 10 * 256 * 300
