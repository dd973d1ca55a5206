"""Answers that were sampled with a hint: learned without it, and how much they rely on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.config.loading import read
from mmrl.core.rng import Stream
from mmrl.data.hints import with_hint
from mmrl.papers.hill import WithHintReliance
from mmrl.papers.scaf_grpo import WithoutHints, first_success
from mmrl.vision.engines.generate import Generate
from tests.support.tables import assert_rows, reward_table
from tests.vision.test_contrastive_decoding import FAMILY, pictures, plainly


@pytest.fixture
def policy(exact):
    return exact(FAMILY)


def test_the_tokens_stay_and_the_log_probabilities_are_those_of_the_bare_prompt(policy):
    bare = pictures()[0]
    hinted = with_hint(bare, "the brown fox", tag="1")
    inner = Generate(policy, stream=Stream(0), max_completion_length=6)
    sampled = inner.rollout([bare, hinted])
    plain, row = WithoutHints(Generate(policy, stream=Stream(0), max_completion_length=6)).rollout(
        [bare, hinted]
    )
    assert row.steps.ids.tolist() == sampled[1].steps.ids.tolist()
    assert row.prompt == hinted and row.outcomes == sampled[1].outcomes and row.group == bare.uid
    assert not row.on_policy and "token" in row.notes and not {"logp", "entropy"} & set(row.notes)
    assert plain.on_policy and torch.equal(plain.notes["logp"], sampled[0].notes["logp"])
    with torch.no_grad():
        logp = policy(policy.collate((row,))).logp[0].double()
    for prompt, alike in ((bare, True), (hinted, False)):
        wanted = (
            plainly(policy, prompt, row.steps.ids)
            .double()
            .log_softmax(-1)
            .gather(1, row.steps.ids[:, None])[:, 0]
        )
        assert torch.allclose(logp, wanted, rtol=0, atol=2e-5) is alike


def test_reliance_is_the_mean_change_of_log_probability_without_the_hint(policy):
    bare = pictures()[0]
    asked = [bare, *[with_hint(bare, hint, tag=hint) for hint in ("the brown fox", "0123")]]
    inner = Generate(policy, stream=Stream(0), max_completion_length=6, batch_size=2, temperature=0.7)
    plain, *rows = WithHintReliance(inner).rollout(asked)
    assert plain.outcomes[-1].recorded == {}
    assert [row.steps.ids.tolist() for row in rows] == [
        row.steps.ids.tolist() for row in inner.rollout(asked)[1:]
    ]
    for row in rows:
        means = []
        for prompt in (bare, row.prompt):
            logp = (plainly(policy, prompt, row.steps.ids) / 0.7).log_softmax(-1)
            means.append(float(logp.gather(1, row.steps.ids[:, None]).mean()))
        assert row.outcomes[-1].recorded["hint_reliance"] == pytest.approx(means[0] - means[1], abs=2e-5)
        assert row.on_policy and row.prompt.tags and "logp" in row.notes


def counted(table):
    return table.learn[:, 0].int().tolist()


def test_the_first_success_replaces_the_first_failure():
    hints = ["", "", "", "1", "2", "2"]
    table = first_success(reward_table([0, 0, 0, 0, 1, 1], tags={"hint": hints}))
    assert counted(table) == [0, 1, 1, 0, 1, 0]
    assert table.valid[:, 0, 0].int().tolist() == counted(table)


def test_eight_failures_and_a_hinted_success_have_the_papers_advantages():
    table = reward_table([0] * 8 + [1], tags={"hint": [""] * 8 + ["3"]})
    credit = group_normalize(first_success(table), eps=1e-6)
    assert_rows(credit.values[1:, 0, 0], [*[-0.353552] * 7, 2.474867])  # EX-47
    assert counted(credit) == [0, *[1] * 8]


@pytest.mark.parametrize(
    ("rewards", "hints", "kept"),
    [
        ([0, 0, 0], ["", "", "1"], [1, 1, 0]),  # no hint succeeds: the plain group
        ([1, 0, 1], ["", "", "1"], [1, 1, 0]),  # no failed group
        ([0, 1, 1], ["1", "1", "1"], [1, 1, 1]),  # no plain rows
        ([0, 1, 0], ["", "", ""], [1, 1, 1]),
        ([None, 0, 1], ["", "", "1"], [0, 1, 1]),
    ],
)
def test_other_groups_keep_their_plain_rows(rewards, hints, kept):
    assert counted(first_success(reward_table(rewards, tags={"hint": hints}))) == kept


def test_two_successes_may_replace_two_failures():
    table = reward_table([0, 0, 0, 1, 1], tags={"hint": ["", "", "", "1", "2"]})
    assert counted(first_success(table, replace=2)) == [0, 0, 1, 1, 1]


def test_groups_are_changed_one_by_one():
    table = reward_table([0, 1, 0, 1], group=["a", "a", "b", "b"], tags={"hint": ["", "1", "", ""]})
    assert counted(first_success(table)) == [0, 1, 1, 1]


def test_the_loss_is_a_mean_over_tokens_as_in_the_released_code():
    methods = Path(__file__).parents[2] / "configs" / "methods" / "grpo"
    assert read(methods / "scaf_grpo.yaml")["objective"]["aggregation"] == "step_mean"
