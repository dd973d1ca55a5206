"""Second models that learn: critics and process rewards, by hand, in training, and resumed."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.normalize import batch_normalize
from mmrl.advantages.values import gae, lambda_returns, value_baseline
from mmrl.build import check
from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, ConfigError, Piece, parse
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput, Totals
from mmrl.papers.prime import process_returns
from mmrl.rewards.adapters import per_outcome
from mmrl.runtime.checkpoint import CheckpointError
from mmrl.training.checkpointing import resume
from mmrl.training.loop import train
from tests.support.tables import assert_rows, reward_table
from tests.support.toys import plan, toy_run

pytestmark = pytest.mark.usefixtures("no_page")

VALUES = {"critic/value": [[0.5, 0.6, 0.55, 0.7], [0.5, 0.6, 0.55, 0.7]]}
TAGS = {"finish": [["length"], ["stop"]]}
CRITIC = {
    "name": "second_model",
    "policy": "tests.support.toys:ToyCritic",
    "advantage": ["total", {"name": "lambda_returns", "lam": 1.0}],
    "objective": "value_regression",
    "learning_rate": 0.1,
}
TEXT = "tests.support.toys:ToyText"
PPO = {"advantage": ["total", {"name": "gae", "lam": 1.0}], "references": {"critic": CRITIC}}
PRM = {
    "name": "second_model",
    "advantage": [{"name": "pick", "of": "share_right"}],
    "objective": {"name": "comparison", "implicit_reward": "log_ratio", "compare": ["cross_entropy"]},
    "learning_rate": 0.05,
    "learns_first": True,
}
PRIME = {
    "advantage": ["total", "process_returns", "batch_normalize"],
    "references": {"ref": "frozen", "prm": PRM},
}


# ---- numbers by hand


def table(rewards):
    return reward_table(rewards, length=[4, 4], ends=[[4], [4]], notes=VALUES, tags=TAGS)


def test_an_answer_that_was_cut_takes_the_last_value_for_what_follows():
    # EX-45 of T-PPO: cut, and finished with reward 1.
    found = gae(table([0.0, 1.0]), bootstrap=True).values[:, 0]
    assert_rows(found, [[0.187875, 0.0925, 0.15, 0.0], [0.445087, 0.36325, 0.435, 0.3]], 1e-6)


def test_returns_are_advantages_plus_values_and_with_lambda_1_the_rewards_that_came():
    rewarded = table([0.25, 1.0])
    found = lambda_returns(rewarded, lam=0.9).values - gae(rewarded, lam=0.9).values
    assert_rows(found[:, 0], VALUES["critic/value"])
    assert_rows(lambda_returns(rewarded, lam=1.0).values[:, 0], [[0.25] * 4, [1.0] * 4])
    # Two steps on, the reward 1 is worth gamma^2.
    discounted = lambda_returns(rewarded, gamma=0.5, lam=1.0).values[1, 0]
    assert_rows(discounted[None], [[0.125, 0.25, 0.5, 1.0]])


def test_rewards_of_earlier_outcomes_are_those_of_their_last_steps():
    rewarded = reward_table(
        [[1.0, 2.0]], length=[4], ends=[[2, 4]], notes={"critic/value": [[0.0, 0.0, 0.0, 0.0]]}
    )
    assert_rows(gae(rewarded, lam=1.0).values[:, 0], [[3.0, 3.0, 2.0, 2.0]])
    assert_rows(gae(rewarded, lam=0.0).values[:, 0], [[0.0, 1.0, 0.0, 2.0]])


def test_the_value_of_the_prompt_is_a_baseline():
    assert_rows(value_baseline(table([0.0, 1.0])).values[:, 0], [[-0.5], [0.5]])


def test_process_rewards_of_two_answers():
    # EX-52 of PRIME; the second answer has two steps.
    notes = {"prm/logp": [[0.2, -0.1, 0.3], [-0.2, 0.1]], "ref/logp": [[0.0, 0.0, 0.0], [0.0, 0.0]]}
    rewarded = reward_table([1.0, 0.0], length=[3, 2], ends=[[3], [2]], notes=notes)
    credit = process_returns(rewarded, coef=1.0)
    assert_rows(credit.values[:, 0], [[1.55, 1.233333, 1.516667], [-1.366667, -0.883333]], 1e-6)
    whitened = batch_normalize(credit, eps=1e-8).values[:, 0]
    assert_rows(whitened, [[0.804522, 0.581044, 0.780998], [-1.253831, -0.912733]], 1e-6)


def test_a_reward_model_is_paid_for_outcomes():
    compare = Pieces(Stream()).make("compare", Piece("cross_entropy"))
    gained = torch.tensor([[0.2, -0.1, 0.3], [-0.2, 0.1, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    outcome = torch.tensor([1.0, 0.0], dtype=torch.float64)[:, None] * mask
    batch = Batch(torch.zeros(2, dtype=torch.int64), mask, None, outcome, mask, totals=Totals(rows=2.0))
    # EX-52: 0.683197 and 0.690650
    assert float(compare(gained, batch)) == pytest.approx((0.683197 + 0.690650) / 2, abs=1e-6)


@pytest.mark.parametrize(("limit", "wanted"), [(None, 0.5 * 0.25), (0.1, 0.5 * 0.81)])
def test_a_value_that_moved_far_costs_as_if_it_had_not(limit, wanted):
    made = Pieces(Stream()).make("objective", Piece("value_regression", {"cliprange_value": limit}))
    one = torch.ones(1, 1, dtype=torch.float64)
    old = StepOutput(0 * one, {"value": 0.0 * one})
    batch = Batch(torch.zeros(1, dtype=torch.int64), one, None, one, one, others={"old": old})
    # The target is 1: 0.5 is 0.5 away, 0.1 (the limit) is 0.9 away.
    loss, _ = made(StepOutput(0 * one, {"value": 0.5 * one}), batch)
    assert float(loss) == pytest.approx(wanted)


# ---- in training


@per_outcome
def asked(prompt, outcome) -> float:
    """Pay what the prompt asks for, whatever the answer."""
    return float(prompt.target)


def test_a_critic_learns_what_its_policy_earns(tmp_path):
    run = toy_run(tmp_path, **PPO, learn={"learning_rate": 0.0}, max_steps=120, rewards=[f"{__name__}:asked"])
    train(run)
    steps = run.journal.read()
    assert steps[0]["critic/squared_error"] > 1.0
    assert steps[-1]["critic/squared_error"] < 0.1
    values = run.seconds["critic"].policy.table[:, 0, 0]  # before the first step of each prompt
    assert torch.allclose(values.detach(), torch.tensor([1.0, 2, 3, 4, 5, 1, 2, 3]), atol=0.3)


@pytest.mark.slow
def test_policies_learn_with_a_critic_and_with_process_rewards(tmp_path):
    for name, changes in (("ppo", PPO), ("prime", PRIME)):
        run = toy_run(tmp_path / name, **changes, max_steps=40)
        train(run)
        rewards = [step["rewards/share_right/mean"] for step in run.journal.read()]
        assert sum(rewards[-5:]) / 5 > rewards[0] + 0.2, name


@pytest.mark.parametrize("changes", [PPO, PRIME], ids=["ppo", "prime"])
def test_a_step_of_which_no_group_is_left_learns_nothing(tmp_path, changes):
    # All answers of a group earn the same.
    rewards = [{"name": f"{__name__}:asked", "label": "share_right"}]
    run = toy_run(tmp_path, **changes, rewards=rewards, group_filter="varied", max_steps=2)
    before = run.policy.table.detach().clone()
    train(run)
    assert [step["frac_groups_kept"] for step in run.journal.read()] == [0.0, 0.0]
    assert torch.equal(run.policy.table, before)


@per_outcome
def planted(prompt, outcome) -> float:
    """Pay for one token alone: the first of the answer."""
    return float(outcome.text.split()[:1] == [str(prompt.target)])


@pytest.mark.slow
def test_process_rewards_find_the_planted_key_token(tmp_path):
    objective = {**PRM["objective"], "compare": [{"name": "cross_entropy", "beta": 1.0}]}
    chain = [{"name": "pick", "of": "planted"}]
    prm = {**PRM, "policy": {"name": TEXT, "num": 4}, "advantage": chain, "objective": objective}
    run = toy_run(
        tmp_path,
        **{**PRIME, "references": {"ref": "frozen", "prm": prm}},
        policy={"name": TEXT, "num": 4},
        data={"name": "tests.support.toys:prompts", "num": 4},
        rewards=[f"{__name__}:planted"],
        rollout={"num_generations": 32},
        learn={"learning_rate": 0.0},  # the policy stays as it is: only the reward model learns
        max_steps=60,
    )
    train(run)
    shift = run.seconds["prm"].policy.table.log_softmax(-1) - run.policy.table.log_softmax(-1)
    varies = shift.detach().std(-1)  # (prompts, places): how much the reward depends on the token
    assert (varies[:, 0] > 3 * varies[:, 1:].amax(-1)).all(), varies
    assert shift[:, 0].argmax(-1).tolist() == [1, 2, 3, 4]  # what is asked for


def test_a_critic_is_resumed_bit_for_bit(tmp_path):
    whole = toy_run(tmp_path / "whole", **PPO, max_steps=6, save_steps=2)
    train(whole)
    half = toy_run(tmp_path / "half", **PPO, max_steps=4, save_steps=2)
    train(half)
    again = toy_run(tmp_path / "half", **PPO, max_steps=6, save_steps=2)
    train(again)
    for name in ("policy", "references"):
        first, second = (
            (run.policy if name == "policy" else run.seconds["critic"].policy).table for run in (whole, again)
        )
        assert torch.equal(first, second)
    assert (tmp_path / "whole" / "checkpoint-6" / "references" / "critic" / "model.safetensors").is_file()
    moments = [run.seconds["critic"].optimizer.state_dict()["state"][0]["exp_avg"] for run in (whole, again)]
    assert torch.equal(*moments) and moments[0].abs().sum() > 0


# ---- wrong configurations


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"references": {}}, "the advantage chain reads \\['critic'\\]"),
        ({"references": {"critic": "frozen"}}, "reads \\['value'\\] of the policy"),
        (
            {"references": {"critic": {**CRITIC, "policy": "tests.support.toys:ToyText"}}},
            "second model 'critic'",
        ),
        ({"rollout": {"policy": "critic"}}, "a model that learns of its own, which cannot sample"),
    ],
)
def test_what_cannot_be_a_critic_is_named(tmp_path, changes, said):
    raw = {**plan(tmp_path), **PPO}
    raw["rollout"] = {**raw["rollout"], **changes.get("rollout", {})}
    raw["references"] = changes.get("references", raw["references"])
    with pytest.raises(ConfigError, match=said):
        config = parse(raw, Config)
        check(config)
        train(toy_run(tmp_path, **{**PPO, **changes}))


def test_a_critic_is_carried_into_another_run(tmp_path):
    first = toy_run(tmp_path / "first", **PPO, max_steps=3)
    train(first)
    start = {"init_from": str(tmp_path / "first"), "carry": ["references"]}
    second = toy_run(tmp_path / "second", **PPO, **start, max_steps=3)
    resume(second)
    tables = [run.seconds["critic"].policy.table for run in (first, second)]
    assert torch.equal(*tables) and tables[0].any()


def test_a_critic_that_the_other_run_lacks_cannot_be_carried(tmp_path):
    train(toy_run(tmp_path / "first", references={"critic": "frozen"}, max_steps=1))
    run = toy_run(
        tmp_path / "second", **PPO, init_from=str(tmp_path / "first"), carry=["references"], max_steps=1
    )
    with pytest.raises(CheckpointError, match="cannot carry references over"):
        train(run)
