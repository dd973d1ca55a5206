"""Learning from conversations that part: rows are read as each alone, and no cut changes a gradient."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.rng import Stream
from mmrl.core.types import Unit
from mmrl.vision.decoding import prefix_tree
from mmrl.vision.engines.generate import Generate
from mmrl.vision.tools.images import crop
from tests.papers.test_slate import reward
from tests.vision import mixed, tiny
from tests.vision.parting import Branching, Stepwise
from tests.vision.talking import ruled
from tests.vision.test_prefix_tree import TIGHT, check, precise, weights

OPTIONS = {
    Branching: {"branching": (2, 2)},
    Stepwise: {"reward": (reward("length"),)},
}


@pytest.fixture
def rows_of(checkpoint, monkeypatch):
    """Hold conversations, and share every beginning of theirs in learning, however short."""
    monkeypatch.setattr(prefix_tree, "SAVED", 1)
    monkeypatch.setattr(prefix_tree, "GAIN", 0.0)

    def hold(kind):
        policy = precise(checkpoint("qwen2_5_vl"))
        inner = Generate(policy, stream=Stream(0), max_completion_length=20)
        engine = kind(inner, stream=Stream(0), tool=(crop, ruled), **OPTIONS[kind])
        return policy, engine.rollout([tiny.ask("p", tiny.picture(), "what")] * 8)

    return hold


@pytest.mark.parametrize("kind", OPTIONS)
def test_rows_learn_what_each_does_alone(rows_of, kind):
    policy, rows = rows_of(kind)
    check(policy, rows, depth=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_every_micro_batch_cut_gives_the_same_gradient(rows_of, kind):
    policy, rows = rows_of(kind)
    batch = policy.collate(rows)
    groups = {row.group: i for i, row in enumerate(rows)}
    batch = batch.replace(weight=weights(batch), group=torch.tensor([groups[row.group] for row in rows]))

    def gradient(budget):
        parts = batch.split(budget, Unit.ROW)
        for part in parts:
            (policy(part).logp * part.weight).sum().backward()
        return len(parts), mixed.gradients(policy)

    (_, whole), sizes = gradient(1 << 20), set()
    cost = batch.steps.cost(torch.arange(len(batch)))
    for budget in (1, cost // 2, cost * 4 // 5):
        number, found = gradient(budget)
        sizes.add(number)
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, **TIGHT, msg=lambda m, n=name: n + m)
    assert max(sizes) == len(batch) and len(sizes) > 1
