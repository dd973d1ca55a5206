"""Thompson sampling of prompts: VADE's worked numbers, and what a draw does with its beliefs."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.protocols import HasMetrics, Observer
from mmrl.papers.vade import Vade
from tests.support.observing import made, next_step, observe, uids
from tests.support.tables import reward_table


def believing(passed, failed, **options):
    sampler = made(Vade, num=len(passed), **options)
    sampler.passed, sampler.failed = (
        torch.tensor(counts, dtype=torch.float64) for counts in (passed, failed)
    )
    return sampler


def test_the_papers_counts_after_one_step():
    # Its figure: (0.1, 8.4) with 1 of 8, (2.7, 5.3) with 4 of 8, and (9.0, 0.2) that was not drawn.
    sampler = believing([0.1, 2.7, 9.0], [8.4, 5.3, 0.2])
    sampler.updated.zero_()  # as the draw of a step leaves it
    observe(sampler, {"p0": [1] + [0] * 7, "p1": [1, 0] * 4})
    next_step(sampler)
    sampler.draw(1, 1)
    assert sampler.passed.tolist() == pytest.approx([1.02, 4.54, 8.991])
    assert sampler.failed.tolist() == pytest.approx([8.68, 5.06, 0.1998])


def test_the_papers_scores_and_their_maximum():
    rates = torch.tensor([0.13, 0.32, 0.90, 1 / 3], dtype=torch.float64)
    assert made(Vade).information(rates).tolist() == pytest.approx([0.0984, 0.1480, 0.0090, 4 / 27], abs=5e-5)
    grid = torch.linspace(0, 1, 3001, dtype=torch.float64)
    assert grid[made(Vade).information(grid).argmax()] == pytest.approx(1 / 3, abs=1e-3)
    assert grid[made(Vade, score="p(1-p)").information(grid).argmax()] == pytest.approx(1 / 2, abs=1e-3)


def test_a_draw_takes_the_highest_scores_without_repetition():
    # Means 1/10, 1/2, 8/10, 3/10 score .081, .125, .032, .147.
    sampler = believing([0, 4, 7, 2], [8, 4, 1, 6], thompson=False)
    assert uids(sampler.draw(2, 3)) == ["p3"] * 3 + ["p1"] * 3
    next_step(sampler)
    assert sorted(uids(sampler.draw(9, 1))) == ["p0", "p1", "p2", "p3"]


def test_a_later_round_asks_others_first():
    sampler = believing([0, 4, 7, 2], [8, 4, 1, 6], thompson=False)
    assert uids(sampler.draw(2, 1)) == ["p3", "p1"]
    sampler.stream.round = 1
    assert uids(sampler.draw(1, 1)) == ["p0"]
    assert uids(sampler.draw(2, 1)) == ["p2", "p3"], "where no other is left, the best come again"


def test_samples_of_sure_beliefs_are_near_their_means_and_unsure_ones_explore():
    sure = believing([4000.0] * 500 + [40.0] * 500, [4000.0] * 500 + [40.0] * 500)
    sampled = sure._sampled()
    # A Beta(n + 1, n + 1) has the deviation 1 / (2 sqrt(2 n + 3)): .0056 and .0549.
    assert sampled[:500].std() == pytest.approx(0.0056, rel=0.15)
    assert sampled[500:].std() == pytest.approx(0.0549, rel=0.15)
    state = torch.get_rng_state()
    sure.draw(2, 1)
    assert torch.equal(torch.get_rng_state(), state), "the global stream is left as it was"


def test_ties_are_broken_at_random_and_by_the_step():
    sampler, drawn = made(Vade, num=50, thompson=False), set()
    for _ in range(3):
        next_step(sampler)
        drawn.add(tuple(uids(sampler.draw(5, 1))))
    assert len(drawn) == 3


def test_two_rounds_about_one_prompt_are_one_group():
    once, twice = (believing([5.0], [3.0]) for _ in range(2))
    for sampler in (once, twice):
        sampler.updated.zero_()
    observe(once, {"p0": [1, 0, 0, 1]})
    observe(twice, {"p0": [1, 0]})
    observe(twice, {"p0": [0, 1]})
    assert once.passed.tolist() == twice.passed.tolist() == pytest.approx([0.2 * 5 + 2])
    assert once.failed.tolist() == twice.failed.tolist() == pytest.approx([0.2 * 3 + 2])


def test_rewards_that_are_no_passes_count_by_their_part_of_one():
    parts, passes = made(Vade), made(Vade, binarize=True)
    for sampler in (parts, passes):
        observe(sampler, {"p0": [0.75, 2.0, -1.0, 0.25], "p1": [None, None]})
    assert parts.passed.tolist() == [2.0, 0, 0, 0]
    assert passes.passed.tolist() == [2.0, 0, 0, 0] and passes.failed.tolist() == [2.0, 0, 0, 0]
    observe(passes, {"p2": [0.4, 0.6]})
    assert passes.passed[2] == passes.failed[2] == 1.0
    assert parts.seen.tolist() == [True, False, False, False], "without a reward it was not seen"


def test_recorded_answers_and_strangers_do_not_count():
    sampler = made(Vade)
    observe(sampler, {"p0": [1.0, 1.0], "p99": [1.0]}, on_policy=[True, False, True])
    assert sampler.passed.tolist() == [1.0, 0, 0, 0] and sampler.failed.sum() == 0


def test_a_named_reward_tells_the_pass_rate():
    sampler = made(Vade, of="right")
    table = {"right": [1.0, 0.0], "long": [5.0, 5.0]}
    sampler.observe((), reward_table(table, group=["p0", "p0"]))
    assert (sampler.passed[0], sampler.failed[0]) == (1.0, 1.0)


def test_an_assumed_pass_rate_is_a_belief_at_first():
    sampler = made(Vade, init_pass_rate=0.25, init_count=6.0)
    assert sampler.pass_rate.tolist() == pytest.approx([2.5 / 8] * 4)
    assert made(Vade).pass_rate.tolist() == [0.5] * 4


def test_a_vade_tells_and_believes():
    sampler = made(Vade)
    assert isinstance(sampler, Observer) and isinstance(sampler, HasMetrics)
    observe(sampler, {"p0": [1.0, 1.0], "p1": [0.0, 1.0]})
    told = sampler.pop_metrics()
    assert told["sampler/seen"] == 0.5 and 0 < told["sampler/entropy"] < 1
    assert told["sampler/pass_rate"] == pytest.approx((3 / 4 + 1 / 2 * 3) / 4)
    assert float(sampler.pass_rate[0]) == 0.75 and float((sampler.passed + sampler.failed)[0]) == 2.0
    assert float(sampler.information(sampler.pass_rate)[0]) == pytest.approx(0.75 / 16)


def test_a_memory_about_other_data_is_refused():
    with pytest.raises(ValueError, match="saved memory is about 4 prompts, but the data have 5"):
        made(Vade, num=5).load_state_dict(made(Vade).state_dict())
