"""ADORA: which groups keep their advantages."""

from __future__ import annotations

import torch

from mmrl.papers.adora import adora
from tests.support.tables import reward_table


def graded(lengths, finish=("stop",) * 4, **options):
    table = reward_table([1, 0, 0, 1], length=lengths, tags={"finish": list(finish)})
    return adora(table.put(torch.ones_like(table.values)), of="reward", **options).values.flatten().tolist()


def test_adora_keeps_groups_whose_longest_right_answer_beats_the_mean_wrong_one():
    assert graded([300, 250, 100, 200]) == [1] * 4  # 300 > 175
    assert graded([120, 250, 100, 110]) == [0.1] * 4
    assert graded([120, 250, 100, 110], ["stop", "length", "stop", "stop"]) == [1] * 4, "120 > 100"
    assert graded([120, 250, 100, 110], ["stop", "length", "length", "stop"]) == [0.1] * 4
    assert graded([300, 250, 100, 200], threshold=1.01) == [1] * 4, "none is right"
    assert graded([300, 250, 100, 200], threshold=1.01, no_success="scale") == [0.1] * 4
