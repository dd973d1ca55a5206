"""An evaluation: every prompt once, the same draws every time, and intervals around the metrics."""

from __future__ import annotations

import pytest
import torch

from mmrl.build import build, held_out, load_evaluator, make_evaluator
from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, ConfigError, EvaluateConfig, Piece, as_piece, parse
from mmrl.core.rng import Stream
from mmrl.diagnostics.checks.training_metrics import DIFFERENCE, logprob_mismatch
from mmrl.reporting import html
from mmrl.reporting.intervals import student_t
from mmrl.reporting.metrics import Journal, steps_taken
from mmrl.rewards.adapters import per_outcome
from mmrl.runtime.distributed import Processes
from mmrl.training import evaluate
from mmrl.training.loop import train
from tests.support.tables import reward_table
from tests.support.toys import plan, toy_run

DATA = {"name": "tests.support.toys:prompts", "num": 6}
RESAMPLES = 1000  # what a run has, and other tests have not


@pytest.fixture
def as_many_resamples(monkeypatch):
    monkeypatch.setattr(evaluate, "RESAMPLES", RESAMPLES)


@per_outcome
def by_prompt(prompt, outcome):
    """Give p0 to p5 the numbers 0 to 5, whatever they are answered."""
    return float(prompt.uid[1:])


@per_outcome
def even_only(prompt, outcome):
    return None if int(prompt.uid[1:]) % 2 else float(prompt.uid[1:])


def largest(table):
    """A metric of a table."""
    return {"largest": float(table.at_end("by_prompt").max())}


def measuring(folder, **evaluation):
    return toy_run(folder, evaluation={"data": DATA, **evaluation}).evaluator


def test_every_prompt_is_answered_as_often_as_asked(tmp_path):
    measured = measuring(tmp_path, num_generations=3).measure()
    assert measured.table.uids == tuple(f"p{i}" for i in range(6) for _ in range(3))
    assert len(measured.rollouts) == 18


def test_only_some_prompts_if_wanted(tmp_path):
    assert measuring(tmp_path, num_prompts=2).measure().table.uids == ("p0", "p1")


def test_chunks_do_not_matter(tmp_path, monkeypatch):
    whole = measuring(tmp_path, num_generations=2).measure()
    monkeypatch.setattr(evaluate, "CHUNK", 4)
    parts = measuring(tmp_path, num_generations=2).measure()
    assert parts.table.uids == whole.table.uids
    assert torch.equal(parts.table.values, whole.table.values)
    assert parts.intervals == whole.intervals


def test_metrics_are_those_of_the_answers(tmp_path):
    rewards = [f"{__name__}:by_prompt", f"{__name__}:even_only"]
    metrics = ["mean", {"name": "recall_at", "of": "by_prompt", "at": [4.0]}, f"{__name__}:largest"]
    measured = measuring(tmp_path, rewards=rewards, metrics=metrics, num_generations=2).measure()
    # 0 to 5 on average, 4 and 5 among them; 0, 2 and 4 are even.
    assert measured.metrics["by_prompt"] == 2.5
    assert measured.metrics["by_prompt@4"] == pytest.approx(1 / 3)
    assert measured.metrics["even_only"] == 2.0
    assert measured.metrics["largest"] == 5.0
    assert measured.metrics["completions/mean_length"] == measured.table.length.double().mean()
    assert measured.metrics["seconds_per_prompt"] > 0
    assert set(measured.intervals) == {"by_prompt", "by_prompt@4", "even_only", "largest"}


def test_intervals_contain_the_metric_and_narrow_with_the_confidence(tmp_path, as_many_resamples):
    rewards = [f"{__name__}:by_prompt"]
    wide = measuring(tmp_path, rewards=rewards).measure()
    low, high = wide.intervals["by_prompt"]
    assert 0 <= low < wide.metrics["by_prompt"] < high <= 5
    # The mean of 6 draws from 0 to 5 has the deviation sqrt(35 / 12 / 6) = 0.697. Of six prompts, t with 5
    # degrees of freedom is 2.571 and 0.727 where the normal has 1.960 and 0.674, times sqrt(6 / 5).
    assert high - low == pytest.approx(2 * 2.571 * 1.095 * 0.697, rel=0.1)
    narrow = measuring(tmp_path, rewards=rewards, confidence=0.5).measure().intervals["by_prompt"]
    assert narrow[1] - narrow[0] == pytest.approx(2 * 0.727 * 1.095 * 0.697, abs=1 / 3)  # ends are sixths


