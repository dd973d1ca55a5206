"""`mmrl check`: overrides of all files, and what null and empty lists stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from mmrl.cli import main
from mmrl.cli.check import check_file
from mmrl.config.loading import read
from mmrl.config.schema import Config, Evaluation, Report, load
from tests.support.toys import plan


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(plan(tmp_path / "out", references={"ref": "frozen"})))
    return str(file)


def test_overrides_hold_for_every_file(path, tmp_path, capsys):
    variant = tmp_path / "variant.yaml"
    variant.write_text("advantage: [total, group_center]\n")
    assert main(["check", path, str(variant), "learn.learning_rate=2e-5"]) == 0
    assert main(["check", path, "learn.learning_rate=fast", str(variant)]) == 2
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(":")[0] for line in lines] == [f"wrong  {path}", f"wrong  {variant}"]
    assert lines[0].endswith(f"{path}: 'learn.learning_rate' must be a number, not 'fast'"), "the path once"


def test_a_file_whose_name_holds_an_equals_sign_is_a_file(tmp_path, capsys):
    file = tmp_path / "lr=1.yaml"
    file.write_text("advantage: [total]\n")
    assert main(["check", str(file)]) == 0
    assert main(["check", "max_steps=3"]) == 2
    assert "no file is named" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["evaluation", "references", "report.trackers", "report", "metrics"])
def test_null_leaves_out_what_may_be_left_out(path, key, tmp_path):
    assert main(["check", path, f"{key}=null"]) == 0
    wanted = {"evaluation": Evaluation(), "references": {}, "report.trackers": (), "report": Report()}
    wanted |= {"metrics": ()}
    config = load(path, ["evaluation.num_generations=3", "report.logging_steps=7", f"{key}=null"])
    for name in key.split("."):
        config = getattr(config, name)
    assert config == wanted[key]


def test_null_in_a_file_empties_what_it_includes(path, tmp_path):
    above = tmp_path / "above.yaml"
    above.write_text(f"include: [{path}]\nevaluation:\nreferences: null\nreport: {{trackers: null}}\n")
    config = load(above, ["evaluation.num_generations=2"])
    assert (config.references, config.report.trackers) == ({}, ())
    assert config.evaluation == Evaluation(num_generations=2)
    assert read(above)["references"] is None


def test_a_list_that_is_emptied_or_null_is_empty(path, capsys):
    for empty in ("[]", "null"):
        assert load(path, [f"rewards={empty}"], Config).rewards == ()
        assert main(["check", path, f"rewards={empty}"]) == 2
    assert "no reward has a weight" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["policy.transform", "rollout.engine.0.cache", "objective.penalty"])
def test_null_for_an_option_that_holds_pieces_or_a_list_is_its_default(option):
    check_file("train/charades_sta_tempsamp.yaml", [f"{option}=null"])


# ---- what a configuration names outside of itself


def wanting(prompts, completions, solution, difficulty=1, **columns):
    """A reward of TRL's form that needs a column."""
    return [0.0] * len(completions)


@pytest.fixture
def questions(tmp_path):
    rows = tmp_path / "questions.jsonl"
    rows.write_text('{"question": "What?", "answer": "this", "image": "a.png"}\n')
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    return rows


@pytest.fixture
def visual(tmp_path, questions):
    """A run of a VLM on those questions."""
    file = tmp_path / "visual.yaml"
    raw = plan(tmp_path / "out", data={"name": "vision.visual_qa", "path": str(questions)})
    file.write_text(
        json.dumps({**raw, "policy": {"name": "vision.tokens", "model": "Qwen/Qwen2.5-VL-3B-Instruct"}})
    )
    return str(file)


