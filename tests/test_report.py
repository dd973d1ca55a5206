"""What a run leaves to look at: numbers under TRL's names, parquet, and a page that needs nothing else."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from pyarrow import parquet

from mmrl import page
from mmrl.objectives.policy_gradient import diagnose
from mmrl.report import (
    Console,
    Journal,
    Meter,
    Trackers,
    describe_lengths,
    describe_rewards,
    noted_sums,
    write_completions,
)
from mmrl.train import train
from mmrl.types import Outcome, Trajectory
from tests.tables import reward_table, step_table
from tests.toys import prompts, toy_run

TRL = {
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "rewards/share_right/mean",
    "rewards/share_right/std",
    "rewards/brevity/mean",
    "rewards/brevity/std",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "kl",
    "entropy",
    "grad_norm",
    "learning_rate",
    "loss",
    "step_time",
    "sampling/sampling_logp_difference/mean",
}


@pytest.fixture
def no_curves(monkeypatch):
    monkeypatch.setattr(page, "curves", lambda runs: [])


def exclaim(measured):
    """An exhibit: a fragment about what was measured."""
    return "".join(
        f"<figure>{name}: {len(found.rollouts)} rollouts!</figure>" for name, found in measured.items()
    )


# ---- a step


def test_a_step_is_reported_under_the_names_of_trl(tmp_path, no_curves):
    run = toy_run(tmp_path, references={"ref": "frozen"}, objective={"penalty": ["k3"]})
    train(run)
    records = run.journal.read()
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records:
        assert record.keys() >= TRL
        assert all(math.isfinite(value) for value in record.values())
    assert {"time/rollout", "time/reward", "time/learn"} <= records[0].keys()
    assert records[0]["kl"] == 0.0 < records[2]["kl"]
    # The table of logits begins uniform over six tokens.
    assert records[0]["entropy"] == pytest.approx(math.log(6), rel=1e-6)


def test_rewards_are_summed_with_their_weights():
    table = reward_table(
        {"right": [1.0, 0.0, 0.5, 0.5], "short": [-1.0, None, 0.0, -2.0]},
        weights={"right": 2.0, "short": 0.5},
        group=["a", "a", "b", "b"],
    )
    metrics = describe_rewards(table)
    # 2 - .5 = 1.5, 0, 1, 1 - 1 = 0: the mean is .625, squares of the distances .875, -.625, .375, -.625 add
    # up to 1.6875, a third of which is .5625.
    assert metrics["reward"] == 0.625
    assert metrics["reward_std"] == pytest.approx(0.75)
    assert metrics["rewards/right/mean"] == 0.5
    assert metrics["rewards/short/mean"] == -1.0
    assert metrics["rewards/short/std"] == pytest.approx(1.0)
    assert metrics["frac_reward_zero_std"] == 0.0
    assert not any("error_rate" in name for name in metrics)


def test_groups_whose_rewards_are_equal_are_counted():
    table = reward_table([1.0, 1.0, 0.0, 1.0, 7.0, None], group=["a", "a", "b", "b", "c", "d"])
    # The two rows of a, and the single one of c; of d nothing is known.
    assert describe_rewards(table)["frac_reward_zero_std"] == pytest.approx(3 / 5)


def test_demonstrations_are_not_what_the_policy_earned():
    table = reward_table([1.0, 3.0, 100.0], on_policy=[True, True, False], length=[1, 3, 50])
    metrics = {**describe_rewards(table), **describe_lengths(table)}
    assert (metrics["reward"], metrics["rewards/reward/mean"]) == (2.0, 2.0)
    assert metrics["completions/max_length"] == 3.0
    alone = reward_table([1.0, 3.0], on_policy=[False, False])
    assert describe_rewards(alone)["reward"] == 2.0, "unless there is nothing else"


def test_only_the_answer_of_a_row_is_its_reward():
    table = reward_table([[5.0, 1.0], [3.0]])
    assert describe_rewards(table)["reward"] == 2.0


def test_a_reward_that_applies_nowhere_is_not_a_number():
    metrics = describe_rewards(reward_table([None, None]))
    assert math.isnan(metrics["reward"]) and math.isnan(metrics["rewards/reward/mean"])
    assert metrics["rewards/reward/std"] == 0.0


def test_lengths_and_what_was_cut():
    tags = {"finish": ["stop", "length", "stop", "length"]}
    metrics = describe_lengths(reward_table([0.0] * 4, length=[2, 8, 4, 8], tags=tags))
    # (2 + 8 + 4 + 8) / 4, two of four cut, (2 + 4) / 2 ended by themselves.
    assert metrics == {
        "completions/mean_length": 5.5,
        "completions/min_length": 2.0,
        "completions/max_length": 8.0,
        "completions/clipped_ratio": 0.5,
        "completions/mean_terminated_length": 3.0,
    }


def test_where_everything_was_cut_nothing_ended_by_itself():
    metrics = describe_lengths(reward_table([0.0], length=[8], tags={"finish": ["length"]}))
    assert metrics["completions/clipped_ratio"] == 1.0
    assert "completions/mean_terminated_length" not in metrics


def test_notes_are_summed_over_the_steps_of_sampled_rows():
    def row(entropy, sampled=True):
        notes = {"entropy": torch.tensor(entropy)} if entropy else {}
        return Trajectory(prompts()[0], "p0", (), None, len(entropy), notes, sampled)

    rows = (row([1.0, 2.0, 3.0]), row([6.0]), row([]), row([100.0], sampled=False))
    assert noted_sums(rows, "entropy") == {"sum": 12.0, "steps": 4.0}


def test_divergences_are_means_over_steps():
    gap = math.log(2)
    # d = log pi / pi_ref is log 2 on one of two steps: exp(-d) + d - 1 = log 2 - 1/2, over two steps.
    new, batch = step_table([[-1.0, -1.0]], advantage=[1.0], ref=[[-1.0 - gap, -1.0]], slow=[[-1.0, -1.0]])
    metrics = diagnose(new, batch)
    assert metrics["kl"].item() == pytest.approx((gap - 0.5) / 2)
    assert metrics["kl/slow"] == 0.0


def test_the_gap_to_the_engine_is_over_noted_steps():
    new, batch = step_table(
        [[-1.0, -2.0], [-1.0]], advantage=[1.0, 1.0], notes={"logp": [[-1.5, -2.0], [None]]}
    )
    # |-1 + 1.5| = .5 on one of the three steps; nothing was noted of the last.
    assert diagnose(new, batch)["sampling/sampling_logp_difference/mean"].item() == pytest.approx(0.5 / 3)


def test_metrics_of_micro_batches_add_up_and_updates_average():
    meter = Meter()
    for share, counts in ((0.25, 1.0), (0.5, 1.0), (9.0, 0.0)):
        meter.add({"loss": torch.tensor(share)}, counts)
    meter.updates += 1
    meter.add({"loss": torch.tensor(0.25)}, 1.0)
    meter.updates += 1
    # .75 in the first update, .25 in the second; a repeated micro-batch counts 0.
    assert meter.take() == {"loss": 0.5}
    assert meter.take() == {}


# ---- where they go


def test_a_journal_forgets_what_comes_after_a_checkpoint(tmp_path):
    journal = Journal(tmp_path)
    for step in range(4):
        journal.write({"step": step, "reward": step / 4})
    journal.rewind(2)
    assert [record["step"] for record in journal.read()] == [0, 1]
    journal.path.write_text(journal.path.read_text() + '{"step": 2, "rew')
    assert [record["step"] for record in journal.read()] == [0, 1]
    assert [json.loads(line)["step"] for line in journal.path.read_text().splitlines()[:2]] == [0, 1]


def test_completions_are_a_row_each_with_rewards_and_advantages(tmp_path):
    table = reward_table({"right": [1.0, None], "size": [3.0, 4.0]}, weights={"size": 0}, process=[0, 0])
    outcomes = (Outcome(text="probe", end=1), Outcome(text="answer"))
    rows = tuple(Trajectory(prompts()[i], f"p{i}", outcomes, None, 2 + i, on_policy=not i) for i in range(2))
    write_completions(tmp_path / "deep" / "c.parquet", rows, table, [0.5, -0.5])
    assert parquet.read_table(tmp_path / "deep" / "c.parquet").to_pydict() == {
        "uid": ["p0", "p1"],
        "prompt": ["say 1", "say 2"],
        "completion": ["answer", "answer"],
        "on_policy": [True, False],
        "length": [2, 3],
        "advantage": [0.5, -0.5],
        "reward/right": [1.0, pytest.approx(math.nan, nan_ok=True)],
        "reward/size": [3.0, 4.0],
    }


def test_a_run_writes_the_rows_it_learned_from(tmp_path, no_curves):
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


def test_completions_and_lines_may_be_fewer(tmp_path, no_curves):
    report = {"log_completions": False, "logging_steps": 2, "trackers": []}
    run = toy_run(tmp_path, report=report, max_steps=5)
    train(run)
    assert not (tmp_path / "completions").exists()
    # Every second step, and the last.
    assert [record["step"] for record in run.journal.read()] == [1, 3, 4]


def test_plain_lines_where_there_is_no_terminal(capsys):
    console = Console("grounding", 10)
    console.begin(0)
    console.step(3, {"reward": 0.12345, "step_time": 2.0, "unknown": 1.0})
    console.say("a word")
    console.end()
    # Six steps are left, of two seconds each.
    assert capsys.readouterr().out == "grounding 4/10  reward 0.123  step_time 2  eta 12 s\na word\n"
    quiet = Console("grounding", 10, quiet=True)
    quiet.step(3, {"reward": 0.1})
    quiet.say("a word")
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_progress_and_is_left_as_it_was(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    console = Console("grounding", 10)
    console.begin(2)
    console.step(3, {"reward": 0.5})
    assert console.progress.tasks[0].completed == 4
    assert console.progress.tasks[0].fields["words"] == "reward 0.5"
    console.say("install mmrl[tensorboard]")
    console.end()
    assert console.progress is None
    assert "install mmrl[tensorboard]\n" in capsys.readouterr().out


def test_an_unknown_tracker_is_an_error_and_a_missing_one_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no tracker is called 'wandb'; there is tensorboard"):
        Trackers(["wandb"], tmp_path, print)
    said = []
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    trackers = Trackers(["tensorboard"], tmp_path, said.append)
    trackers.write({"reward": 1.0}, 0)
    assert len(said) == 1 and "tensorboard is not installed" in said[0]


# ---- the page


def outside(text: str) -> list[str]:
    """List what a page would fetch."""
    return re.findall(
        r"""(?:src|href|url\(|@import|srcset|data)\s*[=(]\s*["']?\s*((?:https?:)?//[^\s"'>)]*)""", text
    )


def test_what_a_page_would_fetch_is_noticed():
    assert outside('<img src="https://a/b.png">') == ["https://a/b.png"]
    assert outside("<link href='//a/b.css'>") == ["//a/b.css"]
    assert outside("<img src='data:image/png;base64,iVBO//x'><a href='#x'>") == []


def test_the_page_is_self_contained_and_shows_what_there_is(tmp_path):
    run = toy_run(
        tmp_path / "a<b",
        evaluation={"data": {"name": "tests.toys:prompts", "num": 3}, "num_generations": 2},
        report={"trackers": [], "exhibits": [f"{__name__}:exclaim"]},
        eval_steps=1,
        max_steps=2,
    )
    train(run)
    text = (run.folder / "report.html").read_text()
    assert outside(text) == []
    assert "<script" not in text
    assert "<h1>a&lt;b</h1>" in text and "2 steps reported" in text
    for title in ("reward", "held-out metrics", "entropy", "answer length", "loss and gradient"):
        assert f"<figcaption>{title}</figcaption>" in text
    assert "divergence from the reference" not in text, "there is none"
    assert text.count("<svg") == text.count("</svg>") == text.count("<figcaption>")
    assert "answer: 6 rollouts!" in text
    low, high = run.final.intervals["brevity"]
    assert f"{run.final.metrics['brevity']:.3f} <small>{low:.3f} – {high:.3f}</small>" in text
    assert "name: tests.toys:brevity" in text, "the configuration"


def test_curves_leave_out_what_is_not_finite():
    records = [{"step": 0, "reward": 1.0, "kl": math.nan}, {"step": 1, "reward": math.inf, "kl": math.nan}]
    figures = page.curves({"run": records})
    assert len(figures) == 1 and "<figcaption>reward</figcaption>" in figures[0]


def test_a_run_without_evaluation_has_a_page_as_well(tmp_path):
    path = page.write_page(tmp_path, [], None, [])
    text = path.read_text()
    assert "0 steps reported" in text and "Held out" not in text
