"""The demo goes through from clips to report, on made-up sources and with a few steps."""

import json
import re

import pytest
import torch

from examples.video_grounding import demo
from examples.video_grounding.spliced_videos import SHOTS, write_video

QUICK = ("max_steps=2", "rollout.num_prompts=2", "evaluation.num_prompts=4")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    sources, output = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("demo")
    generator = torch.Generator().manual_seed(0)
    for file in {shot.file for shot in SHOTS}:
        frames = 1 + max(shot.last for shot in SHOTS if shot.file == file)
        shades = torch.randint(0, 255, (frames, 3, 1, 1), generator=generator, dtype=torch.uint8)
        write_video(sources / file, shades.expand(-1, -1, 32, 32), 25)
    few = ["build.num_train=2", "build.num_test=2", "build.side=56"]
    return output, demo.demo(sources, output, seed=3, overrides=QUICK, video_overrides=few)


@pytest.mark.slow
def test_the_summary_holds_three_evaluations_with_intervals(finished):
    output, summary = finished
    assert json.loads((output / "summary.json").read_text()) == summary
    assert summary["seed"] == 3
    for name in demo.RUNS:
        assert set(demo.SHOWN) <= set(summary[name]["metrics"])
        low, high = summary[name]["intervals"]["mIoU"]
        assert 0 <= low <= summary[name]["metrics"]["mIoU"] <= high <= 1


@pytest.mark.slow
def test_the_page_needs_nothing_but_itself(finished):
    page = (finished[0] / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=\s*['\"]?\s*(?:https?:|//|file:)|url\((?!#)", page)
    # Strips of held-out clips: a true span and three answers each.
    assert page.count("<b style='color:#2b8a3e'>true</b>") == 4
    assert page.count("data:image/jpeg;base64,") == 4 * 16
    for words in ("tempsamp_r1", "grpo", "cold_start", "entropy", "steps of a rollout", "divergence"):
        assert words in page


@pytest.mark.slow
def test_both_runs_start_from_the_cold_start(finished):
    output, _ = finished
    for name in ("tempsamp_r1", "grpo"):
        config = (output / name / "config.yaml").read_text()
        assert f"model: {output}/cold_start/checkpoint-2/model" in config
