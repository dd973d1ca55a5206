"""DR-IRL: factors of a label against its category, the mean over the run, and hardness by CLIP."""

from __future__ import annotations

import json

import pytest

from mmrl.core.types import Outcome
from mmrl.papers.grpo_s import CategoryScale, ClipHardness, hardness
from mmrl.runtime.clip_model import load_towers
from tests.rewards import tiny_clip
from tests.rewards.test_clip_score import asking
from tests.support.tables import assert_rows, reward_table


def hard(*labels, values=None, **options):
    """Build a table with one advantage of .866025 a row and a label `d`."""
    values = values or [0.866025] * len(labels)
    return reward_table({"total": values, "d": labels}, weights={"total": 1.0, "d": 0.0}, **options)


def test_an_answer_weighs_by_its_hardness_over_the_usual_one():
    # sigmoid(.8) / sigmoid(.5) = .689974 / .622459 = 1.108465; .866025 of it is .959959.
    table = hard(0.8, 0.2)
    scale = CategoryScale(of="d")
    assert scale(table).values.equal(table.values)  # nothing was seen yet
    scale.observe((), table)
    found = scale(table)
    assert_rows(found.values[:, 0, 0], [0.959959, 0.866025 * 0.549834 / 0.622459])
    # With alpha_M = 1.1: 1.055954.
    assert_rows(1.1 * found.values[:1, 0, 0], [1.055954])


def test_the_mean_is_over_the_run_and_is_restored():
    scale = CategoryScale(of="d")
    scale.observe((), hard(0.2, 0.3, 0.7))
    scale.observe((), hard(0.8, None))  # a collection is observed before its chain
    other = CategoryScale(of="d")
    other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    for piece in (scale, other):  # the mean of .2, .3, .7 and .8 is .5
        assert_rows(piece(hard(0.8, None)).values[:, 0, 0], [0.959959, 0.866025])


def test_the_gap_of_a_batch_is_compared_with_that_of_the_run():
    # Gaps of groups: .2 in the first batch; .7 and .9, so .8, in the second, and .5 over both.
    scale = CategoryScale(of="d", measure="gap")
    scale.observe((), hard(0.4, 0.6, 0.5, 0.7, group=[0, 0, 1, 1]))
    batch = hard(0.1, 0.8, 0.0, 0.9, group=[0, 0, 1, 1], values=[1.0, -1.0, 2.0, 0.0])
    scale.observe((), batch)
    assert_rows(scale(batch).values[:, 0, 0], [1.108465, -1.108465, 2.216930, 0.0])


def test_categories_are_compared_with_themselves():
    table = hard(0.8, 0.2, 0.9, tags={"category": ["harm", "harm", "fraud"]})
    found = CategoryScale(of="d", by=("category",))
    found.observe((), table)
    assert_rows(found(table).values[:, 0, 0], [0.959959, 0.764983, 0.866025])
    assert len(found.counts) == 2


def test_a_label_that_is_missing_is_named():
    with pytest.raises(ValueError, match="no reward is called 'd'"):
        CategoryScale(of="d")(reward_table([1, 0]))


def test_hardness_is_what_the_best_sentences_of_an_answer_lack():
    # The best cosines of three sentences of the reference are .1, .3 and .2, whose mean is .2: d = .8.
    assert hardness([[0.1, -0.5], [0.3, 0.2], [0.2, 0.2]]) == pytest.approx(0.8)
    assert hardness([[], []]) == 1.0  # an empty answer says nothing of it


def test_answers_are_compared_with_references_by_the_text_encoder(tmp_path):
    folder = tiny_clip.write_folder(tmp_path / "clip")
    label = ClipHardness(model=str(folder), references="steps")
    steps = ["Two dogs run in a park. A red ball lies there.", "Nobody sees the ball."]
    said = [
        "A red ball lies there.",
        "Nobody sees the ball. Two dogs run in a park. A red ball lies there.",
        "",
    ]
    prompts = [asking("what is it?", steps=steps)] * 3 + [asking("and here?")]
    found = label(prompts, [Outcome(text=text) for text in [*said, "Nobody sees the ball."]])
    assert found[1] == pytest.approx(0.0, abs=1e-6) and found[2] == 1.0 and found[3] is None
    reads = load_towers(str(folder), None, "auto").read(
        ["Two dogs run in a park.", "A red ball lies there.", "Nobody sees the ball."]
    )
    assert found[0] == pytest.approx(1 - float((reads @ reads[1]).mean()), abs=1e-5)
