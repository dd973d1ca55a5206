"""AdaR1 (arXiv 2504.21659): preference pairs between and within styles of thinking.

Title: AdaR1: From Long-CoT to Hybrid-CoT via Bi-Level Adaptive Reasoning Optimization
Formula: long thinking is preferred where acc_long - acc_short > margin; pairs (preferred, other) and
(shortest, longest right).
Our reading: one pair of each kind per prompt; answers are sampled during training, and a label tells their
style.
"""

from __future__ import annotations

import torch

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage
def bilevel_pairs(
    table: RewardTable,
    *,
    of: str,
    short: str,
    margin: NonNegativeFloat = 0.0,
    threshold: float = 0.5,
) -> RewardTable:
    """Prefer a style for each prompt, and short right answers within it (AdaR1, arXiv 2504.21659).

    Long thinking is preferred where its share of right answers exceeds that of the short style by more than
    `margin`, else the short style. A pair across styles is an answer of the preferred style and one of the
    other; a pair within it is its shortest and its longest right answer. Each is a group of its own, and all
    other rows are dropped. Our reading: one pair of each kind per prompt; the pair within comes first, the
    one across takes the first right answer that is left, or the first one, and the other style's first.

    Args:
        of: Name of the reward that says whether an answer is right.
        short: Name of the label that is above one half for answers of the short style, such as `skip_ratio`.
        margin: Advantage in accuracy that long thinking needs.
        threshold: An answer is right where the reward is larger than this.
    """
    right, style = table.at_end(of) > threshold, table.at_end(short)
    known = table.learn.any(-1) & ~table.at_end(of).isnan() & ~style.isnan()
    pair, across = torch.zeros(len(table), dtype=torch.float64), torch.zeros(len(table), dtype=torch.bool)
    for group in table.group[known].unique():
        inside = known & (table.group == group)
        long, brief = inside & (style <= 0.5), inside & (style > 0.5)
        share = [float(right[rows].double().mean()) if rows.any() else -1.0 for rows in (long, brief)]
        chosen, other = (long, brief) if share[0] - max(share[1], 0.0) > margin else (brief, long)
        good = (chosen & right).nonzero()[:, 0]
        good = good[table.length[good].argsort(stable=True)]
        if len(good) > 1 and table.length[good[0]] < table.length[good[-1]]:
            pair[good[0]], pair[good[-1]] = 1.0, -1.0
        left = (chosen & (pair == 0)).nonzero()[:, 0]
        if len(left) and other.any():
            first = left[right[left].long().argmax()]  # the first right one, else the first
            against = other.nonzero()[0, 0]
            pair[first], pair[against] = 1.0, -1.0
            across[first] = across[against] = True
    # The last bit tells the two pairs of a prompt apart; ids are hashes of 63 bits.
    ids = {**table.ids, "group": table.ids["group"] ^ across.long()[:, None]}
    answer = torch.arange(table.ends.shape[1]) == table.last[:, None]  # (N, K)
    values = (pair[:, None] * answer)[:, None].expand_as(table.values)
    return table.replace(values=values, ids=ids, learn=table.learn & (pair != 0)[:, None])