def test_quantiles_of_students_t_are_those_of_tables():
    tables = {3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 29: 2.045, 99: 1.984}
    for freedom, wanted in tables.items():
        assert student_t(1.959964, freedom) == pytest.approx(wanted, rel=0.01)


def test_all_right_or_all_wrong_is_not_certain():
    evaluator = object.__new__(evaluate.Evaluator)
    evaluator.confidence = 0.95
    right, wrong = torch.ones(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    # Wilson: 1 / (1 + z^2 / n) with z^2 = 3.8415; for none of 200, z^2 / n over 1 + z^2 / n.
    assert evaluator.interval(right, 5) == (pytest.approx(1 / 1.7683, abs=1e-4), 1)
    assert evaluator.interval(wrong, 200) == (0, pytest.approx(0.0192075 / 1.0192075, abs=1e-6))
    assert evaluator.interval(wrong, 200, difference=True) == (0, 0)


def test_prompts_are_drawn_for_an_interval_not_answers(tmp_path):
    # With ten equal answers to every prompt there are still six things that were measured.
    once = measuring(tmp_path, rewards=[f"{__name__}:by_prompt"]).measure().intervals
    often = measuring(tmp_path, rewards=[f"{__name__}:by_prompt"], num_generations=10).measure().intervals
    assert often == once


@per_outcome
def first_two(prompt, outcome):
    """Give p0 and p1 full marks; no other prompt has this task."""
    return 1.0 if prompt.uid in ("p0", "p1") else None


def test_an_interval_counts_the_prompts_that_its_reward_is_for(tmp_path):
    measured = measuring(tmp_path, rewards=[f"{__name__}:first_two"], num_generations=3).measure()
    # Wilson of 2 of 2, and not of 6 of 6: 1 / (1 + 3.8415 / 2).
    assert measured.intervals["first_two"] == (pytest.approx(0.34238, abs=1e-4), 1.0)


def test_without_variation_an_interval_is_a_point():
    evaluator = object.__new__(evaluate.Evaluator)
    evaluator.stream, evaluator.confidence = Stream(), 0.9
    evaluator.metrics = [Pieces(Stream()).make("metric", Piece("mean"))]
    table = reward_table([3.0, 3.0, 3.0], group=["a", "b", "c"])
    samples = evaluator.resample(table)
    assert {name: evaluator.interval(drawn, 3) for name, drawn in samples.items()} == {"reward": (3.0, 3.0)}


@pytest.mark.parametrize(
    ("metric", "rewards", "wanted"),
    [
        # Of as many answers of 0 and 1 to each prompt, pass@1 is the mean reward, however often one is drawn.
        ({"name": "pass_at", "of": "reward", "k": [1]}, [1, 1, 0, 0, 0, 0, 1, 0], None),
        # The first answers all have 0, the second ones 1: the deviation of 0 and 1 is sqrt(1/2).
        ({"name": "runs_needed", "of": "reward", "difference": 0.5}, [0, 1] * 4, 0.5**0.5),
    ],
    ids=["pass_at", "runs_needed"],
)
def test_a_prompt_that_is_drawn_twice_counts_as_two_groups(metric, rewards, wanted):
    evaluator = object.__new__(evaluate.Evaluator)
    evaluator.stream = Stream()
    made = Pieces(Stream())
    evaluator.metrics = [made.make("metric", Piece("mean")), made.make("metric", as_piece(metric, ""))]
    drawn = evaluator.resample(reward_table(rewards, group="aabbccdd"))
    found = drawn["pass@1" if wanted is None else "run_std"]
    torch.testing.assert_close(found, drawn["reward"] if wanted is None else torch.full_like(found, wanted))


def test_prompts_of_a_cluster_are_drawn_together():
    evaluator = object.__new__(evaluate.Evaluator)
    evaluator.stream = Stream()
    metrics = ({"name": "grouped_minimum", "of": "reward", "label": "all"}, {"name": "mean", "of": "reward"})
    evaluator.metrics = [Pieces(Stream()).make("metric", as_piece(metric, "")) for metric in metrics]
    # Of both clusters, one prompt of two is right: drawn apart, a sample could have right ones alone.
    tags = {"cluster": ["x", "x", "y", "y"]}
    drawn = evaluator.resample(reward_table([1, 0, 0, 1], group="abcd", tags=tags))
    assert set(drawn["all"].tolist()) == {0.0} and set(drawn["reward"].tolist()) == {0.5}
    # Without a cluster, a prompt is a unit of its own.
    loose = evaluator.resample(reward_table([1, 0, 0, 1], group="abcd", tags={"cluster": ["x", "x", "", ""]}))
    assert len(set(loose["reward"].tolist())) > 2


def test_draws_are_the_same_every_time_and_of_their_own(tmp_path):
    run = toy_run(tmp_path, evaluation={"data": DATA, "num_generations": 4})
    first = run.evaluator.measure()
    run.tick(5)  # training moves on, the evaluation does not
    again = run.evaluator.measure()
    assert torch.equal(first.table.values, again.table.values)
    assert first.intervals == again.intervals
    other = toy_run(
        tmp_path / "b", seed=1, evaluation={"data": DATA, "num_generations": 4}
    ).evaluator.measure()
    assert not torch.equal(first.table.length, other.table.length)
    run.tick(0)
    asked = [prompt for prompt in run.evaluator.data for _ in range(4)]
    trained = [row.length for row in run.method.engine.rollout(asked)]
    assert trained != first.table.length.tolist(), "evaluation and training have streams of their own"


def test_measuring_changes_nothing(tmp_path):
    run = toy_run(tmp_path, evaluation={"data": DATA})
    run.evaluator.measure()
    assert run.policy.table.grad is None
    assert run.method.sampler.drawn == 0
    assert not run.policy.table.any()


def test_intervals_may_be_left_out(tmp_path):
    assert measuring(tmp_path).measure(intervals=False).intervals == {}


def test_what_is_left_open_is_taken_from_the_training(tmp_path):
    # The first engine and the rewards of the training; demonstrations belong to learning only.
    engine = ["tests.support.toys:ToyGenerate", "with_demos"]
    run = toy_run(tmp_path, rollout={"engine": engine}, evaluation={"data": DATA, "num_generations": 2})
    measured = run.evaluator.measure()
    assert all(row.on_policy for row in measured.rollouts)
    assert set(measured.table.scored) == {"share_right", "brevity"}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"data": {**DATA, "num": 0}}, "evaluation.data: 'tests.support.toys:prompts' has no prompts"),
        ({"data": DATA, "num_generations": 0}, "'evaluation.num_generations' must be at least 1, not 0"),
        (
            {"data": DATA, "confidence": 1.5},
            "'evaluation.confidence' must be more than 0 and less than 1, not 1.5",
        ),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path, wanted, message):
    with pytest.raises(ConfigError, match=message):
        toy_run(tmp_path, evaluation=wanted)


