"""Methods that read a model from inside, on a tiny one: DCPO, CAPO, VERL, KL-Cov, a teacher."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from mmrl.build import build, check
from mmrl.config.loading import merge, read
from mmrl.config.registry import advantage
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.data.dataset_io import write_rows
from mmrl.training.loop import train
from mmrl.training.method import ChainError
from tests.support.configs import method_file
from tests.vision.test_tokens import loaded, shaken

pytestmark = pytest.mark.slow
REPORT = {"trackers": [], "checks": [], "startup_checks": [], "log_completions": False, "media_log_steps": 0}
CHANGES = {"kl_cov": {"learn": {"minibatches": 2}}}


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("questions")
    Image.new("RGB", (56, 56), (200, 0, 0)).save(folder / "a.png")
    lines = [{"image": "a.png", "question": f"{n} + 2?", "answer": str(n + 2)} for n in range(2)]
    write_rows(folder / "rows.jsonl", lines)
    return str(folder / "rows.jsonl")


def uneven(prompts, completions) -> list[float]:
    """Give answers of a group different rewards, some of them above 0."""
    return [float(i % 2) for i, _ in enumerate(completions)]


def plan(variant, questions, checkpoint, folder, **changes):
    policy = {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float32"}
    data = {"name": "vision.visual_qa", "path": questions}
    engine = {"name": "vision.generate", "max_completion_length": 9}
    raw = {
        "policy": {**policy, "rank_stride": 2},
        "data": data,
        "rewards": [{"name": f"{__name__}:uneven", "label": "exact_match"}],
        "rollout": {"engine": [engine], "num_prompts": 2, "num_generations": 4},
        "learn": {"learning_rate": 1e-4},
        "report": REPORT,
        "max_steps": 2,
        "output_dir": str(folder),
    }
    return merge(merge(merge(read(method_file(variant)), raw), CHANGES.get(variant, {})), changes)


def trained(raw) -> list[dict]:
    train(build(parse(raw, Config), quiet=True))
    lines = (Path(raw["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("variant", ["dcpo", "capo", "verl", "kl_cov"])
def test_a_variant_reads_the_policy_that_learns(questions, checkpoint, tmp_path, variant):
    steps = trained(plan(variant, questions, checkpoint, tmp_path / "run"))
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] >= 0 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)


def test_a_teacher_of_the_whole_vocabulary_is_learned_from(questions, checkpoint, tmp_path):
    shaken(loaded(checkpoint)).save(tmp_path / "teacher")
    teacher = {"name": "vision.teacher", "model": str(tmp_path / "teacher"), "dtype": "float32"}
    changes = {"references": {"teacher": teacher}}
    raw = plan("reverse_kl_distillation", questions, checkpoint, tmp_path / "run", **changes)
    steps = trained(merge(raw, {"max_steps": 6, "learn": {"learning_rate": 1e-2}}))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]


def test_hidden_states_are_no_notes_of_a_chain(questions, checkpoint, tmp_path):
    raw = plan("dcpo", questions, checkpoint, tmp_path / "run", advantage=["total", f"{__name__}:wide"])
    with pytest.raises(ChainError, match="reads 'old/hidden', which has .* numbers per step"):
        trained(raw)


@advantage(others={"old"}, of_others={"hidden"})
def wide(table):
    return table


def test_what_a_policy_does_not_say_is_refused_before_a_weight_is_loaded(questions, checkpoint, tmp_path):
    raw = plan("dcpo", questions, checkpoint, tmp_path / "run")
    check(parse(raw, Config))
    raw["policy"] = "vision.recorded_answers"
    with pytest.raises(ConfigError, match="reads .*'logp_cold', 'logp_hot'"):
        check(parse(raw, Config))
