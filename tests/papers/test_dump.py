"""A bandit over sources: DUMP's worked numbers, dropped groups, and draws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.core.protocols import AdvantageObserver
from mmrl.papers.dump import SourceBandit
from tests.support.observing import by_source, made, next_step, observe, shown, uids


def bandit(learnability, count, *, each=2, **options):
    """Make one with the sources a, b, ... of which each has a mean advantage and a number of rollouts."""
    names = "abcdef"[: len(count)]
    sampler = made(SourceBandit, data=by_source(*names * each), by="source", **options)
    sampler.latest = {
        name: torch.full((5,), value, dtype=torch.float64)
        for name, value in zip(names, learnability, strict=True)
    }
    sampler.count = torch.tensor(count, dtype=torch.float64)
    return sampler


@pytest.mark.parametrize(
    ("learnability", "count", "bounds", "shares"),
    [
        ([0.2, 0.5, 0.8], [100, 50, 10], [0.5172, 0.9464, 1.7612], [0.0, 0.00029, 0.99971]),
        ([0.5, 0.3, 0.1], [300, 200, 100], [0.706193, 0.552324, 0.455956], [0.771275, 0.165564, 0.063160]),
        ([0.5, 0.3, 0.1], [1000] * 3, [0.626481, 0.426481, 0.226481], [0.866813, 0.117310, 0.015876]),
    ],
)
def test_the_papers_bounds_and_probabilities(learnability, count, bounds, shares):
    sampler = bandit(learnability, count)
    assert sampler.bounds.tolist() == pytest.approx(bounds, abs=5e-5)
    assert sampler.probabilities.tolist() == pytest.approx(shares, abs=5e-6)


def test_sources_are_equal_before_anything_is_known_and_one_is_sure():
    assert bandit([0.0] * 3, [0] * 3).probabilities.tolist() == pytest.approx([1 / 3] * 3)
    assert bandit([0.7], [9]).probabilities.tolist() == [1.0]


def test_a_source_that_was_never_drawn_is_drawn():
    assert bandit([0.8, 0.0], [400, 0]).probabilities[1] > 0.99


def test_dropped_groups_count_as_zero():
    sampler = made(SourceBandit, data=by_source("a", "a", "b"), by="source")
    observe(sampler, {"p0": [1.0, 0.0], "p1": [1.0, 1.0], "p2": [0.0, 1.0]})
    sampler.observe_advantages(shown({"p0": [0.5, -0.5], "p2": [-0.9, 0.9]}))
    # a: |0.5|, |-0.5| and two zeros of p1, which a filter dropped; b: |-0.9|, |0.9|.
    assert sampler.learnability.tolist() == pytest.approx([0.25, 0.9])
    assert sampler.count.tolist() == [4.0, 2.0]
    sampler.observe_advantages(shown({"p0": [0.5]}))
    assert sampler.count.tolist() == [4.0, 2.0], "nothing was observed, so nothing is added"


def test_only_the_latest_rollouts_count():
    sampler = made(SourceBandit, data=by_source("a", "b"), by="source", window=3)
    for size in (5.0, 1.0, 2.0):
        observe(sampler, {"p0": [1.0, 0.0]})
        sampler.observe_advantages(shown({"p0": [size, -size]}))
    assert sampler.learnability.tolist() == pytest.approx([(1.0 + 2.0 + 2.0) / 3, 0.0])
    assert sampler.count.tolist() == [6.0, 0.0]


def test_the_advantage_of_a_rollout_is_the_mean_over_its_places():
    sampler = made(SourceBandit, data=by_source("a", "b"), by="source")
    observe(sampler, {"p0": [1.0, 0.0]})
    sampler.observe_advantages(shown({"p0": [[1.0, -3.0], [0.5]]}))
    assert sampler.learnability.tolist() == [0.75, 0.0]  # |(1 - 3) / 2| = 1, |0.5|


def test_recorded_answers_do_not_count():
    sampler = made(SourceBandit, data=by_source("a", "b"), by="source")
    observe(sampler, {"p0": [1.0, 0.0]}, on_policy=[True, False])
    sampler.observe_advantages(shown({"p0": [0.4, -8.0]}, on_policy=[True, False]))
    assert sampler.learnability.tolist() == [0.4, 0.0] and sampler.count.tolist() == [1.0, 0.0]


def test_draws_follow_the_probabilities_and_repeat_no_prompt():
    sampler, drawn = bandit([0.3, 0.3 + 0.1 * 0.6931471805599453], [100, 100], each=30), Counter()
    for _ in range(300):  # b has twice the probability of a
        next_step(sampler)
        names = uids(sampler.draw(3, 1))
        assert len(set(names)) == 3
        drawn.update("ab"[int(name[1:]) % 2] for name in names)
    assert drawn["b"] / 900 == pytest.approx(2 / 3, abs=0.05)


def test_an_empty_source_leaves_its_part_to_the_others():
    sampler = bandit([0.0, 9.0], [100, 100], each=3)
    assert {"p1", "p3", "p5"} < set(uids(sampler.draw(5, 1))), "three of b, and two of a"
    sampler = bandit([0.0, 9.0], [100, 100], each=3)
    assert set(uids(sampler.draw(3, 1))) == {"p1", "p3", "p5"}
    sampler.stream.round = 1
    assert set(uids(sampler.draw(3, 1))) == {"p0", "p2", "p4"}, "in this step b was asked already"
    assert len(set(uids(sampler.draw(4, 2)))) == 4, "all were asked, so they come again"


def test_the_split_is_the_source_without_a_column():
    data = by_source("a", "b", "a")
    assert made(SourceBandit, data=data).sources == ("a", "b")
    data = [replace(prompt, split="") for prompt in data]
    with pytest.raises(
        ConfigError, match=r"the data have no splits .*name a column.*\(there are wanted, source"
    ):
        made(SourceBandit, data=data)


def test_a_missing_column_is_one_clear_line():
    with pytest.raises(ConfigError, match="prompt 'p0' has no column 'level' .*it has wanted, source, diff"):
        made(SourceBandit, data=by_source("a"), by="level")


def test_a_bandit_tells_and_believes():
    sampler = bandit([0.2, 0.5, 0.8], [100, 50, 10])
    assert isinstance(sampler, AdvantageObserver)
    assert sampler.pop_metrics()["sampler/share/c"] == pytest.approx(0.99971, abs=5e-6)
    assert float(sampler.learnability[0]) == pytest.approx(0.2) and float(sampler.count[1]) == 50.0


def test_a_saved_bandit_knows_its_sources():
    sampler, other = bandit([0.2, 0.5, 0.8], [100, 50, 10]), bandit([0, 0, 0], [0, 0, 0])
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(other.bounds, sampler.bounds)
