"""D3S: which rows vary most."""

from __future__ import annotations

import itertools

import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.tokens import keep_steps
from mmrl.papers.d3s import most_varied
from tests.support.tables import reward_table


def kept(table):
    return table.learn[:, 0].tolist()


def test_most_varied_is_the_best_of_all_subsets():
    generator = torch.Generator().manual_seed(0)
    for keep in (1, 2, 3, 5):
        values = torch.randn(7, generator=generator, dtype=torch.float64)
        table = most_varied(reward_table(values.tolist()), keep=keep)
        found = values[torch.tensor(kept(table))]
        best = max(torch.stack(subset).var(unbiased=False) for subset in itertools.combinations(values, keep))
        assert len(found) == keep
        torch.testing.assert_close(found.var(unbiased=False), best)


def test_most_varied_drops_equal_groups_and_keeps_small_ones():
    table = reward_table([1, 2, 3, 0, 0, 0], group="aaabbb")
    assert kept(most_varied(table, keep=4)) == [True] * 3 + [False] * 3
    # over the collection: the largest, and the smallest of the rest
    assert sum(kept(most_varied(table, keep=2, by=()))) == 2


def test_most_varied_keeps_the_two_highest_and_the_two_lowest():
    table = group_normalize(reward_table([1, 1, 0, 0.5, 0, 0, 1, 0]), std="population", eps=1e-6)
    chosen = table.values[:, 0, 0][torch.tensor(kept(most_varied(table, keep=4)))]
    assert len(chosen) == 4 and abs(chosen.var(unbiased=False).item() - 1.163631) < 2e-6


def test_keep_steps_takes_its_share_of_the_steps_that_are_learned_from():
    # four of eight rows are kept, which have 20 of 40 steps: a fifth of these
    rewards = [1, 1, 0, 0.5, 0, 0, 1, 0]
    table = reward_table(rewards, length=[5] * 8, notes={"entropy": [[0.5] * 5] * 8})
    table = most_varied(group_normalize(table), keep=4)
    found = keep_steps(table, of="weighted_entropy", top=0.2, drop=True)
    assert int(found.learn.sum()) == 4
