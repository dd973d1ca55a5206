"""Files of a run: the journal, warnings, completions as parquet, and what trackers receive."""

from __future__ import annotations

import json
import math

import pytest
import torch
from pyarrow import parquet

from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Trajectory
from mmrl.reporting.answers import keeps_images, write_completions
from mmrl.reporting.metrics import Journal, Trackers
from mmrl.training.checkpointing import resume
from mmrl.training.loop import train
from mmrl.training.score import RewardFault
from tests.support.tables import reward_table
from tests.support.toys import prompts, toy_run


def test_a_journal_forgets_what_comes_after_a_checkpoint(tmp_path):
    journal = Journal(tmp_path)
    for step in range(4):
        journal.write({"step": step, "reward": step / 4})
    journal.rewind(2)
    assert [record["step"] for record in journal.read()] == [0, 1]
    journal.path.write_text(journal.path.read_text() + '{"step": 2, "rew')
    assert [record["step"] for record in journal.read()] == [0, 1]
    assert [json.loads(line)["step"] for line in journal.path.read_text().splitlines()[:2]] == [0, 1]


@pytest.mark.parametrize("bad", [b"\x00\x00\xff", b'{"step": 1, "rew', b"3", b"{}", b'{"step": null}'])
def test_a_damaged_line_is_named_and_costs_only_itself(tmp_path, caplog, bad):
    journal = Journal(tmp_path)
    for step in range(4):
        journal.write({"step": step, "reward": step / 4})
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join([lines[0], bad + b"\n", *lines[2:], b'{"step": 4, "re']))
    assert [record["step"] for record in journal.read()] == [0, 2, 3]
    assert caplog.messages == [f"'{journal.path}': line 2 is damaged and left out"], "a torn end is normal"
    caplog.clear()
    journal.rewind(3)
    assert len(caplog.messages) == 1
    assert [record["step"] for record in journal.read()] == [0, 2] and len(caplog.messages) == 1


def test_a_record_is_given_as_it_will_be_read(tmp_path):
    journal = Journal(tmp_path)
    given = journal.write({"step": 0, "reward": 0.1, "kl": math.nan, "norm": math.inf, "by": "doctor"})
    assert (
        str(given)
        == str(journal.read()[0])
        == str({"step": 0, "reward": 0.1, "kl": math.nan, "norm": math.nan, "by": "doctor"})
    )


@pytest.mark.parametrize("moment", [OSError("No space left on device"), KeyboardInterrupt()], ids=str)
def test_completions_are_whole_or_not_there(tmp_path, monkeypatch, moment):
    table = reward_table({"right": [1.0]}, process=[0])
    rows = (Trajectory(prompts()[0], "p0", (Outcome(text="answer"),), None, 2),)

    def fails(data, path):
        path.write_bytes(b"PAR1 half")
        raise moment

    write_completions(tmp_path / "c.parquet", rows, table, [0.5])
    before = (tmp_path / "c.parquet").read_bytes()
    monkeypatch.setattr(parquet, "write_table", fails)
    with pytest.raises(type(moment)):
        write_completions(tmp_path / "c.parquet", rows, table, [-0.5])
    assert (tmp_path / "c.parquet").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c.parquet"]


def test_completions_are_a_row_each_with_rewards_and_advantages(tmp_path):
    table = reward_table({"right": [1.0, None], "size": [3.0, 4.0]}, weights={"size": 0}, process=[0, 0])
    outcomes = (Outcome(text="probe", end=1), Outcome(text="answer"))
    rows = tuple(Trajectory(prompts()[i], f"p{i}", outcomes, None, 2 + i, on_policy=not i) for i in range(2))
    write_completions(tmp_path / "deep" / "c.parquet", rows, table, [0.5, -0.5])
    assert parquet.read_table(tmp_path / "deep" / "c.parquet").to_pydict() == {
        "uid": ["p0", "p1"],
        "prompt": ["say 1", "say 2"],
        "target": ["1", "2"],
        "completion": ["answer", "answer"],
        "on_policy": [True, False],
        "length": [2, 3],
        "advantage": [0.5, -0.5],
        "reward": [1.0, pytest.approx(math.nan, nan_ok=True)],
        "reward/right": [1.0, pytest.approx(math.nan, nan_ok=True)],
        "reward/size": [3.0, 4.0],
    }


def test_a_run_writes_the_rows_it_learned_from(tmp_path):
    run = toy_run(tmp_path, max_steps=2)
    train(run)
    paths = sorted((tmp_path / "completions").iterdir())
    assert [path.name for path in paths] == ["completions_000000.parquet", "completions_000001.parquet"]
    rows = parquet.read_table(paths[0]).to_pydict()
    assert len(rows["uid"]) == 16 and len(set(rows["uid"])) == 4
    total = [a + 0.5 * b for a, b in zip(rows["reward/share_right"], rows["reward/brevity"], strict=True)]
    for uid in set(rows["uid"]):
        members = [i for i in range(16) if rows["uid"][i] == uid]
        mean = sum(total[i] for i in members) / 4
        for i in members:  # above the mean of the group, or below it
            assert (rows["advantage"][i] > 1e-9) == (total[i] - mean > 1e-9)
    assert rows["completion"][0].split() == [w for w in rows["completion"][0].split() if w in "12345"]


