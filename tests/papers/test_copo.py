"""COPO: advantages of answers and of prompts, mixed by agreement."""

from __future__ import annotations

import math

from mmrl.papers.copo import consistency_mix
from tests.support.tables import assert_rows, reward_table


def test_consistency_mix_falls_back_on_the_prompt_where_answers_agree():
    rewards = {"reward": [1] * 6 + [1, 1, 1, 0, 0, 0] + [0] * 6, "cluster": [7] * 6 + [7, 7, 7, 3, 3, 5]}
    rewards["cluster"] = [*rewards["cluster"], 1, 2, 3, 4, 5, 6]
    table = reward_table(rewards, weights={"cluster": 0.0}, group="a" * 6 + "b" * 6 + "c" * 6)
    found = consistency_mix(table, of="cluster", threshold=1.5 / math.log(6)).values[:, 0, 0]
    # means 1, 1/2, 0 have the deviation .408248; gates 0, .000057, .997086
    assert_rows(found[:1], [1.224742])
    local = 0.5 / (math.sqrt(0.3) + 1e-6)
    gate = 1 / (1 + math.exp(-20 * (1.0114042647 - 1.5)))
    assert_rows(found[[6, 9]], [gate * local, -gate * local])
    assert_rows(found[12:13], [-1.224742 * (1 - 0.997086)], tolerance=5e-6)


def test_consistency_mix_of_one_prompt_has_no_other_to_compare_with():
    table = reward_table({"reward": [1, 0], "cluster": [1, 1]}, weights={"cluster": 0.0})
    assert consistency_mix(table, of="cluster").values.abs().max() < 1e-5
