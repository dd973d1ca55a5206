"""KL-Cov: which steps are noted, and what holds them."""

from __future__ import annotations

import pytest
import torch

from mmrl.papers.kl_cov import covariance_kl, high_covariance
from tests.support.tables import assert_rows, loss_of, micro_batch, reward_table, slope_of


def test_high_covariance_notes_the_steps_that_rise_together():
    # A: 1 1 -1 -1, mean 0; logp -1 -3 -1 -3, mean -2: covariances 1 -1 -1 1
    table = reward_table([1, -1], length=[2, 2], notes={"logp": [[-1, -3], [-1, -3.5]]})
    # logp -3.5 instead: mean -2.125; covariances 1.125, -.875, -1.125, 1.375
    found = high_covariance(table, share=0.25)
    assert found.notes["high_covariance"].tolist() == [[0, 0], [0, 1]]
    assert high_covariance(table, share=0.5).notes["high_covariance"].tolist() == [[1, 0], [0, 1]]
    assert_rows(found.values[:, 0], [[1, 1], [-1, -1]])
    unknown = reward_table([1], length=[2], notes={"logp": [[None, None]]})
    assert high_covariance(unknown).notes["high_covariance"].tolist() == [[0, 0]]


def test_covariance_kl_holds_the_steps_that_were_noted():
    new, batch = micro_batch()  # log-ratios .1 -.2 .3 and -.4 .05
    noted = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    batch = batch.replace(notes={"high_covariance": noted})
    assert_rows(covariance_kl(new, batch, coef=2.0), [[0, 0.4, 0.6], [0.8, 0]])
    assert_rows(slope_of(covariance_kl(new, batch), new), [[0, -1, 1], [-1, 0]])
    # the loss of verl's KL-Cov: -rho A everywhere, and |log rho| beside it at the noted steps
    pieces_of = {"surrogate": "unclipped", "penalty": ["covariance_kl"], "aggregation": "step_mean"}
    plain = loss_of(new, batch, surrogate="unclipped", aggregation="step_mean")
    assert_rows((loss_of(new, batch, **pieces_of) - plain)[None], [0.9 / 5])


def test_covariance_kl_says_which_piece_notes_the_steps():
    new, batch = micro_batch()
    with pytest.raises(ValueError, match="put the advantage function `high_covariance` at the end"):
        covariance_kl(new, batch)
    assert not covariance_kl(new, batch.replace(mask=torch.zeros_like(batch.mask))).any()