def test_a_label_alone_can_be_evaluated(tmp_path):
    rewards = [{"name": f"{__name__}:by_prompt", "weight": 0}]
    assert measuring(tmp_path, rewards=rewards).measure().metrics["by_prompt"] == 2.5


def test_an_evaluation_needs_no_training(tmp_path):
    raw = plan(tmp_path, evaluation={"data": DATA})
    pieces = Pieces(Stream())
    config = parse(raw, Config)
    policy = pieces.make("policy", config.policy)
    assert make_evaluator(config, held_out(config), policy, Processes()).measure().metrics["brevity"] < 0


def test_tables_of_the_same_prompts_get_the_same_draws(tmp_path):
    evaluator = measuring(tmp_path, rewards=[f"{__name__}:by_prompt"])
    table = evaluator.measure(intervals=False).table
    first = evaluator.resample(table)["by_prompt"]
    assert first.shape == (evaluate.RESAMPLES,) and first.std() > 0
    # Twice the reward is twice every draw: differences of pairs vary no more than the pairs do.
    doubled = table.replace(scored={"by_prompt": 2 * table.scored["by_prompt"]})
    assert torch.equal(evaluator.resample(doubled)["by_prompt"], 2 * first)


def seldom(table):
    """A metric that only some draws have."""
    return {"seldom": 1.0} if "p0" in table.uids else {}


