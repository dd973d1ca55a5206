"""Clip-Cov: which steps are not learned from."""

from __future__ import annotations

from mmrl.core.rng import Stream
from mmrl.papers.clip_cov import covariance_mask
from tests.support.tables import reward_table


def test_covariance_mask_silences_one_step_of_high_covariance():
    # mean advantage 0, mean logp -2.5: covariances 2.5 .5 -.5 -1.5 for the first row, 1.5 .5 .5 -2.5
    logp = [[0.0, -2.0, -3.0, -4.0], [-4.0, -3.0, -3.0, -1.0]]
    table = reward_table([1, -1], length=[4, 4], notes={"logp": logp})
    seen = set()
    for step in range(20):
        found = covariance_mask(table, stream=Stream(3, step=step)).values[:, 0]
        silent = (found == 0).nonzero().tolist()
        assert len(silent) == 1
        seen.add(tuple(silent[0]))
    assert seen == {(0, 0), (1, 0)}
    assert (covariance_mask(table, low=2.0, share=1.0, stream=Stream()).values[:, 0] == 0).sum() == 1
    assert (covariance_mask(table, low=3.0, stream=Stream()).values != 0).all()
