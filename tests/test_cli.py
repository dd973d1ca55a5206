"""The command line: what it does, what it prints, and how it fails."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import mmrl
from mmrl.cli import main
from mmrl.rewards.adapters import per_outcome
from mmrl.runtime.files import LOCK, hold
from tests.support.toys import plan, prompts

HERE = "tests.test_cli"
EVALUATION = {"data": {"name": "tests.support.toys:prompts", "num": 4}, "num_generations": 2}


def too_few(prompts, outcomes):
    return [1.0]


@per_outcome
def undefined(prompt, outcome):
    return float("nan")


@per_outcome
def late(prompt, outcome):
    """Fail in two lines."""
    raise LookupError("no such span\nin 'a clip'")


def divided_by_nothing(log_ratio, new, batch):
    return new.logp * batch.advantage / 0.0


class Words:
    """A builder: write a list of words."""

    def __init__(self, *, words: tuple[str, ...]) -> None:
        self.words = words

    def build(self, output: Path) -> dict[str, Any]:
        output.mkdir(parents=True)
        (output / "words.txt").write_text("\n".join(self.words))
        return {"words": len(self.words)}


@pytest.fixture
def file(tmp_path):
    """Write a configuration of a small run, changed as wanted, and give its path."""

    def write(changes: Mapping[str, Any] | None = None, **more: Any) -> str:
        path = tmp_path / "run.yaml"
        raw = plan(tmp_path / "out", **{"max_steps": 2, **(changes or {}), **more})
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
        return str(path)

    return write


def failure(capsys, code: int, *arguments: str) -> str:
    """Run a command that fails, and give the one line that it says about it."""
    assert main(arguments) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert "Traceback" not in lines[0]
    assert lines[0].startswith(("error: ", "failed: "))
    return lines[0]


# ---- what it does


def test_train_leaves_everything_in_the_output_folder(file, tmp_path, capsys):
    assert main(["train", file(evaluation=EVALUATION)]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".lock",
        ".mmrl",
        "checkpoint-2",
        "completions",
        "config.yaml",
        "evaluation.json",
        "metrics.jsonl",
        "predictions",
        "predictions.html",
        "report.html",
    ]
    printed = capsys.readouterr().out
    assert "out 1/2  reward" in printed and "out 2/2  reward" in printed
    assert "report: " in printed
    assert "share_right" in printed and "interval" in printed, "the last evaluation, as a table"


def test_train_goes_on_where_it_stopped(file, tmp_path, capsys):
    assert main(["train", file()]) == 0
    assert main(["train", file(), "max_steps=3"]) == 0
    assert f"going on from {tmp_path / 'out' / 'checkpoint-2'}" in capsys.readouterr().out
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 3


def test_overrides_change_the_run(file, tmp_path):
    assert main(["train", file(), "max_steps=1", "rewards.1.weight=0.25", "learn.learning_rate=1e-3"]) == 0
    written = OmegaConf.load(tmp_path / "out" / "config.yaml")
    assert (written.max_steps, written.rewards[1].weight, written.learn.learning_rate) == (1, 0.25, 1e-3)


def test_evaluate_writes_numbers_and_a_page(file, tmp_path, capsys):
    assert main(["evaluate", file(evaluation=EVALUATION)]) == 0
    folder = tmp_path / "out" / "evaluation"
    written = json.loads((folder / "evaluation.json").read_text())
    assert written["metrics"]["brevity"] < 0
    low, high = written["intervals"]["brevity"]
    assert low <= written["metrics"]["brevity"] <= high
    page = (folder / "evaluation.html").read_text()
    assert "<h1>Evaluation</h1>" in page and '<a href="predictions.html">' in page
    assert (folder / "predictions.html").exists()
    assert "brevity" in capsys.readouterr().out


def rewards_in(folder):
    metrics = json.loads((folder / "evaluation.json").read_text())["metrics"]
    return {name: metrics[name] for name in ("share_right", "brevity")}


def test_the_folder_of_a_run_is_evaluated_with_its_last_checkpoint(file, tmp_path, capsys):
    run, path = tmp_path / "out", file(evaluation=EVALUATION, learn={"learning_rate": 0.5})
    assert main(["train", path]) == 0
    trained = rewards_in(run)
    assert main(["evaluate", path, f"output_dir={tmp_path / 'before'}"]) == 0
    assert main(["evaluate", str(run)]) == 0
    assert f"model: {run / 'checkpoint-2'}" in capsys.readouterr().out
    assert rewards_in(run / "evaluation") == trained != rewards_in(tmp_path / "before")
    assert main(["evaluate", str(run), "evaluation.num_generations=1", f"output_dir={tmp_path / 'one'}"]) == 0
    assert (tmp_path / "one" / "predictions.parquet").exists()
    assert "holds neither a run" in failure(capsys, 2, "evaluate", str(run / "completions"))


def test_an_evaluation_leaves_the_numbers_of_a_run_alone(file, tmp_path, capsys):
    run, path = tmp_path / "out", file(evaluation=EVALUATION, learn={"learning_rate": 0.5})
    assert main(["evaluate", path]) == 0  # before the run, which then begins beside it
    assert main(["train", path]) == 0
    trained, before = rewards_in(run), rewards_in(run / "evaluation")
    written = {
        name: (run / name).read_bytes() for name in ("evaluation.json", "report.html", "metrics.jsonl")
    }
    with hold(run):  # while it trains
        assert main(["evaluate", path, "policy.length=2"]) == 0
    assert {name: (run / name).read_bytes() for name in written} == written
    assert rewards_in(run) == trained and rewards_in(run / "evaluation") == before != trained
    assert rewards_in(run / "evaluation-2") != before
    capsys.readouterr()
    assert main(["evaluate", path, "policy.length=2"]) == main(["evaluate", path]) == 0  # the same ones again
    assert not (run / "evaluation-3").exists()
    refused = f"'{run}' was made by `mmrl train`, and `mmrl evaluate` does not write into it"
    assert refused in failure(capsys, 2, "evaluate", path, f"output_dir={run}")
    assert "was made by `mmrl evaluate`" in failure(capsys, 2, "train", path, f"output_dir={run}/evaluation")
    with hold(run / "evaluation"):
        assert "is in use by process" in failure(capsys, 2, "evaluate", path)
    assert main(["train", path, "overwrite_output_dir=true", "max_steps=1"]) == 0
    assert not (run / "evaluation").exists()


def test_a_place_where_nothing_can_be_written_is_known_before_the_first_step(file, tmp_path, capsys):
    (tmp_path / "taken").write_text("a file")
    for command in ("train", "evaluate", "check"):
        given = [file(evaluation=EVALUATION), f"output_dir={tmp_path / 'taken' / 'run'}"]
        assert main([command, *given]) == 2
        assert f"'{tmp_path / 'taken'}' is no folder" in "".join(capsys.readouterr())


def test_two_evaluations_are_compared_answer_by_answer(file, tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("short", "long")]
    config = file({"policy": {"name": "tests.support.toys:ToyText"}}, evaluation=EVALUATION)
    for path, length in zip(paths, (1, 4), strict=True):
        assert main(["evaluate", config, f"policy.length={length}", f"output_dir={path}"]) == 0
    capsys.readouterr()
    assert main(["compare", *paths, "--by", "brevity", "--output", str(tmp_path / "deep" / "both.html")]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("brevity")).split()
    better, worse, unchanged = map(int, line[3:6])  # longer answers cannot be briefer
    assert better == 0 and worse + unchanged == 4
    assert "4 prompts are in both" in printed and (tmp_path / "deep" / "both.html").exists()
    assert "did you mean 'brevity'?" in failure(capsys, 2, "compare", *paths, "--by", "brevty")
    assert "there are no predictions in" in failure(capsys, 2, "compare", str(tmp_path), paths[0])


def test_evaluate_reads_files_without_training(tmp_path, capsys):
    path = tmp_path / "evaluate.yaml"
    raw = {
        "policy": "tests.support.toys:ToyText",
        "evaluation": {
            **EVALUATION,
            "engine": ["tests.support.toys:ToyGenerate"],
            "rewards": ["tests.support.toys:brevity"],
        },
        "output_dir": str(tmp_path / "measured"),
    }
    path.write_text(json.dumps(raw))
    assert main(["check", str(path)]) == 0
    assert main(["evaluate", str(path), "evaluation.num_generations=1"]) == 0
    measured = tmp_path / "measured" / "evaluation.json"
    before = measured.read_bytes()
    assert "holds another evaluation: evaluation.num_generations is 1 there" in failure(
        capsys, 2, "evaluate", str(path)
    )
    assert measured.read_bytes() == before


def test_build_writes_what_it_is_told(tmp_path, capsys):
    path = tmp_path / "build.yaml"
    output = tmp_path / "data" / "words"
    raw = {"build": {"name": f"{HERE}:Words", "words": ["a", "b"]}, "output": str(output)}
    path.write_text(json.dumps(raw))
    assert main(["check", str(path)]) == 0
    assert main(["build", str(path), "build.words=[x,y,z]"]) == 0
    assert (output / "words.txt").read_text() == "x\ny\nz"
    assert f"{output}: words 3" in capsys.readouterr().out


def test_check_tells_of_every_file(file, tmp_path, capsys):
    good, variant, bad = file(), tmp_path / "variant.yaml", tmp_path / "bad.yaml"
    variant.write_text("advantage: [total, group_center]")
    bad.write_text("advantage: [total, group_centre]\n")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\n")
    assert main(["check", good, str(variant)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"ok     {good}", f"ok     {variant}"]
    assert main(["check", str(bad), good, str(broken)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3, "a line per file, whatever is wrong"
    assert lines[0].startswith(f"wrong  {bad}: ") and "did you mean 'group_center'?" in lines[0]
    assert lines[1] == f"ok     {good}"
    assert lines[2].startswith(f"wrong  {broken}: cannot read")


def test_check_makes_nothing(file, tmp_path):
    assert main(["check", file()]) == 0
    assert not (tmp_path / "out").exists()


def test_list_shows_names_options_and_a_sentence(capsys):
    assert main(["list", "surrogate"]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("clip "))
    assert "epsilon=0.2, epsilon_high=None" in line
    assert "cispo" in printed
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("advantage", "group_normalize", "vision.tokens", "adamw"))


def test_list_shows_when_a_check_runs(capsys):
    assert main(["list", "check"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["name"][1:3] == ["runs", "on"]
    assert (lines["metric_drop"][1], lines["gradient_flow"][1], lines["duplicate_ids"][1]) == (
        "training",
        "start",
        "data",
    )


def test_env_names_versions(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("python 3.")
    assert "\ntorch 2." in printed and "devices: " in printed


def test_load_engine_gives_something_that_rolls_out(file):
    engine = mmrl.load_engine(file(), ["policy={name: 'tests.support.toys:ToyText', length: 2}"])
    assert all(row.length <= 2 for row in engine.rollout(prompts()))


# ---- how it fails

WRONG = {
    "unknown key": ({"temprature": 1}, "there is no key 'temprature'; there are policy, data"),
    "misspelt key": ({"advantge": []}, "there is no key 'advantge'; did you mean 'advantage'?"),
    "misspelt key inside": (
        {"learn": {"learning_rte": 1.0}},
        "there is no key 'learn.learning_rte'; did you mean 'learning_rate'?",
    ),
    "wrong type": ({"max_steps": "many"}, "'max_steps' must be a whole number, not 'many'"),
    "wrong type inside": (
        {"rewards": [{"name": "tests.support.toys:brevity", "weight": "big"}]},
        "'rewards[0].weight' must be a number, not 'big'",
    ),
    "not a list": (
        {"rewards": 3},
        "'rewards[0]' must be a name, or a mapping with a name; not 3",
    ),
    "missing value": ({"data": None}, "'data' must be a name, or a mapping with a name; not None"),
    "misspelt piece": ({"advantage": ["totel"]}, "no advantage is called 'totel'; did you mean 'total'?"),
    "misspelt option": (
        {"objective": {"surrogate": {"name": "clip", "epsilon_hgh": 0.3}}},
        "objective.surrogate: surrogate 'clip' has no option 'epsilon_hgh'; it takes epsilon, epsilon_high",
    ),
    "missing piece": ({"objective": {"surrogate": None}}, "'objective.surrogate' must be a name"),
    "somebody else's piece": ({"rewards": ["nowhere:right"]}, "cannot import the reward 'nowhere:right'"),
    "no policy": ({"policy": "tests.support.toys:prompts"}, "is no policy: it does not declare `outputs`"),
    "no engine": (
        {"rollout": {"engine": ["tests.support.toys:prompts"]}},
        "is no engine: it does not declare `notes`",
    ),
    "empty data set": (
        {"data": {"name": "tests.support.toys:prompts", "num": 0}},
        "'tests.support.toys:prompts' has no prompts",
    ),
    "groups of one": (
        {"rollout": {"num_generations": 1}},
        "advantage[1]: 'group_normalize' compares the rollouts of a prompt, but rollout.num_generations is 1",
    ),
    "one set of rollouts": (
        {
            "advantage": ["total", {"name": "set_baseline", "of": "brevity"}],
            "rollout": {"num_generations": 4},
        },
        "advantage[1].size is 4, but rollout.num_generations is 4: a prompt has one set",
    ),
    "no reward": (
        {"rewards": [{"name": "tests.support.toys:brevity", "weight": 0}]},
        "no reward has a weight",
    ),
    "one name twice": ({"rewards": ["tests.support.toys:brevity"] * 2}, "give one of them a `label`"),
    "on_error": (
        {"rewards": [{"name": "tests.support.toys:brevity", "on_error": "ignore"}]},
        "rewards[0].on_error' must be one of 'raise', 'skip', not 'ignore'",
    ),
    "retries": (
        {"rewards": [{"name": "tests.support.toys:brevity", "retries": -1}]},
        "must be at least 0, not -1",
    ),
    "timeout": ({"rewards": [{"name": "tests.support.toys:brevity", "timeout": 0}]}, "more than 0, not 0.0"),
    "no reference": ({"objective": {"penalty": ["k3"]}}, "add for instance `references: {ref: frozen}`"),
    "no such rollout policy": ({"rollout": {"policy": "ema"}}, "'rollout.policy' is 'ema', which is not in"),
    "too many parts": (
        {"learn": {"minibatches": 5}},
        "there are only 4 groups (rollout.num_prompts) to part",
    ),
    "nothing to do": ({"learn": {"minibatches": 0}}, "'learn.minibatches' must be at least 1, not 0"),
    "negative": ({"eval_steps": -1}, "'eval_steps' must be at least 0, not -1"),
    "pictures": ({"report": {"media_log_steps": -1}}, "'report.media_log_steps' must be at least 0"),
    "tracker": ({"report": {"trackers": ["comet"]}}, "no tracker is called 'comet'"),
    "interpolation": ({"output_dir": "${oc.env:HOME}"}, "looks like an interpolation"),
    "include": ({"include": "base.yaml"}, "'include' must be a list of files, not 'base.yaml'"),
    "missing include": ({"include": ["base.yaml"]}, "there is no file 'base.yaml', included by"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_a_configuration_is_one_line_and_code_2(file, tmp_path, capsys, case):
    changes, message = WRONG[case]
    assert message in failure(capsys, 2, "train", file(changes))
    assert not (tmp_path / "out").exists(), "nothing was begun"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "cannot read"),
        ("a:\n\t- b", "cannot read"),
        ("- 1", "must hold a mapping at its top, not a list"),
        (
            "",
            "'policy', 'data', 'rollout', 'advantage', 'objective': the required keys are missing",
        ),
        (b"\xff\xfe\x00", "cannot read"),
        (None, "there is no file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_and_code_2(tmp_path, capsys, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = failure(capsys, 2, "train", str(path))
    assert message in line and "run.yaml" in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_steps", "an override must read key=value, not 'max_steps'"),
        ("learn.learning_rate=fast", "'learn.learning_rate' must be a number, not 'fast'"),
        ("rewards.7.weight=1", "there is no item 7 in a list of 2"),
        ("learn.optimiser=sgd", "there is no key 'learn.optimiser'; did you mean 'optimizer'?"),
        ("seed=[1", "cannot parse the override 'seed=[1'"),
    ],
)
def test_a_wrong_override_is_one_line_and_code_2(file, capsys, override, message):
    assert message in failure(capsys, 2, "train", file(), override)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("too_few", "failed: RewardFault: reward 'too_few' gave 1 numbers for 16 outcomes; prompt 'p"),
        ("undefined", "failed: RewardFault: reward 'undefined' gave nan; prompt 'p"),
        (
            "late",
            "failed: RewardFault: reward 'late' raised LookupError: no such span in 'a clip'; prompt 'p",
        ),
    ],
)
def test_a_faulty_reward_is_one_line_and_code_1(file, capsys, reward, message):
    line = failure(capsys, 1, "train", file(rewards=[f"{HERE}:{reward}"]))
    assert line.startswith(message)
    assert "on_error: skip" in line


def test_a_gradient_that_is_no_number_is_one_line_and_code_1(file, capsys):
    line = failure(capsys, 1, "train", file(objective={"surrogate": f"{HERE}:divided_by_nothing"}))
    assert line.startswith(
        "failed: NotFinite: the gradient of step 0 has the norm nan; the step was not taken"
    )


def test_a_folder_of_another_run_or_in_use_is_refused(file, tmp_path, capsys, monkeypatch):
    assert main(["train", file()]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("mmrl.build.build", None)  # nothing is loaded
        line = failure(capsys, 2, "train", file(), "seed=1")
        assert "holds a run with another configuration" in line
        with (tmp_path / "out" / LOCK).open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "is in use by process" in failure(capsys, 2, "train", file())
    assert main(["train", file(), "seed=1", "overwrite_output_dir=true"]) == 0


def test_an_evaluation_without_data_and_an_unknown_kind(file, capsys):
    assert "'evaluation.data' is missing" in failure(capsys, 2, "evaluate", file())
    assert "there is no kind 'surrogates'; did" in failure(capsys, 2, "list", "surrogates")


@pytest.mark.parametrize("arguments", [[], ["trane"], ["train"], ["check"]])
def test_wrong_usage_is_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: mmrl" in capsys.readouterr().err


def test_a_traceback_is_shown_to_those_who_ask(file):
    with pytest.raises(RuntimeError, match="gave 1 numbers"):
        main(["--traceback", "train", file(rewards=[f"{HERE}:too_few"])])


@pytest.mark.slow
def test_python_m_mmrl(file):
    done = subprocess.run(
        [sys.executable, "-m", "mmrl", "train", file(), "max_steps=1"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "out 1/1  reward" in done.stdout


def test_pieces_of_the_working_directory_are_found(tmp_path, monkeypatch, capsys):
    # A console script does not have the working directory on its path; `python -m mmrl` does.
    (tmp_path / "beside_me.py").write_text("def doubled(table):\n    return table.put(2 * table.values)\n")
    (tmp_path / "variant.yaml").write_text("advantage: [total, 'beside_me:doubled']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert main(["check", "variant.yaml"]) == 0, capsys.readouterr().out
