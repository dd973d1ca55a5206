"""Temperatures of single tokens: HAPO's worked numbers, what is drawn from, and what is remembered."""

from __future__ import annotations

import json

import pytest
import torch

from mmrl.core.entropy_scale import EntropyScale
from mmrl.core.rng import Stream
from mmrl.papers.hapo import WithEntropyTemperature
from mmrl.vision.engines.generate import Generate
from tests.support.tables import assert_rows, reward_table
from tests.vision import mixed

FAMILY = "llava"
ENTROPY = [0.05, 0.10, 0.20, 0.60, 1.50]


@pytest.fixture
def policy(exact):
    return exact(FAMILY)


def tempered(policy, tau=0.05, **options):
    generate = Generate(policy, stream=Stream(0), max_completion_length=6, **options)
    return WithEntropyTemperature(generate, tau=tau, pivot=0.5)


def test_temperatures_follow_the_entropy_about_its_pivot(policy):
    engine, entropy = tempered(policy), torch.tensor(ENTROPY)
    assert engine.factor(entropy).eq(1).all()  # nothing was seen yet
    table = reward_table([1, 0], length=[3, 3], notes={"entropy": [ENTROPY[:3], [*ENTROPY[3:], None]]})
    engine.observe((), table)
    # h of log H about log .2, over the extremes log .05 and log 1.5, is -1 -.5 0 .545243 1
    assert_rows(engine.factor(entropy), [0.95, 0.975, 1, 1.027262, 1.05])
    assert_rows(engine.factor(torch.tensor([0.001, 9.0])), [0.95, 1.05])  # beyond what was seen


def test_rows_of_others_and_without_entropies_are_not_measured(policy):
    engine = tempered(policy)
    notes = {"entropy": [[0.1, 0.3], [5.0, 7.0]]}
    engine.observe((), reward_table([1, 0], length=[2, 2], on_policy=[True, False], notes=notes))
    assert engine.scale == EntropyScale.of(torch.tensor([0.1, 0.3], dtype=torch.float64), 0.5)
    before = engine.scale
    engine.observe((), reward_table([1], length=[1], notes={"entropy": [[None]]}))
    assert engine.scale == before


def test_tokens_are_drawn_at_their_own_temperature_and_learned_at_that_of_the_engine(policy):
    prompts = mixed.prompts(FAMILY)[:2]
    plain = Generate(policy, stream=Stream(0), max_completion_length=6, temperature=0.7)
    engine = tempered(policy, tau=0.5, temperature=0.7)
    assert [row.notes["logp"].tolist() for row in engine.rollout(prompts)] == [
        row.notes["logp"].tolist() for row in plain.rollout(prompts)
    ]
    engine.scale = EntropyScale(middle=1.0, spread=1.0, high=1.0, low=1.0)
    for row in engine.rollout(prompts):
        assert row.steps.temperature == 0.7
        encoded = policy.prompt_encoder.encode(row.prompt)
        ids = torch.cat([encoded.ids, row.steps.ids])[None]
        with torch.no_grad():
            logits = policy.model(input_ids=ids, use_cache=False, **encoded.media).logits
        logits = logits[0, len(encoded.ids) - 1 : -1].float()
        logits[:, list(policy.prompt_encoder.placeholders)] = -1e9
        logp = (logits / 0.7).log_softmax(-1)
        entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)
        warmth = 0.7 * (1 + 0.5 * (entropy.log() - 1).clamp(-1, 1))
        wanted = (logits / warmth[:, None]).log_softmax(-1).gather(1, row.steps.ids[:, None])[:, 0]
        torch.testing.assert_close(row.notes["logp"].double(), wanted.double(), rtol=1e-4, atol=1e-4)
        assert (warmth - 0.7).abs().max() > 0.01


def test_the_scale_is_brought_back(policy):
    engine, other = tempered(policy), tempered(policy)
    for scale in (None, EntropyScale(-1.0, 0.5, 2.0, 3.0)):
        engine.scale = scale
        other.load_state_dict(json.loads(json.dumps(engine.state_dict())))
        assert other.scale == scale
