"""HAPO: temperatures, clip ranges and advantages by entropy, by worked numbers."""

from __future__ import annotations

import json

import pytest
import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.select import per_step
from mmrl.core.rng import Stream
from mmrl.objectives.elastic import elastic_clip
from mmrl.papers.hapo import EntropyScale, WithEntropyTemperature, entropy_width, group_normalize_by_step
from mmrl.vision.engines.generate import Generate
from tests.support.tables import assert_rows, moved, reward_table
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


def test_steps_count_with_the_reward_of_their_answer():
    # 6 of 16 steps have the reward 1: mean .375, deviation sqrt(.375 * .625) = .484123
    found = group_normalize_by_step(reward_table([1, 0, 0, 1], length=[2, 4, 6, 4])).values[:, 0]
    assert_rows(found, [[1.290992] * 2, [-0.774595] * 4, [-0.774595] * 6, [1.290992] * 4])


def test_lengths_too_uneven_to_count_steps_count_answers():
    # 1 of 401 steps: .997506 / .049876 = 20.0; with answers of 0 and 1: .5 / .707107
    table = reward_table([0, 1], length=[400, 1])
    assert_rows(group_normalize_by_step(table).values[:, 0, :1], [[-0.707106], [0.707106]])
    assert_rows(group_normalize_by_step(table, limit=30.0).values[1:, 0, :1], [[19.999599]])


def test_uneven_lengths_of_one_group_leave_the_others_alone():
    table = reward_table([0, 1, 0, 1], length=[400, 1, 2, 2], group="aabb")
    # 2 of 4 steps: .5 / (.5 + 1e-6)
    assert_rows(group_normalize_by_step(table).values[:, 0, :1], [[-0.707106], [0.707106], [-1], [1]], 3e-6)


ENTROPY = [0.05, 0.10, 0.20, 0.60, 1.50]
WORKED = entropy_width(reward_table([1], length=[5], notes={"entropy": [ENTROPY]}), pivot=0.5)


def test_widths_follow_the_entropy_about_its_pivot():
    # log H about log .2, over the extremes log .05 and log 1.5: -1 -.5 0 .545243 1
    assert_rows(0.2 * WORKED.notes["clip_low"], [[0.4, 0.3, 0.2, 0.2, 0.2]])
    assert_rows(0.2 * WORKED.notes["clip_high"], [[0.2, 0.2, 0.2, 0.309049, 0.4]])
    assert_rows(WORKED.notes["redistribution"], [[0, 0.5, 1, 1.545243, 2]])


def noted_batch(ratio, advantage, notes):
    new, batch = moved([[float(torch.tensor(r).log()) for r in ratio]], [advantage])
    return new, batch.replace(notes={**batch.notes, **notes})


def test_advantages_are_redistributed_inside_half_the_range_or_outside():
    ratio = [1, 1.05, 0.85, 1.05, 1.3]
    new, batch = noted_batch(ratio, 1.0, WORKED.notes)
    gap = (new.logp - batch.others["old"].logp) * batch.mask
    # A = 0 .5 1 1 2 where nothing is clipped; .85 is inside half the range of .2 only below .9
    assert_rows(-elastic_clip(gap, new, batch), [[0, 0.525, 0.85, 1.05, 2.6]])
    new, batch = noted_batch([1.5] * 5, 1.0, WORKED.notes)
    gap = (new.logp - batch.others["old"].logp) * batch.mask
    assert_rows(-elastic_clip(gap, new, batch), [[1.2, 1.2, 1.2, 1.309049 * 1.545243, 2 * 1.4]])


def test_steps_without_entropy_keep_their_range():
    table = reward_table([1, 1], length=[2, 2], notes={"entropy": [[None, None], [0.1, 1.0]]})
    found = entropy_width(table, pivot=0.0)
    assert_rows(found.notes["clip_high"], [[1, 1], [1, 2]])
    assert_rows(found.notes["redistribution"], [[1, 1], [1, 2]])


def test_the_mean_over_steps_of_a_group_is_that_of_hapo():
    table = per_step(reward_table([1, 0, 0, 1], length=[2, 4, 6, 4]))
    found = group_normalize(table, by=("group",), std="population", eps=1e-6)
    assert_rows(found.values[:, 0], [[1.290992] * 2, [-0.774595] * 4, [-0.774595] * 6, [1.290992] * 4])
