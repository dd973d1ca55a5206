"""A run says whether it learns: updates are counted, and steps that move nothing are loud."""

from __future__ import annotations

import math

import pytest

from mmrl.reporting.metrics import Journal
from mmrl.rewards.adapters import per_outcome
from mmrl.training.learning_signal import FIRST, LASTING, LearningSignal, NoLearning, cause
from mmrl.training.loop import train
from tests.support.toys import toy_run

pytestmark = pytest.mark.usefixtures("no_page")


@per_outcome
def nothing(prompt, outcome):
    """Give 0 to every answer, as a cold model earns."""
    return 0.0


def cold(folder, **changes):
    return toy_run(folder, rewards=[f"{__name__}:nothing"], max_steps=LASTING + 2, **changes)


def test_a_run_that_moves_no_weight_is_warned_and_then_ends(tmp_path):
    run = cold(tmp_path)
    with pytest.raises(NoLearning, match=f"in the first {LASTING} steps: all answers of every prompt earned"):
        train(run)
    assert len(Journal(run.folder).read()) == LASTING
    (warned,) = [text for text in run.report.raised if "nothing was learned" in text]
    assert f"in the first {FIRST} steps" in warned and "demonstrations.md" in warned


def test_a_run_may_go_on_all_the_same(tmp_path):
    run = cold(tmp_path, learn={"on_no_learning": "warn"}, save_steps=4)
    train(run)
    assert run.signal.updates == 0 and Journal(run.folder).read()[-1]["updates"] == 0
    raised = "\n".join(run.report.raised)
    assert f"in the first {LASTING} steps" in raised
    assert "checkpoint-8 holds the same weights as the one before" in raised


def test_a_step_at_a_learning_rate_of_0_is_no_update(tmp_path):
    run = toy_run(tmp_path, max_steps=LASTING + 2, learn={"learning_rate": 0.0})
    with pytest.raises(NoLearning, match="learn.learning_rate is 0"):
        train(run)
    assert run.signal.updates == 0


def test_a_schedule_that_begins_at_0_ends_no_run(tmp_path):
    rate = {"name": "linear", "start": 0.0, "end": 0.1}
    train(run := toy_run(tmp_path, max_steps=3, learn={"learning_rate": rate}))
    assert run.signal.updates == 2
    texts = []
    signal = LearningSignal(True, texts.append)
    for _ in range(2 * LASTING):
        signal.see(0, {"learning_rate": 0.0}, scheduled=True)
    assert len(texts) == 2 and all("learn.learning_rate is 0" in text for text in texts)


def test_updates_are_counted_and_go_on_when_a_run_is_resumed(tmp_path):
    train(toy_run(tmp_path, max_steps=2, learn={"num_iterations": 2}))
    run = toy_run(tmp_path, max_steps=3, learn={"num_iterations": 2})
    train(run)
    assert [record["updates"] for record in Journal(run.folder).read()] == [2, 4, 6]
    assert run.signal.idle == 0 and not [text for text in run.report.raised if "learned" in text]


def test_a_run_that_stops_learning_later_is_warned_alone():
    texts = []
    signal = LearningSignal(True, texts.append)
    signal.see(1, {})
    for _ in range(2 * LASTING):
        signal.see(0, {"frac_groups_kept": 0.0})
    (text,) = texts
    assert text.startswith(f"no weight moved in the last {LASTING} steps: the group filter kept no group")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"frac_groups_kept": 0.0, "reward": 0.0}, "the group filter kept no group, since all answers"),
        (
            {
                "frac_groups_kept": 0.0,
                "reward": math.nan,
                "rewards/a/b/error_rate": 0.1,
                "rewards/c/error_rate": 0.0,
            },
            "every group was dropped, since 'a/b' failed for one of its answers",
        ),
        ({"frac_reward_zero_std": 1.0}, "all answers of every prompt earned the same"),
        ({"reward_std": 0.3, "learning_rate": 0.0}, "learn.learning_rate is 0"),
        ({"reward_std": 0.3, "learning_rate": 1.0, "skipped_updates": 2.0}, "updates were skipped"),
        ({"reward_std": 0.3, "learning_rate": 1.0}, "the loss has no gradient"),
    ],
)
def test_the_cause_is_read_off_the_metrics(metrics, words):
    assert words in cause(metrics)