def test_what_rewards_log_is_in_the_journal_and_beside_the_completions(tmp_path):
    rewards = ["tests.rewards.trl_style:logs_length"]
    train(toy_run(tmp_path, rewards=rewards, learn={"num_iterations": 2}, max_steps=2))
    journal = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["progress"] for line in journal] == [0.0, 0.5]  # 0 and 2 of 4 optimizer steps
    rows = parquet.read_table(tmp_path / "completions" / "completions_000001.parquet").to_pydict()
    assert rows["words"] == [len(text.split()) for text in rows["completion"]]
    assert rows["last"] == [text[-1:] or None for text in rows["completion"]]


def test_a_metric_that_the_run_has_already_cannot_be_logged(tmp_path):
    rewards = ["tests.rewards.trl_style:logs_a_metric_of_the_run"]
    with pytest.raises(RewardFault, match="log_metric\\('reward', ...\\): the run has a metric of this name"):
        train(toy_run(tmp_path, rewards=rewards))


def test_completions_and_lines_may_be_fewer(tmp_path):
    report = {"log_completions": False, "logging_steps": 2, "trackers": []}
    run = toy_run(tmp_path, report=report, max_steps=5)
    train(run)
    assert not (tmp_path / "completions").exists()
    # Every second step, and the last.
    assert [record["step"] for record in run.journal.read()] == [1, 3, 4]


def test_images_are_kept_at_equal_distances():
    assert [step for step in range(100) if keeps_images(step, 100, 5)] == [0, 25, 50, 74, 99]
    assert [step for step in range(3) if keeps_images(step, 3, 5)] == [0, 1, 2]
    assert [step for step in range(9) if keeps_images(step, 9, 1)] == [0]
    assert not any(keeps_images(step, 9, 0) for step in range(9))


def test_completions_keep_small_images_of_the_first_prompts(tmp_path):
    grey = torch.full((2, 3, 10, 20), 90, dtype=torch.uint8)
    seen = Media("video", "clip", lambda: Frames(grey, torch.arange(2.0).double(), 2.0))
    rows = []
    for i in range(10):
        prompt = Prompt(f"p{i}", (Message("user", (Part(media=seen if i != 1 else None), Part("what"))),))
        made = Outcome(image=grey[0]) if i < 9 else Outcome(image=grey[0].float())
        rows.append(Trajectory(prompt, prompt.uid, (made,), None, 1))
    table = reward_table([0.0] * 10)
    write_completions(tmp_path / "c.parquet", tuple(rows), table, [0.0] * 10, images=True)
    columns = parquet.read_table(tmp_path / "c.parquet").to_pydict()
    # Eight prompts keep images, of which the second was not shown anything.
    assert [cell is not None for cell in columns["seen"]] == [i < 8 and i != 1 for i in range(10)]
    assert [cell is not None for cell in columns["made"]] == [i < 8 for i in range(10)]
    assert columns["made"][0][:2] == b"\xff\xd8", "JPEG"
    write_completions(tmp_path / "d.parquet", tuple(rows), table, [0.0] * 10)
    assert not {"seen", "made"} & set(parquet.read_schema(tmp_path / "d.parquet").names)


def test_warnings_are_kept_with_their_steps_and_forgotten_behind_a_checkpoint(tmp_path):
    run = toy_run(tmp_path, max_steps=1)
    resume(run)
    for step, text in ((0, "early"), (3, "late"), (3, "late")):
        run.stream.step = step
        run.report.warn(text, by="doctor")
    assert run.report.warnings.read() == [
        {"step": 0, "by": "doctor", "text": "early"},
        {"step": 3, "by": "doctor", "text": "late"},
    ]
    again = toy_run(tmp_path, max_steps=1)
    assert resume(again) == 0
    assert again.report.warnings.read() == again.report.raised == []


class Dashboard:
    """A tracker that remembers."""

    def __init__(self):
        self.told = []

    def open(self, folder, config, start):
        self.told.append((folder.name, config["seed"], start))
        return "here it is"

    def write(self, metrics, step):
        self.told.append((step, dict(metrics)))

    def close(self):
        self.told.append("closed")


def test_dashboards_get_finite_numbers_between_opening_and_closing(tmp_path):
    said, one = [], Dashboard()
    trackers = Trackers([one])
    trackers.write({"reward": 1.0}, 0)  # of a process that opens none
    trackers.open(tmp_path, {"seed": 7}, 3, said.append)
    trackers.write({"reward": 1.0, "kl": math.nan, "loss": math.inf}, 3)
    trackers.close()
    trackers.close()
    assert one.told == [(tmp_path.name, 7, 3), (3, {"reward": 1.0}), "closed"]
    assert said == ["here it is"]
