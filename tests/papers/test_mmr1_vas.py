"""Sampling by variance: MMR1's scores, weights, mixed draws and passes over the data."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.papers.mmr1_vas import VarianceAware
from tests.support.observing import made, next_step, observe, uids
from tests.support.toys import toy_run

SAME = [1, 2, 3, 4]


def observing(sampler, rewards, tokens=None):
    rows = [
        row
        for group in (tokens or {uid: [SAME] * len(g) for uid, g in rewards.items()}).values()
        for row in group
    ]
    observe(
        sampler,
        rewards,
        length=[len(row) for row in rows],
        ends=[[len(row)] for row in rows],
        notes={"token": rows},
    )


def test_the_papers_outcome_variance():
    sampler = made(VarianceAware, variance_weight=1.0, diversity_weight=0.0)
    observing(sampler, {"p0": [0, 0, 0, 0], "p1": [1, 0, 1, 0], "p2": [1, 1, 1, 1]})
    assert sampler.scores[:3].tolist() == [0.0, 0.25, 0.0] and sampler.scores[3].isnan()


def test_a_score_adds_variance_and_diversity_without_padding():
    sampler = made(VarianceAware)
    # The shorter row is padded in the table; alike but for its end: 12 of 2 tokens, 1 pair, no triple.
    observing(sampler, {"p0": [1, 0], "p1": [1, 1]}, {"p0": [[1, 2, 3, 4], [1, 2, 3, 5]], "p1": [[7, 8]] * 2})
    alike = 0.1 ** (1 / 3)  # no triple in [7, 8]: smoothed
    assert sampler.scores[:2].tolist() == pytest.approx(
        [0.8 * 0.25 + 0.2 * (1 - 0.25 ** (1 / 3)), 0.2 * (1 - alike)]
    )


def weighed(scores, **options):
    sampler = made(VarianceAware, num=len(scores), **options)
    sampler.scores = torch.tensor(scores, dtype=torch.float64)
    sampler._weigh()
    return sampler


def test_weights_are_scores_between_the_least_and_the_largest():
    assert weighed([0.1, 0.2, 0.3]).weights.tolist() == pytest.approx([0.0, 0.5, 1.0], abs=1e-6)
    nan = float("nan")
    assert weighed([0.1, nan, 0.3, 0.3]).weights.tolist() == pytest.approx([0.0, 2 / 3, 1.0, 1.0], abs=1e-6)


def test_old_weights_are_mixed_in_by_momentum():
    sampler = weighed([0.1, 0.2, 0.3], momentum=0.25)
    sampler.scores = torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64)
    sampler._weigh()
    assert sampler.weights.tolist() == pytest.approx([0.75, 0.5, 0.25], abs=1e-6)


def test_equal_scores_draw_uniformly():
    sampler = weighed([0.2] * 6)
    assert not sampler.weights.any()
    drawn = [*uids(sampler.draw(3, 1))]
    next_step(sampler)
    assert sorted([*drawn, *uids(sampler.draw(3, 1))]) == [f"p{i}" for i in range(6)]


def test_a_draw_is_part_weighted_and_part_a_walk_over_all():
    # Only p0 and p1 have weight; floor(0.5 * 5) = 2 of every draw are weighted.
    sampler = weighed([0.9, 0.8, *[0.1] * 8], weighted_share=0.5, update_steps=1000)
    sampler.steps, drawn = 1, Counter()
    for _ in range(40):
        next_step(sampler)
        names = uids(sampler.draw(5, 1))
        assert len(set(names)) == 5 and {"p0", "p1"} <= set(names)
        drawn.update(names)
    others = [drawn[f"p{i}"] for i in range(2, 10)]
    assert min(others) == max(others) == 15, "8 others in turn: 40 * 3 / 8"


def test_the_weighted_part_is_rounded_down_and_follows_the_weights():
    sampler = weighed([0.1, 0.4, 0.7, 0.1], weighted_share=0.5, update_steps=1000)
    sampler.steps, first = 1, Counter()
    for _ in range(600):
        next_step(sampler)
        first[uids(sampler.draw(3, 1))[0]] += 1  # floor(1.5) = 1
    assert set(first) == {"p1", "p2"} and first["p2"] / 600 == pytest.approx(2 / 3, abs=0.06)


def test_running_scores_become_weights_when_they_are_due():
    sampler, due = made(VarianceAware, update_steps=3), []
    for step in range(7):
        next_step(sampler)
        before = sampler.weights.clone()
        sampler.draw(2, 2)
        due.append(not torch.equal(before, sampler.weights))
        observing(sampler, {f"p{step % 3}": [1, int(step > 2)], "p3": [1, 1]})
    assert due == [False, False, False, True, False, False, True]


def test_a_full_pass_draws_all_and_alone_is_scored():
    sampler, sizes = made(VarianceAware, refresh="full", update_steps=3), []
    for step in range(5):
        next_step(sampler)
        drawn = uids(sampler.draw(2, 3))
        sizes.append(len(set(drawn)))
        assert len(drawn) == 3 * sizes[-1]
        observing(sampler, {uid: [1, 0, step % 2] for uid in dict.fromkeys(drawn)})
        if step in (0, 2):
            assert sampler.weights.tolist() == [0.0] * 4, "all alike"
            scores = sampler.scores.clone()
        if step == 1:
            assert torch.equal(sampler.scores, scores)
    assert sizes == [4, 2, 2, 4, 2]


def test_a_later_round_asks_others():
    sampler = weighed([0.9, 0.8, 0.7, 0.1], weighted_share=1.0)
    sampler.steps = 1
    first = uids(sampler.draw(2, 1))
    sampler.stream.round = 1
    assert not set(first) & set(uids(sampler.draw(2, 1)))


def test_nothing_to_score_by_is_refused():
    with pytest.raises(ValueError, match="`variance_weight` and `diversity_weight` are both 0"):
        made(VarianceAware, variance_weight=0.0, diversity_weight=0.0)


def test_an_engine_without_tokens_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"a sampler reads the notes \['token'\], which the engines do not"):
        toy_run(tmp_path, sampler="variance_aware")


def test_an_unknown_reward_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(
        ConfigError, match=r"sampler\[0\].of: no reward is called 'share_rihgt'.*'share_right'"
    ):
        toy_run(tmp_path, sampler={"name": "vade", "of": "share_rihgt"})


def test_it_tells_and_believes():
    sampler = made(VarianceAware)
    assert sampler.pop_metrics()["sampler/seen"] == 0.0
    observing(sampler, {"p0": [1, 0]})
    assert sampler.pop_metrics()["sampler/score"] == pytest.approx(float(sampler.scores[0]))
    assert sampler.pass_rate[0] == 0.5
