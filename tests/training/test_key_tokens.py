"""A task in which known tokens alone decide the reward: how much of the credit they get."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.loading import merge, read
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome
from mmrl.training.collect import collect
from mmrl.training.loop import learnable
from tests.support.configs import method_file
from tests.support.toys import toy_run

LENGTH, KEYS, DECOYS = 12, [2, 8], [4, 6, 10]  # places of an answer
RIGHT, WRONG = 1, 2


@per_outcome
def keys_right(prompt: Prompt, outcome: Outcome) -> float:
    """Give 1 to answers with the right tokens at both key places, whatever the others are."""
    tokens = [int(word) for word in outcome.text.split()]
    return float(all(tokens[place] == RIGHT for place in KEYS))


def credit_by_place(folder, name: str, **options) -> torch.Tensor:
    """Make the first advantages of a method, and return the mean size of the credit of every place: (T,).

    Key tokens and decoys are even chances; all others are sampled with a probability above 0.95.
    """
    method = read(method_file(name))
    if engine := method.get("rollout", {}).get("engine"):
        engine[0] = "tests.support.toys:ToyNoting"
        engine[1].update(options)
    changes = {
        "policy": {"name": "tests.support.toys:ToyText", "length": LENGTH},
        "rewards": [f"{__name__}:keys_right"],
        "rollout": {"num_prompts": 4, "num_generations": 8, "max_rounds": 1},
        "report": {"log_completions": False},
    }
    run = toy_run(folder, **merge(method, changes))
    logits = torch.zeros(LENGTH, 6)
    logits[:, 3] = 20.0  # what stands between
    logits[KEYS + DECOYS] = torch.tensor([-20.0, 0.0, 0.0, -20.0, -20.0, -20.0])
    run.policy.table.data.copy_(logits.expand_as(run.policy.table))
    run.stream.step = 1
    batch = learnable(run, collect(run))[2]
    return batch.advantage.abs().mean(0)


def share_of_keys(credit: torch.Tensor) -> float:
    return float(credit[KEYS].sum() / credit.sum())


def test_spo_credits_the_tokens_that_decide_and_grpo_all_alike(tmp_path):
    spo = credit_by_place(tmp_path / "spo", "spo", interval=1, num_probes=32)
    grpo = credit_by_place(tmp_path / "grpo", "grpo")
    assert share_of_keys(grpo) == pytest.approx(len(KEYS) / LENGTH)
    assert share_of_keys(spo) > 0.7  # the rest is the noise of 32 completions
    others = [place for place in range(LENGTH) if place not in KEYS + DECOYS]
    assert not spo[others].any()  # tokens that could hardly be others
    assert spo[10] == 0  # a decoy after which nothing is left to decide


@pytest.mark.slow
def test_more_completions_leave_less_credit_to_chance(tmp_path):
    few, many = (
        share_of_keys(credit_by_place(tmp_path / str(num), "spo", interval=1, num_probes=num))
        for num in (2, 64)
    )
    assert few < many and many > 0.75
