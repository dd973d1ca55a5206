"""Video-R1: answers to shuffled frames, and the bonus that compares them with those to the video."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mmrl.advantages.shape import total
from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.papers.video_r1 import WithShuffledFrames, length_band, temporal_contrast
from mmrl.training.collect import collect
from mmrl.training.loop import learnable, update
from mmrl.training.score import score
from mmrl.vision.engines.generate import Generate
from tests.support.resuming import EVERYTHING, assert_alike, killed, resumed
from tests.support.tables import assert_rows, reward_table
from tests.support.toys import toy_run
from tests.vision import tiny

FAMILY = "qwen2_5_vl"


@pytest.fixture
def policy(exact):
    return exact(FAMILY)


def answered(policy, prompts, *, seed=0, step=0, **options):
    """Answer prompts and shuffled copies of them."""
    stream = Stream(seed, step=step)
    engine = WithShuffledFrames(
        Generate(policy, stream=stream, max_completion_length=4), stream=stream, **options
    )
    return engine.rollout(prompts)


def shuffled(row):
    return row.outcomes[-1].tags.get("frames") == "shuffled"


# ---- the engine


def test_a_video_is_answered_half_as_often_again_and_an_image_is_not(policy):
    video, image = tiny.ask("v", tiny.clip(6), "when"), tiny.ask("i", tiny.picture(), "what")
    prompts = [video] * 5 + [image] * 5
    rows = answered(policy, prompts)
    assert [row.prompt.uid for row in rows] == ["v"] * 5 + ["i"] * 5 + ["v"] * 2
    assert [shuffled(row) for row in rows] == [False] * 10 + [True] * 2
    for row in rows:
        assert row.prompt is (video if row.prompt.uid == "v" else image) and row.group == row.prompt.uid
        assert row.on_policy is not shuffled(row) and "logp" in row.notes
    plain = Generate(policy, stream=Stream(0), max_completion_length=4).rollout(prompts)
    assert [row.steps.ids.tolist() for row in rows[:10]] == [row.steps.ids.tolist() for row in plain]


def test_a_copy_shows_the_same_frames_in_another_order(policy):
    """Two frames make a patch, so whole frames are compared before the processor."""
    video = tiny.ask("v", tiny.clip(6), "when")
    engine = WithShuffledFrames(Generate(policy, stream=Stream(0)), stream=Stream(0))
    frames, copy = video.media[0].load(), engine._shuffled(video).media[0]
    once, again = copy.load(), copy.load()
    assert torch.equal(once.pixels, again.pixels) and torch.equal(once.times, frames.times)
    assert not torch.equal(once.pixels, frames.pixels)
    order = [int((frames.pixels == frame).flatten(1).all(1).nonzero()) for frame in once.pixels]
    assert sorted(order) == list(range(6))


def test_the_order_is_one_per_prompt_and_step_and_depends_on_nothing_else(policy):
    # Both prompts show one video, so nothing but the draw can make a difference.
    prompts = [tiny.ask(uid, tiny.clip(8), "when") for uid in ("a", "b") for _ in range(4)]

    def seen(prompts, **options):
        rows = answered(policy, prompts, **options)
        return [row.steps.prompt.media["pixel_values_videos"] for row in rows if shuffled(row)]

    first = seen(prompts)
    assert torch.equal(first[0], first[1]) and torch.equal(first[2], first[3])
    assert not torch.equal(first[0], first[2])
    assert torch.equal(seen(prompts[4:])[0], first[2])  # as on another process
    assert not torch.equal(seen(prompts, step=1)[0], first[0])


def test_a_share_of_0_asks_nothing_more(policy):
    prompts = [tiny.ask("v", tiny.clip(), "when")] * 3
    assert not any(map(shuffled, answered(policy, prompts, share=0.0)))
    assert len(answered(policy, prompts, share=1.0)) == 6


# ---- the bonus


def contrasted(accuracy, other, *, group="", **options):
    """Add the bonus to one group of answers, and to others that are tagged as shuffled."""
    tags = {"frames": ["", *[""] * (len(accuracy) - 1), *["shuffled"] * len(other)]}
    named = {"accuracy": [*accuracy, *other], "format": [1.0] * (len(accuracy) + len(other))}
    table = reward_table(named, tags=tags, group=group)
    return temporal_contrast(table, of="accuracy", **options)


@pytest.mark.parametrize(
    "other, wanted",
    [
        ([1, 1], [1, 1, 0, 0]),  # p = 0.5 < 0.8: no bonus
        ([1, 0], [1.3, 1.3, 0, 0]),  # 0.5 >= 0.4
        ([0, 0], [1.3, 1.3, 0, 0]),
    ],
)
def test_correct_answers_gain_where_the_order_was_needed(other, wanted):
    table = contrasted([1, 1, 0, 0], other)
    assert_rows(table.values[:4, 0, 0], wanted)
    assert_rows(table.values[:, 1, 0], [1.0] * 6)
    assert table.scored["accuracy"][:4, 0].tolist() == [1, 1, 0, 0]


def test_the_bound_itself_earns_the_bonus_and_one_tenth_is_not_correct():
    # p = 0.4 = 0.8 * 0.5
    assert_rows(contrasted([0.4, 0.4], [0.5]).values[:2, 0, 0], [0.7, 0.7])
    assert_rows(contrasted([0.1, 0.11], [0.0]).values[:2, 0, 0], [0.1, 0.41])


def test_where_all_are_wrong_nothing_changes():
    assert_rows(contrasted([0, 0], [0]).values[:2, 0, 0], [0, 0])


def test_shuffled_answers_leave_the_group():
    table = total(contrasted([1, 0, 1], [1, 0]))
    assert table.learn[:, 0].tolist() == [True] * 3 + [False] * 2
    assert table.valid[:, 0, 0].tolist() == [True] * 3 + [False] * 2
    # format and 1.3, 0, 1.3: p = 2/3 >= .8 / 2
    assert_rows(table.values[:3, 0, 0], [2.3, 1.0, 2.3])


def test_groups_of_images_get_no_bonus():
    table = contrasted([1, 1, 1, 0], [0, 1], group="aabbaa")
    assert_rows(table.values[:4, 0, 0], [1.3, 1.3, 1, 0])
    plain = reward_table({"accuracy": [1, 0]})
    assert torch.equal(temporal_contrast(plain, of="accuracy").values, plain.values)


def test_answers_without_the_reward_neither_count_nor_gain():
    # p is the mean of one answer, 1; without it in the mean it would be 0.5 < 0.8
    assert_rows(contrasted([1, None], [1]).values[:1, 0, 0], [1.3])


def test_a_reward_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no reward called 'acuracy'"):
        temporal_contrast(reward_table({"accuracy": [1]}), of="acuracy")


def test_the_tags_of_the_engine_reach_the_chain(policy):
    rows = answered(policy, [tiny.ask("v", tiny.clip(), "when")] * 4)
    rows = tuple(
        replace(row, outcomes=(replace(row.outcomes[-1], recorded={"right": float(not shuffled(row))}),))
        for row in rows
    )
    reward = Pieces(Stream()).make("reward", Piece("precomputed", {"key": "right", "label": "right"}))
    table = temporal_contrast(score([reward], rows), of="right")
    assert_rows(table.values[:, 0, 0], [1.3] * 4 + [0.0] * 2)
    assert table.learn[:, 0].tolist() == [True] * 4 + [False] * 2


# ---- in a run

FILMED = {
    "data": "tests.papers.test_deepvideo_r1:filmed",
    "rollout": {"engine": ["tests.support.toys:ToyGenerate", "vision.with_shuffled_frames"]},
    "advantage": [
        {"name": "vision.temporal_contrast", "of": "share_right"},
        "total",
        "group_normalize",
    ],
}


def test_a_run_learns_from_answers_to_the_videos_alone(tmp_path):
    run = toy_run(tmp_path, **FILMED)
    run.tick(0)
    collection = collect(run)
    collection, credit, batch = learnable(run, collection)
    assert len(collection.table) == 4 * 6 and len(batch) == 4 * 4
    assert collection.table.group.unique(return_counts=True)[1].tolist() == [6] * 4
    update(run.learner, batch)
    run.finish(0, collection, credit)
    metrics = run.progress.reported
    assert metrics["time/rollouts_per_second"] > 0 and math.isfinite(metrics["loss"])
    # Rewards are reported of the answers to the videos.
    ordered = collection.table.ids["on_policy"][:, 0] == 1
    wanted = collection.table.select(ordered).at_end("share_right").mean()
    assert metrics["rewards/share_right/mean"] == pytest.approx(float(wanted))


def test_a_killed_run_goes_on_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)
    short = {**FILMED, "max_steps": 4, "save_steps": 2, "eval_steps": 0, "eval_on_start": False}
    short["rollout"] = {**EVERYTHING["rollout"], **FILMED["rollout"]}
    whole = resumed(tmp_path / "whole", **short)
    killed(tmp_path / "cut", at=3, **short)
    assert_alike(resumed(tmp_path / "cut", **short), whole)


def banded(rewards, length, **options):
    named = rewards if isinstance(rewards, dict) else {"accuracy": rewards}
    ends = [[steps] for steps in length]
    return length_band(reward_table(named, length=length, ends=ends), of="accuracy", **options).values[:, 0]


def test_correct_answers_of_medium_length_gain_both_bounds_included():
    length = [319, 320, 512, 513, 400]
    assert_rows(banded([1, 1, 0.5, 1, 0], length), [1, 1.2, 0.7, 1, 0])


def test_the_band_leaves_other_rewards_alone():
    named = {"format": [1, 0], "accuracy": [1, 0.5]}
    assert_rows(banded(named, [400, 400]), [1, 0])
    table = reward_table(named, length=[400] * 2, ends=[[400]] * 2)
    assert_rows(length_band(table, of="accuracy").values[:, 1], [1.2, 0.7])


def test_a_bonus_is_exact_in_double_precision():
    assert banded([1, 1], [400, 400], bonus=0.3).tolist() == [[1.3], [1.3]]  # 0.3 of float32 is 0.3000000119


def test_one_correct_answer_alone_gains_nothing():
    assert_rows(banded([1, 0.1, 0], [400, 400, 400]), [1, 0.1, 0])


def test_an_answer_is_correct_as_measured_whatever_the_chain_added_before():
    table = reward_table({"accuracy": [0.05, 1, 1]}, length=[400] * 3, ends=[[400]] * 3)
    raised = table.put(table.values + 0.3)
    assert_rows(length_band(raised, of="accuracy").values[:, 0], [0.35, 1.5, 1.5])


def test_rows_that_left_their_group_are_not_counted():
    table = reward_table({"accuracy": [1, 1]}, length=[400] * 2, ends=[[400]] * 2)
    left = table.replace(valid=table.valid & torch.tensor([True, False])[:, None, None])
    assert_rows(length_band(left, of="accuracy").values[:, 0], [1, 1])


def test_a_band_without_a_place_is_refused():
    piece = Piece("length_band", {"of": "accuracy", "shortest": 600})
    with pytest.raises(ConfigError, match="'advantage.shortest' must be at most 'longest', 512, not 600"):
        Pieces(Stream()).make("advantage", piece)
