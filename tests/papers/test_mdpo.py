"""mDPO: corrupted copies as rejected rows, the anchored loss, and the engine that makes them."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.pairs import best_vs_worst
from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.objectives.compare import sigmoid
from mmrl.papers.mdpo import WithCorruptedImage, anchor_chosen, corrupted_as_rejected, sigmoid_each
from mmrl.vision.engines.generate import Generate
from tests.advantages.test_pairs import BY
from tests.objectives.test_compare import LN2, gained, shown, slope, softplus
from tests.support.tables import assert_rows, reward_table
from tests.vision import tiny
from tests.vision.test_contrastive_decoding import FAMILY, pictures


def test_the_twin_of_the_best_row_is_one_more_worse_row():
    # two answers and their twins behind a spoilt image, which have the same rewards
    table = reward_table([0.2, 0.9, 0.2, 0.9], tags={"twin": ["", "", "crop", "crop"]})
    table = corrupted_as_rejected(best_vs_worst(table, by=BY))
    assert table.values[:, 0, 0].tolist() == [-1, 1, 0, -1]
    assert table.learn[:, 0].tolist() == [True, True, False, True]


def test_twins_of_a_tie_are_not_learned_from_either():
    table = reward_table([0.5, 0.5, 0.5, 0.5], tags={"twin": ["", "", "crop", "crop"]})
    assert not corrupted_as_rejected(best_vs_worst(table, by=BY)).learn.any()


def test_without_twins_nothing_changes():
    table = best_vs_worst(reward_table([0.2, 0.9]))
    assert torch.equal(corrupted_as_rejected(table).values, table.values)
    assert torch.equal(corrupted_as_rejected(table).learn, table.learn)


def test_a_twin_that_is_worse_by_one_of_two_rewards_is_learned_from():
    table = reward_table({"a": [1, 0], "b": [0, 0]}, tags={"twin": ["", "yes"]})
    table = table.put(torch.tensor([[[1.0], [0.0]], [[1.0], [0.0]]], dtype=torch.float64))
    found = corrupted_as_rejected(table)
    assert found.values[1, :, 0].tolist() == [-1, 0]
    assert found.learn.tolist() == [[True], [True]]


def test_sigmoid_each_weighs_by_the_size_of_advantages_and_leaves_rows_without_one_out():
    # .5 * 2 - .5 * .4 and .5 * 2 - .25 * .8
    implicit_reward, batch = gained([[2.0], [0.4], [0.8], [9.0]], [0.5, -0.5, -0.25, 0])
    shown(sigmoid_each(implicit_reward, batch, beta=1.0), softplus(-0.8) + softplus(-0.8))
    assert slope(sigmoid_each(implicit_reward, batch, beta=1.0), implicit_reward)[3] == 0


def logistic(x):
    return 1 / (1 + math.exp(-x))


PAIR = ([[2.0], [-1.0]], [1, -1])


def test_mdpo_costs_3_ln_2_at_the_reference():
    three = gained([[0.0], [0.0], [0.0]], [1, -1, -1])
    shown(sigmoid_each(*three) + anchor_chosen(*three), 3 * LN2)
    assert abs(3 * LN2 - 2.079442) < 1e-6


def test_the_anchor_reads_the_better_row_alone():
    implicit_reward, batch = gained(*PAIR)
    loss = anchor_chosen(implicit_reward, batch, beta=0.5, delta=0.25)
    shown(loss, softplus(-0.75))
    assert_rows(slope(loss, implicit_reward), [[-0.5 * logistic(-0.75)], [0.0]])


def test_mdpo_compares_with_the_worse_answer_and_with_the_worse_image():
    # rho 3 for the answer, 1 for the worse one, 2 behind the cropped image; beta .1
    three = gained([[3.0], [1.0], [2.0]], [1, -1, -1])
    shown(sigmoid_each(*three), softplus(-0.2) + softplus(-0.1))
    shown(sigmoid_each(*three) + anchor_chosen(*three), softplus(-0.2) + softplus(-0.1) + softplus(-0.3))
    # of two better rows the evidence adds up, as in a margin
    shown(sigmoid_each(*gained([[1.0], [2.0], [1.0]], [0.5, 0.5, -1]), beta=1.0), softplus(-0.5))


def test_each_worse_row_of_a_pair_is_the_only_one():
    pair = gained([[0.3, 0.1], [-0.2]], [1, -1])
    for level in ("row", "step"):
        shown(sigmoid_each(*pair, level=level), sigmoid(*pair, level=level))


@pytest.fixture
def policy(exact):
    return exact(FAMILY)


@pytest.mark.parametrize("kind", ["crop", "noise", "blind"])
def test_with_distortion_sets_every_answer_before_a_corrupted_image(policy, kind):
    stream = Stream(0)
    inner = Generate(policy, stream=stream, max_completion_length=6)
    engine = WithCorruptedImage(inner, stream=stream, kind=kind)
    prompts = [prompt for prompt in pictures() for _ in range(4)]
    rows = engine.rollout(prompts)
    twins = [row for row in rows if "twin" in row.outcomes[-1].tags]
    assert len(rows) == 8 and len(twins) == 4
    wholes = {(row.prompt.uid, row.outcomes[-1].text) for row in rows if row not in twins}
    for twin in twins:
        assert (twin.prompt.uid, twin.outcomes[-1].text) in wholes
        assert twin.prompt in prompts and twin.group == twin.prompt.uid and not twin.on_policy
        whole = policy.prompt_encoder.encode(twin.prompt)
        assert twin.steps.prompt.ids.tolist() != whole.ids.tolist() or not torch.equal(
            twin.steps.prompt.media["pixel_values"], whole.media["pixel_values"]
        )
    first, second = twins[:2]
    assert first.prompt.uid == second.prompt.uid


@pytest.mark.parametrize("kind", ["crop", "noise"])
def test_a_distortion_is_drawn_once_for_every_prompt_of_a_step(policy, kind):
    # Both prompts show one image, so nothing but the draw can make a difference.
    prompts = [tiny.ask(name, tiny.picture(seed=0), "what") for name in ("a", "b") for _ in range(4)]
    stream = Stream(0)
    engine = WithCorruptedImage(
        Generate(policy, stream=stream, max_completion_length=1), stream=stream, kind=kind
    )

    def shown() -> list[torch.Tensor]:
        rows = engine.rollout(prompts)
        twins = [row for row in rows if "twin" in row.outcomes[-1].tags]
        assert [row.prompt.uid for row in twins] == ["a", "a", "b", "b"]
        return [twin.steps.prompt.media["pixel_values"] for twin in twins]

    once = shown()
    assert torch.equal(once[0], once[1]) and torch.equal(once[2], once[3])
    assert not torch.equal(once[0], once[2])
    stream.step += 1
    assert not torch.equal(once[0], shown()[0])


def test_a_crop_wants_its_least_share_first():
    with pytest.raises(ConfigError, match="scale"):
        Pieces(Stream(0)).check("engine", Piece("vision.with_corrupted_image", {"scale": [0.3, 0.1]}))


@pytest.mark.parametrize("level", ["row", "step"])
def test_the_anchor_leaves_rows_without_a_label_and_groups_of_one_side_alone(level):
    rows = [[0.4, 0.3], [-0.2, 0.1], [5.0, 7.0]]
    reward, batch = gained(rows, [1, -1, 0])
    loss = anchor_chosen(reward, batch, level=level)
    shown(loss, anchor_chosen(*gained(rows[:2], [1, -1]), level=level).detach())
    assert slope(loss, reward).isfinite().all()
    for signs in ([1, 0.5], [-1, -1], [0, 0]):
        shown(anchor_chosen(*gained([[0.4], [0.3]], signs), level=level), 0.0)


@pytest.mark.parametrize(
    ("rows", "advantage"),
    [
        ([[0.4, 0.7], [0.1, 0.9]], [[1, 0], [-1, 0]]),
        ([[0.4, 0.7], [0.1]], [1, -1]),
        ([[0.4], [0.1, 0.7]], [1, -1]),
    ],
)
def test_a_column_that_decides_nothing_is_left_out_of_the_mean(rows, advantage):
    wanted = anchor_chosen(*gained([[0.4], [0.1]], [1, -1]), level="step").item()
    shown(anchor_chosen(*gained(rows, advantage), level="step"), wanted)
