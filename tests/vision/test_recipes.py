"""Recipes on a tiny model: three domains in one batch, a prompt a step, model plus rule, thoughts dropped."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

from examples.video_grounding.spliced_videos import write_video
from mmrl.build import build
from mmrl.config.binding import Pieces
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, as_piece, parse
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import Rows, write_rows
from mmrl.training.loop import train
from tests.rewards.tiny_text import write_bert
from tests.support.configs import method_file

THINK = "<think></think>"
REPORT = {"trackers": [], "checks": [], "startup_checks": [], "log_completions": False, "media_log_steps": 0}


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    """Draw no curves: that takes longer than the run."""
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    Image.new("RGB", (56, 56), (200, 0, 0)).save(folder / "a.png")
    write_video(folder / "a.mp4", torch.zeros(40, 3, 56, 56, dtype=torch.uint8), 4)  # 10 seconds
    return folder


def trained(variant, model, folder, **changes) -> list[dict]:
    """Train a variant on recorded answers; return the lines of the journal."""
    raw = {
        "policy": {"name": "vision.tokens", "model": str(model), "dtype": "float32"},
        "learn": {"learning_rate": 1e-4},
        "report": REPORT,
        "output_dir": str(folder),
    }
    run = build(parse(merge(merge(read(method_file(variant)), raw), changes), Config), quiet=True)
    train(run)
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def rows(home, name, *lines) -> str:
    write_rows(home / name, lines)
    return str(home / name)


def test_mimo_scores_three_domains_in_one_batch_by_their_own_rewards(home, checkpoint, tmp_path):
    video = {"video": "a.mp4", "query": "a dog", "duration": 10, "spans": [[1, 2.5]]}
    screen = {"image": "a.png", "query": "the button", "bbox": [7, 14, 28, 42]}
    maths = {"image": "a.png", "question": "1 + 2?", "answer": "3"}
    right, wrong = f"{THINK}<answer>{{answer}}</answer>", "<answer>4</answer>"
    data = [
        {
            "name": "vision.grounding",
            "path": rows(home, "videos.jsonl", video),
            "root": str(home),
            "max_frames": 4,
            "reasoning": 1.0,
            "demo_think": "empty",
        },
        {"name": "vision.boxes", "path": rows(home, "screens.jsonl", screen), "demo": right},
        {"name": "vision.visual_qa", "path": rows(home, "maths.jsonl", maths), "demo": wrong},
    ]
    (step,) = trained(
        "mimo_vl_miloco",
        checkpoint("qwen2_5_vl"),
        tmp_path / "run",
        data={"name": "mixture", "data": data, "sources": ["video", "gui", "maths"]},
        rollout={"engine": ["offline"], "num_prompts": 3, "num_generations": 2},
        report={**REPORT, "log_completions": True},
        max_steps=1,
    )
    names = ("temporal_iou", "box_iou", "exact_match", "tag_format")
    assert [step[f"rewards/{name}/mean"] for name in names] == pytest.approx([1, 1, 0, 2 / 3])
    # 0.9 + 0.1 for the video and the screen; the wrong sum has not the format either.
    assert step["reward"] == pytest.approx(2 / 3)


def test_a_step_is_a_prompt_with_a_group_of_its_own(home, checkpoint, tmp_path):
    steps = [
        {"step_type": "ret", "problem": "<image>who?", "answer": {"query": "who", "retriever": ["none"]}},
        {"step_type": "ans", "problem": "where?", "answer": "he was born"},
    ]
    path = rows(home, "steps.jsonl", {"images": ["a.png"], "steps": steps}, {"steps": steps[1:]})
    (step,) = trained(
        "r1_router",
        checkpoint("qwen2_5_vl"),
        tmp_path / "run",
        data={"name": "vision.stepwise", "path": path},
        rewards=[{"name": "route_reward", "model": write_bert(tmp_path / "bert")}, "answer_recall"],
        rollout={
            "engine": [{"name": "vision.generate", "max_completion_length": 4}],
            "num_prompts": 3,
            "num_generations": 2,
        },
        report={**REPORT, "log_completions": True},
        max_steps=1,
    )
    # Nothing that random weights say is well formed.
    assert step["rewards/route_reward/mean"] == step["rewards/answer_recall/mean"] == 0
    written = [*Rows(tmp_path / "run/completions", home)]
    groups = Counter(row.columns["uid"] for row in written)
    assert groups == {"steps#0/0": 2, "steps#0/1": 2, "steps#1/0": 2}
    scored = {row.columns["uid"] for row in written if not math.isnan(row.columns["reward/route_reward"])}
    assert scored == {"steps#0/0"}


def test_tuning_on_dropped_thoughts_sees_the_share_of_empty_ones(home, checkpoint, tmp_path):
    lines = [
        {"id": str(i), "image": "a.png", "question": "1?", "thought": "it is 1", "answer": "1"}
        for i in range(8)
    ]
    form = "<think>{thought}</think><answer>{answer}</answer>"
    inner = {"name": "vision.visual_qa", "path": rows(home, "thoughts.jsonl", *lines), "demo": form}
    data = {"name": "drop_thoughts", "data": inner}
    rewards = ["tag_format", {"name": "skip_ratio", "weight": 0.0}]
    (step,) = trained(
        "supervised",
        checkpoint("qwen2_5_vl"),
        tmp_path / "run",
        data=data,
        rewards=rewards,
        rollout={"num_prompts": 8},
        max_steps=1,
    )
    prompts = Pieces(Stream()).prompts(as_piece(data, "data"), "data")
    dropped = sum("<think>\n\n</think>" in prompt.answers[0].text for prompt in prompts)
    assert 0 < dropped < 8
    assert step["rewards/skip_ratio/mean"] == dropped / 8
    assert step["reward"] == 1, "an empty thought has the format"


def test_a_reward_model_and_rules_add_up(home, checkpoint, tmp_path):
    # r = r_rule + r_theta + r_format of Skywork R1V2: three rewards of weight 1.
    line = {"image": "a.png", "question": "who painted it?", "answer": "he"}
    path = rows(home, "model_and_rule.jsonl", line)
    theta = {"name": "reward_model", "model": write_bert(tmp_path / "bert", labels=1), "label": "theta"}
    (step,) = trained(
        "grpo",
        checkpoint("qwen2_5_vl"),
        tmp_path / "run",
        data={"name": "vision.visual_qa", "path": path, "demo": "<think>so</think><answer>{answer}</answer>"},
        rewards=["exact_match", theta, "tag_format"],
        rollout={"engine": ["offline"], "num_prompts": 1, "num_generations": 2},
        max_steps=1,
    )
    parts = [step[f"rewards/{name}/mean"] for name in ("exact_match", "theta", "tag_format")]
    assert parts[0] == parts[2] == 1 and parts[1] not in (0, 1)
    assert step["reward"] == pytest.approx(sum(parts))