def test_draws_without_a_metric_do_not_count(tmp_path, as_many_resamples):
    evaluator = measuring(tmp_path, metrics=[f"{__name__}:seldom"])
    drawn = evaluator.resample(evaluator.measure(intervals=False).table)["seldom"]
    # 6 draws of 6 prompts miss one with the chance (5 / 6)^6 = 0.335.
    assert float(drawn.isnan().double().mean()) == pytest.approx(0.335, abs=0.05)
    # Wilson of 6 of 6: 1 / (1 + 3.8415 / 6).
    assert evaluator.interval(drawn, 6) == (pytest.approx(0.60967, abs=1e-4), 1.0)


@pytest.mark.parametrize("name", ["engine", "rewards"])
def test_an_evaluation_alone_must_say_everything(name):
    whole = {"data": DATA, "engine": ["tests.support.toys:ToyGenerate"], "rewards": [f"{__name__}:by_prompt"]}
    raw = {"policy": "tests.support.toys:ToyText", "evaluation": {**whole, name: []}}
    with pytest.raises(ConfigError, match=f"'evaluation.{name}' is empty; name at least one"):
        load_evaluator(parse(raw, EvaluateConfig))


# ---- during training


AT_START = {"evaluation": {"data": DATA}, "eval_on_start": True, "eval_steps": 2, "save_steps": 2}


def test_an_evaluation_before_the_first_step_has_a_line_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    run = toy_run(tmp_path, **AT_START, max_steps=3)
    start = toy_run(tmp_path / "other", **AT_START).evaluator.measure()
    train(run)
    records = run.journal.read()
    assert [record["step"] for record in records] == [0, 0, 1, 2]
    assert records[0]["eval_share_right"] == start.metrics["share_right"]
    assert "reward" not in records[0] and "eval_share_right" not in records[1]
    assert [steps_taken(record) for record in records] == [0, 1, 2, 3]
    names = sorted(path.name for path in (tmp_path / "predictions").iterdir())
    assert names == [f"step-{step:06d}.parquet" for step in (0, 2, 3)]
    assert "3 steps reported" in (tmp_path / "report.html").read_text()


def test_it_is_not_measured_again_when_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "write_page", lambda folder: folder)
    train(toy_run(tmp_path, **AT_START, max_steps=3))
    first = Journal(tmp_path).read()[0]
    run = toy_run(tmp_path, **AT_START, max_steps=4)
    monkeypatch.setattr(run.report, "log_start", lambda measured: pytest.fail("measured twice"))
    assert not list((tmp_path / "predictions").glob("step-000004*"))
    train(run)
    assert str(run.journal.read()[0]) == str(first)


def test_an_evaluation_is_printed_with_its_interval_beside_the_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(html, "write_page", lambda folder: folder)
    run = build(parse(plan(tmp_path, **AT_START, max_steps=3), Config))
    train(run)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation at step")]
    assert [line.split(":")[0] for line in lines] == [f"evaluation at step {step}" for step in (0, 2, 3)]
    start, last = run.journal.read()[0]["eval_share_right"], run.final.metrics["share_right"]
    low, high = run.final.intervals["share_right"]
    assert "at the start" not in lines[0]
    assert f"share_right {last:.4g} ({low:.4g} to {high:.4g}), {start:.4g} at the start;" in lines[2]


def test_without_data_there_is_nothing_to_evaluate_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="'eval_on_start' is true, but 'evaluation.data' names nothing"):
        toy_run(tmp_path, eval_on_start=True)


def test_checks_of_the_first_step_read_the_first_step_of_training(tmp_path):
    start, step = {"step": 0, "eval_reward": 1.0}, {"step": 0, "reward": 1.0, DIFFERENCE: 0.5}
    (finding,) = logprob_mismatch([start, step])
    assert "at step 1" in finding.text
