"""A prompt that turns out to be unreadable when it is asked never ends a run for good."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.core.types import Message, Part, Prompt, PromptError
from mmrl.data.dataset_io import Rows, read_prompts
from mmrl.runtime.distributed import Processes
from mmrl.runtime.requests import taken
from mmrl.training import consulting
from mmrl.training.loop import train
from tests.support.toys import ToyGenerate, toy_run

pytestmark = pytest.mark.usefixtures("no_page")


class Choosy(ToyGenerate):
    """Cannot read the prompts of one text."""

    def rollout(self, prompts):
        for prompt in prompts:
            if prompt.text == "unreadable":
                raise PromptError(prompt.uid, "its image is cut short")
        return super().rollout(prompts)


def rows(*, path: str, bad_rows: str = "error"):
    """Name rows by their numbers, as data sets do."""

    def make(row, number):
        text = row.columns["question"]
        return Prompt(f"p{number}", (Message("user", (Part(text),)),), row.columns["answer"])

    return read_prompts(path, Rows(Path(path), Path(path)), make, bad_rows=bad_rows)


def written(folder, bad=(2,), num=8):
    path = folder / "rows.jsonl"
    texts = ["unreadable" if i in bad else f"say {i % 5 + 1}" for i in range(num)]
    lines = [json.dumps({"question": text, "answer": i % 5 + 1}) + "\n" for i, text in enumerate(texts)]
    path.write_text("".join(lines))
    return path, lines


def run_of(folder, path, bad_rows="error", **changes):
    data = {"name": f"{__name__}:rows", "path": str(path), "bad_rows": bad_rows}
    engine = {"engine": [f"{__name__}:Choosy"], "num_prompts": 2, "num_generations": 2}
    usual = {"data": data, "rollout": engine, "sampler": [{"name": "uniform", "shuffle": False}]}
    return toy_run(folder / "out", **usual, save_steps=1, max_steps=6, **changes)


def test_it_is_dropped_with_its_group_and_named_once(tmp_path, caplog):
    path, _ = written(tmp_path)
    run = run_of(tmp_path, path, "drop")
    train(run)
    assert run.progress.step == 6
    assert [r.message for r in caplog.records if "dropped" in r.message] == [
        "dropped cannot read the prompt 'p2': its image is cut short"
    ]


def test_a_draw_of_unreadable_prompts_is_drawn_again(tmp_path):
    path, _ = written(tmp_path, bad=(2, 3))
    run = run_of(tmp_path, path, "drop")
    train(run)
    assert run.progress.step == 6


def test_a_run_that_it_ended_goes_on_when_it_is_dropped(tmp_path):
    path, _ = written(tmp_path)
    with pytest.raises(
        ConfigError, match="'p2': its image is cut short. Set `bad_rows: drop`.*take the row out"
    ):
        train(run_of(tmp_path, path))
    run = run_of(tmp_path, path, "drop")
    train(run)
    assert run.progress.step == 6


def test_a_run_that_it_ended_goes_on_without_its_row_alone(tmp_path):
    path, lines = written(tmp_path)
    with pytest.raises(ConfigError):
        train(run_of(tmp_path, path))
    path.write_text("".join(lines[:2] + lines[4:]))
    with pytest.raises(ConfigError, match="the prompts of the run changed"):
        train(run_of(tmp_path, path))
    path.write_text("".join(lines[:2] + lines[3:]))
    run = run_of(tmp_path, path)
    train(run)
    assert run.progress.step == 6


def test_an_evaluation_drops_it_or_names_it(tmp_path, caplog):
    good, _ = written(tmp_path, bad=())
    (tmp_path / "held").mkdir()
    bad, _ = written(tmp_path / "held")
    held = {"name": f"{__name__}:rows", "path": str(bad)}
    with pytest.raises(ConfigError, match=r"'p2'.*evaluation.data"):
        run_of(tmp_path, good, evaluation={"data": held}).evaluator.measure()
    measured = run_of(tmp_path, good, evaluation={"data": {**held, "bad_rows": "drop"}}).evaluator.measure()
    assert sorted(measured.table.uids) == ["p0", "p1", "p3", "p4", "p5", "p6", "p7"]


class ChoosyAhead(Choosy):
    """Cannot read them when it is asked a step ahead."""

    def __init__(self, policy, *, stream):
        super().__init__(policy, stream=stream)
        self.begun = deque()

    def ask(self, prompts):
        self.begun.append((self.stream.step, list(prompts), super().rollout(prompts)))

    def rollout(self, prompts):
        return taken(self.begun, self.stream.step, prompts, self.ask)[2]


@pytest.mark.parametrize(("bad", "lag"), [((3,), 1), ((2, 3), 1), ((2, 3), 3)])
def test_what_is_asked_a_step_ahead_is_dropped_or_named(tmp_path, bad, lag):
    path, _ = written(tmp_path, bad=bad)
    engine = {
        "engine": [f"{__name__}:ChoosyAhead"],
        "max_staleness": lag,
        "num_prompts": 2,
        "num_generations": 2,
    }
    ahead = {"rollout": engine, "objective": {"step_weight": ["truncated_importance"]}}
    data = {"data": {"name": f"{__name__}:rows", "path": str(path), "bad_rows": "drop"}}
    usual = {"sampler": [{"name": "uniform", "shuffle": False}], "save_steps": 1, "max_steps": 6}
    with pytest.raises(ConfigError, match="cut short. Set `bad_rows: drop`"):
        train(toy_run(tmp_path / "out", **ahead, **usual, data={**data["data"], "bad_rows": "error"}))
    run = toy_run(tmp_path / "out", **ahead, **usual, **data)
    train(run)
    assert run.progress.step == 6


def test_a_second_model_values_it_as_the_others(monkeypatch):
    def encode(prompt, outcome):
        if prompt.text == "unreadable":
            raise PromptError(prompt.uid, "its image is cut short")
        return prompt

    values = {"a": 1.0, "b": 4.0}
    consulted = lambda models, rows, *rest: SimpleNamespace(
        others={"value": SimpleNamespace(extra={"value": torch.tensor([[values[row.uid]] for row in rows])})}
    )
    monkeypatch.setattr(consulting, "evaluate_references", consulted)
    policy = SimpleNamespace(encode=encode, collate=lambda rows: rows)
    beside = {"policy": policy, "model": None, "processes": Processes(), "micro_batch_steps": 1}
    asked = [Prompt(uid, (Message("user", (Part(text),)),)) for uid, text in
             (("a", "x"), ("c", "unreadable"), ("b", "x"))]  # fmt: skip
    assert consulting.values_of(asked, **beside) == [1.0, 2.5, 4.0]
    with pytest.raises(PromptError):
        consulting.values_of(asked[1:2], **beside)
