"""PAV: progress under the prover."""

from __future__ import annotations

from mmrl.papers.pav import process_advantage
from tests.support.tables import assert_rows, prefix_rewards


def test_pav_adds_the_progress_under_the_prover():
    # Q = .5; the prover's value goes from .4 to .6, then to the reward itself
    table = process_advantage(prefix_rewards([0.4, 0.6, 0.5]), alpha=3.0)
    assert_rows(table.values[:, 0], [[1.1, 0.5 - 0.3]])
    assert table.ends.tolist() == [[1, 2]]
