"""Answers that were sampled with a hint: learned without it, and how much they rely on it."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.rng import Stream
from mmrl.data.hints import with_hint
from mmrl.papers.hill import WithHintReliance
from mmrl.papers.scaf_grpo import WithoutHints
from mmrl.vision.engines.generate import Generate
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
