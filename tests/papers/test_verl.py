"""VERL: how the rank of hidden states grows."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.bonus import capped_bonus
from mmrl.papers.verl import RankVelocity, rank_motion
from tests.support.tables import assert_rows, reward_table

SERIES = [None, 1.0, None, 1.5, 2.0, 2.1]


def test_rank_motion_gives_the_worked_series_of_verl():
    table = reward_table([1.0, 1.0], length=[6, 2], notes={"old/effective_rank": [SERIES, [1.0, 2.0]]})
    found = rank_motion(table)
    assert_rows(found[:1], [[1.65, 0.616667, 0.05]])
    assert found[1].isnan().all()  # too short for an acceleration


def test_rank_velocity_gives_the_worked_bonus_of_verl():
    # means (1.1, 0.3, 0.2) of rank, velocity and acceleration: ranks 1, a, b with
    piece = RankVelocity()
    piece.load_state_dict({"means": torch.tensor([2.0, 0.8, 0.1], dtype=torch.float64), "seen": 1})
    # rank 2.2, velocity 0.9, acceleration 0.15: R0, R1 = R0 + v0, R2 = (2 R0 + v0) / 2 + v1
    v0, v1 = 0.825, 0.975
    first = (3 * 2.2 - v0 - v0 / 2 - v1) / 3
    series = [first, first + v0, first + v0 / 2 + v1]
    notes = {"old/effective_rank": [series] * 3 + [[1.0]]}
    table = piece(reward_table([1.0, 0.2, -1.0, 1.0], length=[3, 3, 3, 1], notes=notes))
    assert_rows(rank_motion(table)[:1], [[2.2, 0.9, 0.15]])
    assert table.at_end("rank_velocity")[:3].tolist() == pytest.approx([0.106307] * 3, abs=2e-6)
    bonus = capped_bonus(table, of="rank_velocity", only_positive=False)
    assert_rows(bonus.values[:, 0], [[1.106307], [0.3], [-0.893693], [1.0]])


def test_rank_velocity_says_nothing_at_first_and_averages_collections():
    piece = RankVelocity()
    table = reward_table([1.0], length=[3], notes={"old/effective_rank": [[1.0, 2.0, 3.0]]})
    assert piece(table).at_end("rank_velocity").isnan().all()
    piece.observe_advantages(table)  # ranks 2, velocities 1 and 1.5, acceleration .5
    assert piece.state_dict()["means"].tolist() == pytest.approx([2.0, 1.25, 0.5])
    piece.observe_advantages(table.note("old/effective_rank", 2 * table.notes["old/effective_rank"]))
    assert piece.state_dict()["means"].tolist() == pytest.approx([2.6, 1.625, 0.65])  # .7 old + .3 new
