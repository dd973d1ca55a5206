"""Wrong inputs of a user: each is one line on stderr with the right exit code, and names the next step."""

from __future__ import annotations

import json

import pytest

from mmrl.cli import main
from mmrl.reporting import html
from tests.support.toys import plan

VLM = "train/charades_sta_tempsamp.yaml"  # comes with mmrl; its data are not here, and nothing is loaded
TOY = "tests.support.toys"

# Command line ({run}: a small run, {here}: a folder of its own, {VLM}), and words of the answer.
WRONG = [
    # commands and arguments
    ("", "the following arguments are required: command; usage: mmrl"),
    ("trane {run}", "there is no command 'trane'; did you mean 'train'?"),
    ("tarin {run}", "did you mean 'train'?"),
    ("eval {run}", "did you mean 'evaluate'?"),
    ("data chek {run}", "there is no command 'chek'; did you mean 'check'?"),
    ("train", "the following arguments are required: config; usage: mmrl train"),
    ("train --epochs 3 {run}", "usage: mmrl"),
    ("report", "the following arguments are required: RUN; usage: mmrl report"),
    ("watch {here} --port many", "argument --port: invalid int value: 'many'"),
    ("watch {here} --every 0", "--every wants at least 1 second"),
    ("watch {here}/no", "name the output_dir of a training run"),
    # files
    ("train {here}/rnu.yaml", "did you mean '{here}/run.yaml'?"),
    ("train train/charades_sta_tempsmp.yaml", "did you mean 'train/charades_sta_tempsamp.yaml'?"),
    ("train {here}", "there is no file '{here}'"),
    ("train {here}/list.yaml", "must hold a mapping at its top, not a list"),
    ("train {here}/broken.yaml", "cannot read '{here}/broken.yaml'"),
    ("train {here}/includes.yaml", "there is no file 'no.yaml', included by '{here}/includes.yaml'"),
    ("train {run} {VLM}", "of several files, one can `include` the others"),
    ("build {here}/build.yaml", "no builder is called 'tiny_qwen'"),
    ("report {here}/no", "there is no folder '{here}/no'; name the output_dir"),
    ("report {here}", "is not the output_dir of a training run: it has no metrics.jsonl"),
    ("data check {here}/no.jsonl", "there is no file or folder '{here}/no.jsonl'"),
    ("data check {here} --root {here}/no", "there is no folder '{here}/no' that media paths could be rel"),
    # overrides
    ("train {run} max_steps", "an override must read key=value, not 'max_steps'; such as max_steps=VALUE"),
    ("train {run} =3", "an override must read key=value, not '=3'; such as 3=VALUE (`mmrl keys` lists"),
    ("check max_steps=3", "no file is named: mmrl check my_run.yaml"),
    ("train {run} seed=[1", "cannot parse the override 'seed=[1'"),
    ("train {run} rewards.7.weight=1", "there is no item 7 in a list of 2"),
    ("train {run} output_dir=${{HOME}}/x", "looks like an interpolation; write the value itself"),
    # keys
    ("train {VLM} num_generations=4", "did you mean `rollout.num_generations`?"),
    ("train {VLM} learning_rate=1e-5", "did you mean `learn.learning_rate`?"),
    ("train {VLM} max_completion_length=9", "did you mean `rollout.engine.0.max_completion_length`?"),
    ("train {VLM} lora_rank=8", "did you mean `policy.lora_rank`?"),
    ("train {VLM} policy.lora_rnk=8", "did you mean 'lora_rank'?"),
    ("train {VLM} objective.epsilon=0.3", "did you mean `objective.surrogate.epsilon`?"),
    ("train {VLM} beta=0.04", "that is an argument of TRL; here it is objective.penalty"),
    ("train {VLM} per_device_train_batch_size=8", "here it is rollout.num_prompts"),
    ("train {VLM} model_name_or_path=x", "here it is policy.model"),
    ("evaluate {VLM} temperature=0", "did you mean `rollout.engine.0.temperature`?"),
    ("doctor {VLM} learn.learnin_rate=1", "did you mean 'learning_rate'?"),
    ("estimate-memory {VLM} learning_rate=1", "did you mean `learn.learning_rate`?"),
    ("build {here}/build.yaml build=null", "'build' must be a name, or a mapping with a name"),
    # values
    ("train {run} max_steps=many", "'max_steps' must be a whole number, not 'many'"),
    ("train {run} max_steps=0", "'max_steps' must be at least 1, not 0"),
    ("train {run} num_train_epochs=2", "leave one out, or set it to null"),
    ("train {run} learn.learning_rate=-1", "'learn.learning_rate' must be at least 0, not -1.0"),
    ("train {run} learn.on_nonfinite=retry", "must be one of 'stop', 'skip', not 'retry'"),
    ("train {run} rewards=null", "no reward has a weight"),
    ("train {run} data=null", "'data' must be a name, or a mapping with a name"),
    ("train {run} rollout.num_generations=1", "ask for 2 or more, or set `singleton: raw`"),
    ("train {run} learn.minibatches=9", "there are only 4 groups (rollout.num_prompts) to part"),
    ("train {run} eval_steps=2", "'evaluation.data' names nothing to measure on"),
    ("train {run} objective.penalty=[k3]", "add for instance `references: {{ref: frozen}}`"),
    ("train {run} push_to_hub=true", "wants 'hub_model_id' as owner/name"),
    ("train {run} init_from={here}/no", "which is no folder; name that of a run or of a model"),
    # pieces
    ("train {run} advantage=[total,group_normalise]", "did you mean 'group_normalize'?"),
    ("train {run} rewards=[short_answer]", "did you mean 'vision.short_answer'?"),
    ("train {run} rewards=[nowhere:right]", "cannot import the reward 'nowhere:right'"),
    ("train {run} report.trackers=[comet]", "no tracker is called 'comet'"),
    ("train {run} group_filter=varied group_filter.of=brevty", "no reward is called 'brevty'; did you mean"),
    ("evaluate {run}", "'evaluation.data' is missing"),
    ("list rewards", "there is no kind 'rewards'; did you mean 'reward'?"),
    ("list reward shortanswer", "did you mean 'vision.short_answer'?"),
    ("keys num_generations", "did you mean 'rollout.num_generations'?"),
]  # fmt: skip

