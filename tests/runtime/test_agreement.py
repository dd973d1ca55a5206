"""A run goes on with what it began with, and all of its processes with the same."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.build import build
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.core.types import Media, Message, Outcome, Part, Prompt
from mmrl.reporting import html
from mmrl.runtime import checkpoint
from mmrl.runtime.checkpoint import MODEL
from mmrl.runtime.content_hash import CHUNK, of_prompts, of_tensors, of_weights
from mmrl.training.checkpointing import resume
from mmrl.training.loop import train
from tests.support.agreement_worker import plan_of, write
from tests.support.distributed_worker import launch, start
from tests.support.toys import plan


def trained(folder, **changes):
    run = build(parse(plan_of(folder, **changes), Config), quiet=True)
    train(run)
    return run


# ---- going on with what a run began with


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"right": 2}, "prompts"), ({"picture": b"another"}, "media"), ({"base": 0.5}, "base model")],
)
def test_a_run_does_not_go_on_with_other_data_or_another_base_model(tmp_path, changed, what):
    write(tmp_path)
    trained(tmp_path)
    write(tmp_path, **changed)
    with pytest.raises(ConfigError, match=f"the {what} of the run changed since .*checkpoint-2.* put back"):
        trained(tmp_path, max_steps=3)
    assert not (tmp_path / "run" / "checkpoint-3").exists()
    write(tmp_path)
    assert trained(tmp_path, max_steps=3).progress.step == 3
    write(tmp_path, **changed)
    assert trained(tmp_path, overwrite_output_dir=True).progress.step == 2


def test_held_out_prompts_are_compared_too(tmp_path):
    write(tmp_path)
    write(tmp_path / "held")
    evaluation = {"evaluation": {"data": plan_of(tmp_path / "held")["data"]}}
    trained(tmp_path, **evaluation)
    write(tmp_path / "held", right=3)
    with pytest.raises(ConfigError, match="the prompts of the evaluation of the run changed"):
        trained(tmp_path, max_steps=3, **evaluation)


def test_weights_that_checkpoints_hold_are_not_those_of_the_base(tmp_path):
    write(tmp_path)
    trained(tmp_path)
    run = build(parse(plan_of(tmp_path, max_steps=3), Config), quiet=True)
    with torch.no_grad():
        run.policy.table.fill_(7.0)  # the checkpoint replaces it
    assert resume(run) == 2


def test_a_checkpoint_that_does_not_tell_its_data_goes_on_with_a_warning(tmp_path):
    write(tmp_path)
    trained(tmp_path, max_steps=1)
    folder = tmp_path / "run" / "checkpoint-1"
    state = checkpoint.read_state(folder)
    del state["inputs"]
    checkpoint.write_state(folder, state)
    assert "does not record what it was trained on" in trained(tmp_path).report.raised[0]


# ---- names of content


def prompt(target=1, text="a", source=None, answers=(), **columns) -> Prompt:
    media = Media("image", "x.png", lambda: None, source)
    return Prompt("p", (Message("user", (Part(text), Part(media=media))),), target, answers, columns)


def test_prompts_are_named_by_all_that_is_in_them(tmp_path):
    file, copy = tmp_path / "a", tmp_path / "b" / "a"
    copy.parent.mkdir()
    for path in (file, copy):
        path.write_bytes(b"0" * 100_000)
    kinds = [
        prompt(),
        prompt(target=2),
        prompt(target=frozenset({"a", "b"})),
        prompt(target={(1, 2): "span"}),
        prompt(target=torch.ones(2)),
        prompt(text="b"),
        prompt(wanted=1),
        prompt(answers=(Outcome(text="1"),)),
        prompt(source=b"1"),
        prompt(source=b"2"),
        prompt(source=file),
    ]
    names = [json.dumps(of_prompts([one])) for one in kinds]
    assert len(set(names)) == len(kinds)
    assert names == [json.dumps(of_prompts([one])) for one in kinds]
    assert of_prompts([prompt(source=file)]) == of_prompts([prompt(source=copy)]), "a copy has another time"
    for place in (0, 99_999):
        data = bytearray(b"0" * 100_000)
        data[place] = 1
        copy.write_bytes(data)
        found = of_prompts([prompt(source=copy)])
        assert found["prompts"] == of_prompts([prompt(source=file)])["prompts"]
        assert found["media"] != of_prompts([prompt(source=file)])["media"]
    assert of_prompts(kinds[:2]) != of_prompts(kinds[1::-1]), "samplers draw by place"


def test_names_do_not_depend_on_how_many_prompts_are_hashed_together(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    sources = (b"1", tmp_path / "a", tmp_path / "b", b"1", tmp_path / "a", None, tmp_path / "b")
    asked = [prompt(source=source) for source in sources]
    whole = of_prompts(asked)
    digest = lambda data: hashlib.sha256(data).hexdigest()
    ends = {name: f"1 {digest(2 * name.encode())}" for name in "ab"}  # the first byte, and the last one
    media = (digest(b"1"), ends["a"], ends["b"], digest(b"1"), ends["a"], digest(b""), ends["b"])
    assert whole["media"] == f"7 media, {digest(chr(10).join(media).encode())[:16]}"
    for size in (1, 2, 3):
        monkeypatch.setattr("mmrl.runtime.content_hash.PROMPTS", size)
        assert of_prompts(asked) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("size", [0, 1, 1025, 8192, CHUNK + 3])
def test_weights_are_named_by_every_bit(dtype, size):
    values = torch.arange(size).remainder(97).to(dtype)
    name = of_tensors([values])
    assert name == of_tensors([torch.cat([values[:1], values])[1:]]), "wherever it lies in memory"
    for place in {0, size // 2, size - 1} if size else ():
        other = values.clone()
        other[place] = 100
        assert of_tensors([other]) != name
    if size > 1:
        assert of_tensors([torch.cat([values[1:], values[:1]])]) != name
    assert of_tensors([values[None]]) != name


def test_names_of_weights_do_not_depend_on_wrapping_or_on_what_is_left_out():
    layer = torch.nn.Linear(3, 2)
    assert of_weights(layer) == of_weights(torch.nn.ModuleDict({"module": layer}))
    assert of_weights(layer, layer.parameters()) == "" != of_weights(layer, [layer.bias])


# ---- several processes


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Run cases on two processes that share no disk."""
    folder = tmp_path_factory.mktemp("apart")
    nodes = [folder / "node-0", folder / "node-1"]
    plans = {}

    def case(name: str, steps: int = 2, **plan) -> list[Path]:
        for node in nodes:
            write(node / name)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(nodes[0])
            patch.setattr(html.pages, "curves", lambda runs: [])
            if steps:
                trained(name, max_steps=steps)
                shutil.copytree(f"{name}/run", nodes[1] / name / "run")
        plans[name] = plan_of(name, max_steps=3)
        return [node / name for node in nodes]

    case("alike")
    shutil.rmtree(case("delayed")[1] / "run" / "checkpoint-2")
    weights = case("other_weights")[1] / "run" / "checkpoint-2" / MODEL / "model.safetensors"
    save_file({"table": load_file(weights)["table"] + 1}, weights)
    shutil.copytree(
        case("other_state")[1] / "run" / "checkpoint-1",
        nodes[1] / "other_state" / "run" / "checkpoint-2",
        dirs_exist_ok=True,
    )
    cut = case("cut_on_0")[0] / "run" / "checkpoint-2" / MODEL / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-20])
    write(case("other_rows", 0)[1], right=2)
    write(case("other_media", 0)[1], picture=b"another")
    write(case("other_base", 0)[1], base=0.5)
    listed = folder / "plans.json"
    listed.write_text(json.dumps(plans))
    started = start("tests.support.agreement_worker", [str(listed), str(folder)], 2)
    printed = [process.communicate(timeout=400)[0] for process in started]
    assert not any(process.returncode for process in started), "\n".join(printed)
    return lambda name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("delayed", "cannot take up what process 0 can: .*checkpoint-2' is not a whole checkpoint"),
        ("other_weights", "(weights taken up: |cannot take up what process 0 can: )"),
        ("other_state", "state in 'other_state/run/checkpoint-2': "),
        ("other_rows", "prompts: 8 prompts, .*, but on process 0: 8 prompts, "),
        ("other_media", "media: "),
        ("other_base", "weights to begin with: "),
    ],
)
def test_processes_that_see_other_files_fail_together(apart, name, what):
    for told in apart(name):
        assert "error" in told, told
        pytest.raises(RuntimeError, _raise, told["error"]).match(f"^ProcessFailed: process 1 of 2: {what}")