def test_what_exists_is_ok(visual):
    assert main(["check", visual]) == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "data.path=data/nowhere.jsonl",
            "data.path is 'data/nowhere.jsonl', which does not exist here; set data",
        ),
        ("data.root=/nowhere", "data.root is '/nowhere', which does not exist here"),
        ("policy.model=./models/mine", "policy.model is './models/mine', which does not exist here"),
        ("policy.model=/models/mine", "policy.model is '/models/mine', which does not exist here"),
        ("evaluation.data={name: vision.visual_qa, path: no.jsonl}", "evaluation.data.path is 'no.jsonl'"),
        (
            "rewards=['tests.cli.test_check:wanting']",
            "rewards[0]: 'tests.cli.test_check:wanting' takes the column 'solution' that the first "
            "rows of data do not have; they have answer, image, question",
        ),
        (
            "data.prompt='{qestion}?'",
            "data.prompt reads the column 'qestion' that the first rows of data do not have; they have "
            "answer, image, question; map names by `columns`",
        ),
        (
            "group_filter={name: varied, of: brevty}",
            "group_filter.of: no reward is called 'brevty'; did you mean",
        ),
        (
            "metrics=[{name: mean, of: accuracy}]",
            "metrics[0].of: no reward is called 'accuracy'; there are share",
        ),
        (
            "report.checks=[{name: reward_hacking, rising: rewards/brevty/mean}]",
            "report.checks[0].rising: no reward is called 'brevty'; did you mean 'brevity'?",
        ),
    ],
)
def test_what_does_not_exist_is_named(visual, override, words, capsys):
    assert main(["check", visual, override]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert words in line


def test_changes_may_stand_after_a_flag(visual, capsys):
    assert main(["check", visual, "--data", "data.path=nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["check", visual, "--date", "data.path=nowhere.jsonl"])
    assert "unrecognized arguments: --date" in capsys.readouterr().err


def test_columns_may_be_renamed_and_read_in_templates(visual):
    rewards = "rewards=['tests.cli.test_check:wanting']"
    assert main(["check", visual, rewards, "data.columns={solution: answer}"]) == 0
    assert main(["check", visual, "data.prompt='{question} {answer}'"]) == 0


EVEN_ODD = {"name": "pools", "by": "source", "pools": ["even", "odd"]}
WITH_HINTS = {"name": "with_hints", "hint_column": "hint", "when": "next_time"}
NOT_IN_THE_DATA = [
    ({"sampler": {**EVEN_ODD, "pools": ["even", "prime"]}}, "which is none of the pools"),
    ({"sampler": {"name": "source_bandit", "by": "topic"}}, "'topic'"),
    ({"sampler": ["uniform", WITH_HINTS]}, "'hint'"),
    (
        {"data": {"name": "tests.support.observing:sourced", "num": 0}},
        "data: 'tests.support.observing:sourced' has no",
    ),
    ({"evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 0}}}, "evaluation.data: "),
]


@pytest.mark.parametrize(("changes", "words"), NOT_IN_THE_DATA)
def test_what_the_rows_lack_is_found_where_it_is_asked(changes, words, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    usual = {"data": "tests.support.observing:sourced"}
    file.write_text(json.dumps(plan(tmp_path / "out", **{**usual, **changes})))
    assert main(["check", str(file)]) == 0, "rows are not read where nobody asks"
    capsys.readouterr()
    assert main(["check", str(file), "--data"]) == 2
    line = capsys.readouterr().out
    assert words in line and len(line.splitlines()) == 1
    assert main(["train", str(file)]) == 2
    assert capsys.readouterr().err.partition("error: ")[2] in line.partition(f"{file}: ")[2]


def test_rows_are_read_for_every_stage(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    stages = [{"max_steps": 1}, {"max_steps": 1, "sampler": [EVEN_ODD]}]
    file.write_text(json.dumps({**plan(tmp_path / "out"), "stages": stages}))
    assert main(["check", str(file), "--data"]) == 2
    assert "stages[1]" in capsys.readouterr().out
    assert main(["check", str(file), "data=tests.support.observing:sourced", "--data"]) == 0


ASKED = '{"question": "What?", "answer": "this"}'
RECORDED = "rollout.engine=[offline]"


@pytest.mark.parametrize(
    ("rows", "overrides", "words"),
    [
        ("", [], "holds no row that can be used"),
        (ASKED + '\n{"question"', [], "questions.jsonl:2: not a JSON object"),
        ('{"asked": "What?", "answer": "this"}', [], "they have answer, asked"),
        ('{"text": "What?"}', ["data={name: vision.conversations, path: PATH}"], "(the row has text)"),
        (ASKED, [RECORDED], "takes recorded answers, and the first 1 rows have none"),
    ],
)
def test_the_first_rows_are_opened(visual, questions, rows, overrides, words, capsys):
    questions.write_text(rows + "\n")
    overrides = [text.replace("PATH", str(questions)) for text in overrides]
    assert main(["check", visual, *overrides]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert words in line


@pytest.mark.parametrize(
    "spoil", [lambda file: file.write_bytes(file.read_bytes()[:60]), Path.unlink], ids=["cut", "missing"]
)
def test_the_first_images_are_opened(visual, questions, spoil, capsys):
    spoil(questions.parent / "a.png")
    assert main(["check", visual]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "a.png" in line
