"""Random streams: keyed draws, and torch's global generator while it is seeded."""

from __future__ import annotations

import torch

from mmrl.core.rng import Stream, seeded


def test_a_seeded_context_repeats_its_draws_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    drawn = []
    for seed in (0, 0, 1):
        with seeded(seed):
            drawn.append(torch.randn(3))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_follows_the_key_and_the_run_but_not_the_step():
    seeds = {Stream(seed).seed_of(name) for seed in (0, 1) for name in ("a", "b")}
    assert len(seeds) == 4
    assert Stream(0, step=5, round=2).seed_of("a") == Stream(0).seed_of("a")
