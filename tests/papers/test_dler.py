"""Limits of length by difficulty: how they fall with accuracy, what they set to 0, and what is restored."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.config.loading import ConfigError
from mmrl.papers.dler import DifficultyLimit, UpdateSelectiveMerge
from tests.support.tables import assert_rows, reward_table


def answers(*rewards, length, **columns):
    return reward_table({"right": rewards, "format": [1] * len(rewards)}, length=length, **columns)


def test_an_answer_beyond_the_limit_of_its_prompt_earns_nothing():
    limit = DifficultyLimit(of="right", shortest=10, longest=50)
    table = answers(1, 1, 1, 0, length=[20, 21, 50, 51], group=["q"] * 4)
    limit.observe((), table)
    assert limit.limits(table).tolist() == [20] * 4  # 10 + 40 (1 - 3/4)
    found = limit(table)
    assert_rows(found.values[:, 0, 0], [1, 0, 0, 0])
    assert found.values[:, 1].eq(1).all()  # other rewards stay
    assert found.scored["right"].equal(table.scored["right"])


def test_prompts_have_limits_of_their_own_and_hard_ones_the_longest():
    limit = DifficultyLimit(of="right", shortest=10, longest=50)
    table = answers(1, 0, 1, None, length=[50, 50, 10, 10], group=["easy", "hard", "easy", "new"])
    limit.observe((), table)
    assert limit.limits(table).tolist() == [10, 50, 10, 50]
    assert_rows(limit(table).values[:3, 0, 0], [0, 0, 1])


def test_accuracy_runs_and_is_restored():
    limit = DifficultyLimit(of="right", shortest=10, longest=50, decay=0.5)
    for reward in (0, 1):  # 0, then .5 * 0 + .5 * 1
        limit.observe((), answers(reward, length=[5], group=["q"]))
    other = DifficultyLimit(of="right", shortest=10, longest=50)
    other.load_state_dict(json.loads(json.dumps(limit.state_dict())))
    assert other.limits(answers(1, length=[5], group=["q"])).tolist() == [30]


def test_a_reward_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no reward called 'right'"):
        DifficultyLimit(of="right")(reward_table([1]))


def test_merging_keeps_the_largest_updates_of_every_tensor(tmp_path):
    weights = {
        "base": {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "n": torch.tensor([7])},
        "trained": {"w": torch.tensor([[1.1, 0.0], [3.5, 4.0]]), "n": torch.tensor([7])},
    }
    for name, tensors in weights.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    models = (str(tmp_path / "base"), str(tmp_path / "trained"))
    UpdateSelectiveMerge(models=models, share=0.5).build(tmp_path / "out")
    merged = load_file(tmp_path / "out/model.safetensors")
    assert merged["w"].tolist() == [[1.0, 0.0], [3.5, 4.0]]  # moves of 2 and 0.5 stay, 0.1 and 0 do not
    UpdateSelectiveMerge(models=models, share=1.0).build(tmp_path / "all")
    assert load_file(tmp_path / "all/model.safetensors")["w"].equal(weights["trained"]["w"])
    with pytest.raises(ConfigError, match="the base and the trained model"):
        UpdateSelectiveMerge(models=models, weights=(0.5, 0.5))
