"""ETR: widths of clip ranges, worked out by hand."""

from __future__ import annotations

import torch

from mmrl.papers.etr import variance_width
from tests.support.tables import assert_rows, reward_table


def test_widths_grow_with_advantage_and_variance():
    # |A| and p: (1, 1/2), (2, 1/2), (1, 1/8) and (0, 0) of the worked example
    for size, rewards, wanted in [
        (1.0, [1, 0], 0.375),
        (2.0, [1, 0], 0.45),
        (3.0, [1, 0], 0.45),
        (1.0, [1, *[0] * 7], 0.304688),
        (0.0, [0, 0], 0.2),
    ]:
        table = reward_table(rewards)
        found = variance_width(table.put(torch.full_like(table.values, size)), of="reward")
        assert_rows(0.2 * found.notes["clip_low"], [wanted] * len(rewards))
        assert found.notes["clip_high"].equal(found.notes["clip_low"])
        assert found.values.eq(size).all() and set(found.scored) == {"reward"}
