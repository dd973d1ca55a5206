"""Clip ranges of single steps: ETR."""

from __future__ import annotations

import torch

from mmrl.objectives.elastic import elastic_clip
from mmrl.objectives.surrogates import clip
from tests.support.tables import assert_rows, micro_batch, moved


def noted_batch(ratio, advantage, notes):
    new, batch = moved([[float(torch.tensor(r).log()) for r in ratio]], [advantage])
    return new, batch.replace(notes={**batch.notes, **notes})


def test_without_notes_it_is_clip():
    new, batch = micro_batch()
    gap = (new.logp - batch.others["old"].logp) * batch.mask
    options = {"epsilon": 0.1, "epsilon_high": 0.15, "dual": 1.05}
    assert elastic_clip(gap, new, batch, **options).equal(clip(gap, new, batch, **options))


def test_a_range_of_one_and_more_ends_at_zero():
    new, batch = noted_batch([0.001], -1.0, {"clip_low": torch.full((1, 1), 8.0)})
    gap = (new.logp - batch.others["old"].logp) * batch.mask
    assert_rows(elastic_clip(gap, new, batch), [[0.001]])
