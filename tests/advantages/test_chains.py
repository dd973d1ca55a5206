"""The chains of ready variants give the worked numbers of their papers, with the constants of their files."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.loading import read
from mmrl.config.schema import as_piece
from mmrl.core.rng import Stream
from tests.support.configs import method_file
from tests.support.tables import assert_rows, reward_table

AGREEING = {"exact_match": [1, 1, 0, 0], "answer_cluster": [0.1, 0.1, 0.2, 0.3]}
LABEL = {"answer_cluster": 0.0}
LOGP = {"logp": [[-0.5], [-0.7], [-0.6], [-1.2]]}


def right(rewards, **columns):
    return reward_table({"exact_match": rewards}, **columns)


@pytest.mark.parametrize(
    ("name", "table", "wanted"),
    [
        (
            "dvao",
            reward_table({"a": [1, 1, 0, 0], "b": [0.2, 0.4, 0.9, 0.5]}),
            [0.229426, 0.458851, -0.114713, -0.573564],
        ),
        ("mc_grpo", reward_table([0, 0.2, 0.5, 0.9, 1]), [-1.246883, -0.748130, 0, 0.997506, 1.246883]),
        ("mc_grpo", reward_table([1, 0, 0, 0, 1]), [5, 0, 0, 0, 5]),
        ("ngrpo", right([0] * 8), [-0.333332] * 8),
        ("ngrpo", right([1, 1, *[0] * 6]), [1.333331] * 2 + [-0.666665] * 6),
        (
            "a_grae",
            right([1, 0, 0, 0, 1, 1, 1, 0], group="aaaabbbb"),
            [0.749997, *[-0.499998] * 3, *[0.538670] * 3, -3.232023],
        ),
        (
            "adora",
            right([1, 0, 0, 1], length=[300, 250, 100, 200]),
            [0.866024, -0.866024, -0.866024, 0.866024],
        ),
        (
            "adora",
            right([1, 0, 0, 1], length=[120, 250, 100, 110]),
            [0.086602, -0.086602, -0.086602, 0.086602],
        ),
        ("opmd", reward_table([1, 0, 0, 1]), [0.189943, -0.310057, -0.310057, 0.189943]),
        ("opo", reward_table([1, 0, 1, 0], length=[10, 20, 30, 40]), [0.6, -0.4, 0.6, -0.4]),
        (
            "gpg",
            reward_table([1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0], group="aaaabbbbcccc"),
            [1.285714, *[-0.428571] * 3, *[0] * 4, -0.857143, 0.857143, 0.857143, -0.857143],
        ),
        ("pass_at_k", reward_table([0.2, 0.9, 0.5, 0.1]), [0, 1.112970, 0, 0]),
        ("loop", reward_table([1, 0, 0.5, 0.5]), [0.666667, -0.666667, 0, 0]),
        ("grpo_n", reward_table([1, 0, 0, 0]), [0, *[-0.499900] * 3]),
        (
            "canon",
            reward_table([1, 0, 1, 1], notes={"entropy": [[0.9], [0.5], [0.2], [0.7]]}),
            [0.5, -1, 0, 0.5],
        ),
        (
            "seed_grpo",
            reward_table(AGREEING, weights=LABEL, notes=LOGP),
            [0.485858, 0.485858, -0.485858, -0.485858],
        ),
        ("r3_ranking", right([1, 0], notes={"entropy": [[1.0], [2.0]]}), [0.707106, -0.707106]),
    ],
)
def test_a_chain_gives_the_worked_advantages(name, table, wanted):
    for piece in read(method_file(name))["advantage"]:
        table = Pieces(Stream()).make("advantage", as_piece(piece, ""))(table)
    assert_rows(table.values[:, 0, 0], wanted, tolerance=3e-6)


def test_loop_drops_rows_of_small_advantages():
    table = reward_table([1, 0, 0.5, 0.5])
    for piece in read(method_file("loop"))["advantage"]:
        table = Pieces(Stream()).make("advantage", as_piece(piece, ""))(table)
    assert table.learn.equal(torch.tensor([[True], [True], [False], [False]]))
