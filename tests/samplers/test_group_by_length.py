"""Steps of prompts of similar length."""

from __future__ import annotations

import dataclasses

import pytest

from mmrl.config.loading import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part
from mmrl.samplers.group_by_length import GroupByLength
from tests.support.toys import prompts


def data(lengths, **columns):
    """Prompts whose words and answers have these lengths together."""
    return [
        dataclasses.replace(
            prompt,
            messages=(Message("user", (Part("x" * (length - length // 3)),)),),
            answers=(Outcome("y" * (length // 3)),),
            columns={name: values[i] for name, values in columns.items()},
        )
        for i, (prompt, length) in enumerate(zip(prompts(num=len(lengths)), lengths, strict=True))
    ]


def sampler(lengths, seed=0, **options):
    return GroupByLength(data(lengths), stream=Stream(seed), **options)


def steps(drawing, number, size):
    return [[prompt.uid for prompt in drawing.draw(size, 1)] for _ in range(number)]


def test_a_step_holds_neighbours_in_length_and_every_prompt_comes_once_per_epoch():
    drawing = sampler(range(3, 23))
    epochs = [steps(drawing, 5, 4) for _ in range(3)]
    for epoch in epochs:
        # One mega-batch holds all 20, so the steps are those of the sorted prompts: 4 neighbours each.
        assert sorted(sorted(int(uid[1:]) for uid in step) for step in epoch) == [
            list(range(at, at + 4)) for at in range(0, 20, 4)
        ]
    assert epochs[0] != epochs[1], "the order of steps is another one in every epoch"


def test_mega_batches_are_sorted_apart():
    drawing = sampler(range(3, 23), mega_batch=1)
    found = [[int(uid[1:]) for uid in step] for step in steps(drawing, 5, 4)]
    assert all(step == sorted(step, reverse=True) for step in found)
    assert any(step[0] - step[-1] > 3 for step in found)  # each step is sorted alone


def test_steps_stay_whole_where_epochs_end_inside_a_step():
    drawing = sampler([5] * 8 + [500] * 8)
    found = steps(drawing, 32, 3)  # 6 epochs of 16 prompts; 16 = 5 x 3 + 1
    counts = {uid: sum(uid in step for step in found) for uid in (f"p{i}" for i in range(16))}
    assert (
        max(counts.values()) - min(counts.values()) <= 2
    )  # a prompt comes once in a step that two epochs share
    mixed = sum(len({int(uid[1:]) < 8 for uid in step}) > 1 for step in found)
    # One step in an epoch and one across its end mix lengths; without grouping three of four steps would.
    assert mixed <= 16


def test_the_order_follows_from_seed_and_epoch_and_a_resumed_run_draws_the_same():
    one, same, other = (sampler(range(3, 40), seed) for seed in (0, 0, 1))
    drawn = steps(one, 12, 5)
    assert drawn == steps(same, 12, 5) != steps(other, 12, 5)
    begun = sampler(range(3, 40))
    steps(begun, 9, 5)
    resumed = sampler(range(3, 40))
    resumed.load_state_dict(begun.state_dict())
    assert [p.uid for p in resumed.draw(2, 1)] + [p.uid for p in resumed.draw(3, 1)] == drawn[9]
    assert steps(resumed, 2, 5) == drawn[10:]


def test_a_column_tells_the_length():
    rows = data([9] * 8, tokens=[1, 50, 2, 60, 3, 70, 4, 80])
    drawing = GroupByLength(rows, stream=Stream(0), length_column="tokens")
    assert sorted(map(sorted, steps(drawing, 2, 4))) == [["p0", "p2", "p4", "p6"], ["p1", "p3", "p5", "p7"]]
    with pytest.raises(ConfigError, match="group_by_length.*no column 'length'"):
        GroupByLength(rows, stream=Stream(0), length_column="length")
