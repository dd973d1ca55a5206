"""Second models that predict success: PAV's verifier of prefixes, and V_0's value of a prompt."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.prefixes import mean_by_end
from mmrl.advantages.values import value_label, value_targets
from mmrl.build import check
from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, ConfigError, Piece, parse
from mmrl.core.reward_table import ABSENT
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput, Totals
from mmrl.papers.pav import process_advantage, verifier_values
from mmrl.papers.v05 import shrunk_mean
from mmrl.rewards.adapters import per_outcome
from mmrl.training.collect import collect
from mmrl.training.loop import learnable, train
from tests.support.tables import assert_rows, reward_table
from tests.support.toys import plan, toy_run

pytestmark = pytest.mark.usefixtures("no_page")

VALUED = {
    "name": "second_model",
    "policy": {"name": "tests.support.toys:ToyCritic", "probability": True},
    "advantage": ["total", "mean_by_end", "value_targets"],
    "objective": "value_cross_entropy",
    "learning_rate": 0.1,
}
ENGINES = [
    "tests.support.toys:ToyGenerate",
    {"name": "vision.with_prefix_rollouts", "cut": "token", "interval": 1, "num_probes": 4, "at_start": True},
]
PAV = {
    "advantage": ["total", "mean_by_end", "verifier_values", "process_advantage", "group_center"],
    "references": {"verifier": VALUED},
    "rollout": {"engine": [ENGINES[0], {**ENGINES[1], "share": 0.5}], "num_generations": 4},
}
V0 = {
    "sampler": ["uniform", {"name": "allocate", "value_model": "v0", "at_most": 6}],
    "references": {"v0": {**VALUED, "advantage": ["total", "value_targets"]}},
}


# ---- numbers by hand


def test_a_verifier_learns_the_mean_reward_after_each_prefix():
    # Row 0: the bare prompt completed once, its first two tokens twice; row 1: an answer alone; row 2: a
    # prefix that was not completed.
    table = reward_table(
        [[0.25, 1.0, 0.0, 1.0], [0.75], [None, 0.5]],
        length=[4, 2, 3],
        ends=[[0, 2, 2, 4], [2], [1, 3]],
    )
    targets = value_targets(table)
    assert targets.learn.int().tolist() == [[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert targets.valid[:, 0].tolist() == targets.learn.tolist()
    assert_rows(targets.values[:2, 0], [[0.25, 0.0, 0.5], [0.75]])
    assert targets.ends.tolist() == [[1, 2, 3, 4], [1, 2, ABSENT, ABSENT], [1, 2, 3, ABSENT]]
    best = value_targets(mean_by_end(table, best=True))
    assert float(best.values[0, 0, 2]) == 1.0


def test_what_a_verifier_predicts_stands_for_completions():
    notes = {"verifier/value": [[0.2, 0.4, 0.6, 0.8], [0.1, 0.3, 0.5]]}
    table = reward_table([[0.5, 1.0, 1.0], [None, 0.0]], length=[4, 3], ends=[[0, 2, 4], [1, 3]], notes=notes)
    found = verifier_values(table)
    assert_rows(found.values[:, 0], [[0.2, 0.6, 1.0], [0.3, 0.0]])
    assert found.valid[:, 0].tolist() == [[True, True, True], [True, True, False]]
    # PAV with alpha 3: 1 + 3 (0.6 - 0.2), 1 + 3 (1 - 0.6), and 0 + 3 (0 - 0.3).
    assert_rows(process_advantage(found).values[:, 0], [[2.2, 2.2], [-0.9]])


def test_a_learned_value_is_the_prior_of_a_shrunk_mean():
    notes = {"critic/value": [[0.6, 0.0]] * 4}  # EX-34 of V_0.5 has V = .2 on a scale from -1 to 1
    table = value_label(reward_table([1.0, 0.0, 0.0, 0.0], group=["a"] * 4, length=[2] * 4, notes=notes))
    assert table.scored["predicted"][:, 0].tolist() == [0.6] * 4
    # b = -0.142857 of rewards from -1 to 1: (1 + b) / 2 below a success.
    assert_rows(shrunk_mean(table, of="predicted").values[:1, 0], [[1 - (1 - 0.142857) / 2]])


def cross_entropy(logits, targets, mask=None):
    made = Pieces(Stream()).make("objective", Piece("value_cross_entropy"))
    z, t = (torch.tensor([numbers], dtype=torch.float64) for numbers in (logits, targets))
    mask = torch.ones_like(z) if mask is None else torch.tensor([mask], dtype=torch.float64)
    z.requires_grad_(True)
    batch = Batch(
        torch.zeros(1, dtype=torch.int64), mask, None, t, mask, totals=Totals(steps=float(mask.sum()))
    )
    batch = batch.replace(weight=made.weigh(batch))
    loss, metrics = made(StepOutput(0 * z, {"value_logit": z}), batch)
    return loss, metrics, z


def test_the_cross_entropy_of_probabilities_by_hand():
    # Probabilities 3/4 and 1/2 of the logits log 3 and 0: -(1 log 3/4) and log 2, whatever the target.
    loss, metrics, z = cross_entropy([1.0986122886681098, 0.0], [1.0, 0.25])
    assert loss.item() == pytest.approx((0.2876820724517809 + 0.6931471805599453) / 2)
    (slope,) = torch.autograd.grad(loss, z)
    assert_rows(slope, [[(0.75 - 1) / 2, (0.5 - 0.25) / 2]])  # (s(z) - t) / T
    assert float(metrics["squared_error"]) == pytest.approx((0.0625 + 0.0625) / 2)
    assert float(metrics["value/mean"]) == pytest.approx(0.625)
    loss, _, _ = cross_entropy([800.0, -800.0], [1.0, 0.0])
    assert loss.item() == 0.0


def test_rewards_that_are_no_probabilities_are_refused():
    with pytest.raises(ValueError, match=r"learns rewards from 0 to 1, but they go from -1 to 2"):
        cross_entropy([0.0, 0.0], [-1.0, 2.0])
    cross_entropy([0.0, 0.0], [1.0, 2.0], mask=[1.0, 0.0])  # of steps that are learned from


# ---- in training


@per_outcome
def often(prompt, outcome) -> float:
    """Call p0, p4, ... right always, others never."""
    return float(prompt.uid in ("p0", "p4"))


@pytest.mark.slow
def test_rollouts_go_where_the_learned_model_expects_right_and_wrong_answers(tmp_path):
    usual = {"rewards": [f"{__name__}:often"], "rollout": {"num_prompts": 8, "num_generations": 4}}
    run = toy_run(tmp_path, **V0, **usual, learn={"learning_rate": 0.0}, max_steps=60)
    train(run)
    values = (
        run.seconds["v0"].policy.table[:, 0, 0].detach().sigmoid()
    )  # before the first step of each prompt
    assert (values[[0, 4]] > 0.9).all() and (values[[1, 2, 3, 5, 6, 7]] < 0.1).all()
    sampler = run.method.sampler
    drawn = sampler.draw(8, 4)
    assert sampler.value.rate(drawn[0]) == pytest.approx(float(values[int(drawn[0].uid[1:])]), abs=1e-6)
    # Prompts that all answers get right gain nothing from more of them.
    assert [sampler.given[uid] for uid in ("p0", "p4")] == [2, 2]


@pytest.mark.slow
def test_a_verifier_learns_from_half_of_the_answers_and_all_have_its_values(tmp_path):
    usual = {"rewards": ["tests.support.toys:share_right"], "learn": {"learning_rate": 0.0}}
    run = toy_run(tmp_path, **PAV, **usual, max_steps=40)
    table = collect(run).table
    bare = table.ids["bare"] != 0
    completed = ~bare.any(1)
    assert 0.3 < float(completed.double().mean()) < 0.7
    assert torch.equal(table.valid[:, 0], table.present & ~bare)  # no reward for a prefix that was cut off
    _, credit, _ = learnable(run, collect(run))
    assert torch.equal(credit.valid[:, 0], credit.present) and bool(credit.present.any(1).all())
    train(run)
    steps = run.journal.read()
    errors = [step["verifier/squared_error"] for step in steps]
    assert sum(errors[-5:]) < 0.5 * sum(errors[:5])
    gaps = [step["verifier/value/mean"] - step["verifier/return/mean"] for step in steps]
    assert gaps[0] > 0.2 and abs(sum(gaps[-5:]) / 5) < 0.05  # it begins at 1/2


@pytest.mark.parametrize("changes", [PAV, pytest.param(V0, marks=pytest.mark.slow)], ids=["pav", "v0"])
def test_both_are_resumed_bit_for_bit(tmp_path, changes):
    usual = {"rewards": ["tests.support.toys:share_right"], "save_steps": 2}
    for name, limits in (("whole", (6,)), ("parts", (4, 6))):
        for steps in limits:
            run = toy_run(tmp_path / name, **changes, **usual, max_steps=steps)
            train(run)
        if name == "whole":
            whole = run
    assert torch.equal(run.policy.table, whole.policy.table)
    (name,) = run.seconds
    assert torch.equal(run.seconds[name].policy.table, whole.seconds[name].policy.table)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"references": {}}, r"a sampler reads \['v0'\], but `references` has nothing"),
        ({"references": {"v0": "frozen"}}, r"reads \['value'\] of the policy"),
        (
            {"sampler": ["uniform", {"name": "allocate", "value_model": "v0", "prior_column": "wanted"}]},
            "leave `prior_column` or `value_model` out",
        ),
        (
            {"references": {"v0": {**V0["references"]["v0"], "policy": "tests.support.toys:ToyCritic"}}},
            r"reads \['value_logit'\] of it, but it says \['value'\]",
        ),
    ],
)
def test_what_cannot_value_prompts_is_named(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        check(parse({**plan(tmp_path), **V0, **changes}, Config))
        train(toy_run(tmp_path, **{**V0, **changes}))


def test_a_critic_whose_values_are_no_pass_rates_is_refused(tmp_path):
    critic = {
        **V0["references"]["v0"],
        "policy": "tests.support.toys:ToyCritic",
        "objective": "value_regression",
        "learning_rate": 3.0,
    }
    usual = {"rewards": ["tests.support.toys:brevity"], "rollout": {"num_prompts": 4}}
    with pytest.raises(ConfigError, match="must be pass rates from 0 to 1"):
        train(toy_run(tmp_path, **{**V0, "references": {"v0": critic}}, **usual, max_steps=9))