def _raise(words: str) -> None:
    raise RuntimeError(words)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alike", "cut_on_0"])
def test_process_0_chooses_the_checkpoint_for_all(apart, name):
    one, other = apart(name)
    assert one == other and one["steps"] == 3


@pytest.mark.slow
def test_what_holds_on_any_process_holds(apart):
    assert apart("any") == [[False, True, True, True]] * 2


HANGING = {
    "an engine": (
        {"rollout": {"engine": ["tests.support.agreement_worker:Hangs"]}},
        "'making and scoring rollouts'",
    ),
    "learning": ({"policy": "tests.support.agreement_worker:HangsInLearning"}, "'exchanging gradients'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HANGING)
def test_a_process_that_hangs_is_not_waited_for_without_end(case, tmp_path):
    changes, where = HANGING[case]
    # `launch` waits for two minutes, and the process that hangs for five.
    printed = launch([plan(tmp_path / "run", ddp_timeout=20, **changes)], tmp_path, failing=True)
    words = f"did not come to {where} within 20 s (ddp_timeout)"
    for text in printed:  # the one that hangs says it too, and ends
        # The watch says it, or the exception of a collective whose other end has left; rarely both, alike.
        (said,) = {line for line in text.splitlines() if line.startswith("failed: ")}
        assert "ProcessFailed: process 0 of 2 waited in vain: process 1 (it came last to '" in said
        assert said.endswith(words)


@pytest.mark.slow
def test_others_wait_for_an_upload_without_a_limit(tmp_path):
    settings = {"push_to_hub": True, "hub_model_id": "me/mine", "ddp_timeout": 20, "max_steps": 1}
    launch([plan(tmp_path / "run", **settings)], tmp_path, UPLOAD_SECONDS="30")
    assert (tmp_path / "run" / "weights-1").is_dir()


def test_waiting_takes_a_second_at_least():
    with pytest.raises(ConfigError, match="'ddp_timeout' must be at least 1, not 0.5"):
        build(parse(plan("x", ddp_timeout=0.5), Config))


def test_an_evaluation_compares_what_its_processes_read(tmp_path):
    from mmrl.build import load_evaluator

    write(tmp_path)
    evaluation = {"data": plan_of(tmp_path)["data"]}
    evaluator = load_evaluator(parse(plan_of(tmp_path, evaluation=evaluation), Config))
    told = []
    evaluator.processes = type(
        "Two", (), {"world": 2, "assert_equal": lambda self, values: told.append(values)}
    )()
    assert evaluator.agreed() is evaluator
    weights = of_weights(evaluator.engine.policy)
    assert told == [{**of_prompts(evaluator.data), "weights": weights}]