# What is found only while a command runs has exit code 1.
FAILED = [
    ("train {run} rewards=['" + TOY + ":no_such']", 2, "cannot import the reward"),
    ("train {run} rewards=['tests.test_wrong_inputs:too_few']", 1, "gave 1 numbers for 16 outcomes"),
    ("train {run} init_from={here}/model", 1, "do not fit the policy"),
]


def too_few(prompts, outcomes):
    return [1.0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a small run and files that are wrong."""
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    (tmp_path / "run.yaml").write_text(json.dumps(plan(tmp_path / "out", max_steps=2)))
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "includes.yaml").write_text("include: [no.yaml]\n")
    (tmp_path / "build.yaml").write_text("build: tiny_qwen\noutput: data\n")
    (tmp_path / "model").mkdir()
    return tmp_path


def answer(line: str, here, capsys) -> tuple[int, str]:
    words = line.format(run=here / "run.yaml", here=here, VLM=VLM).split()
    try:
        code = main(words)
    except SystemExit as stopped:  # of the parser of arguments
        code = stopped.code
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1, printed
    return code, printed[0]


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_input_is_one_line_that_names_the_next_step(line, words, here, capsys):
    code, printed = answer(line, here, capsys)
    assert code == 2 and printed.startswith("error: "), printed
    assert words.format(here=here) in printed
    assert not (here / "out").exists(), "nothing was begun"


@pytest.mark.parametrize(("line", "code", "words"), FAILED, ids=[line for line, *_ in FAILED])
def test_what_fails_on_the_way_is_one_line_too(line, code, words, here, capsys):
    assert answer(line, here, capsys)[0] == code
    assert words in answer(line, here, capsys)[1]


def test_there_are_at_least_sixty():
    assert len({line for line, _ in WRONG}) >= 60
