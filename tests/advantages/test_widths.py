"""Clip ranges of single steps: HAPO, ETR."""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.select import per_step
from mmrl.advantages.widths import entropy_width
from mmrl.objectives.elastic import elastic_clip
from mmrl.objectives.surrogates import clip
from tests.support.tables import assert_rows, micro_batch, moved, reward_table

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


def test_without_notes_it_is_clip():
    new, batch = micro_batch()
    gap = (new.logp - batch.others["old"].logp) * batch.mask
    options = {"epsilon": 0.1, "epsilon_high": 0.15, "dual": 1.05}
    assert elastic_clip(gap, new, batch, **options).equal(clip(gap, new, batch, **options))


def test_a_range_of_one_and_more_ends_at_zero():
    new, batch = noted_batch([0.001], -1.0, {"clip_low": torch.full((1, 1), 8.0)})
    gap = (new.logp - batch.others["old"].logp) * batch.mask
    assert_rows(elastic_clip(gap, new, batch), [[0.001]])


def test_steps_without_entropy_keep_their_range():
    table = reward_table([1, 1], length=[2, 2], notes={"entropy": [[None, None], [0.1, 1.0]]})
    found = entropy_width(table, pivot=0.0)
    assert_rows(found.notes["clip_high"], [[1, 1], [1, 2]])
    assert_rows(found.notes["redistribution"], [[1, 1], [1, 2]])


def test_the_mean_over_steps_of_a_group_is_that_of_hapo():
    table = per_step(reward_table([1, 0, 0, 1], length=[2, 4, 6, 4]))
    found = group_normalize(table, by=("group",), std="population", eps=1e-6)
    assert_rows(found.values[:, 0], [[1.290992] * 2, [-0.774595] * 4, [-0.774595] * 6, [1.290992] * 4])
