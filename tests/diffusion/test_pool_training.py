"""Runs on pools and on pairs that are made while training: GDRO, and DenseDPO with a reward that compares."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, parse
from mmrl.diffusion.image_io import save_image, save_video
from mmrl.rewards.adapters import comparable_outcomes
from mmrl.training.loop import train
from tests.diffusion.flows import picture
from tests.support.configs import method_file

pytestmark = pytest.mark.usefixtures("no_page")

SEEN = []


def brighter(prompts, outcomes):
    """Give 1 to the brightest outcome of every group to compare, and 0 to others."""
    values, light = [0.0] * len(outcomes), [float(o.video.float().mean()) for o in outcomes]
    for members in comparable_outcomes(prompts):
        SEEN.append([outcomes[i].times.tolist() for i in members])
        values[max(members, key=light.__getitem__)] = 1.0
    return values


def trained(config, folder):
    """Train for two steps and return the run, with the trained weights before in `before`."""
    usual = {"learn": {"learning_rate": 1e-2}, "report": {"trackers": [], "visualizations": []}}
    changes = {**usual, "max_steps": 2, "output_dir": str(folder / "run")}
    run = build(parse(merge(config, changes), Config), quiet=True)
    run.before = weights_of(run)
    train(run)
    return run


def weights_of(run):
    return [p.detach().clone() for p in run.policy.module.parameters() if p.requires_grad]


def test_pairs_made_while_training_are_compared_second_by_second(checkpoint, tmp_path):
    save_video(picture(0, frames=5), tmp_path / "a.mp4", Fraction(1))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a cat", "videos": ["a.mp4"]}) + "\n")
    config = read("configs/train/video_dense_dpo_online.yaml")
    size = {"num_frames": 5, "height": 32, "width": 32}
    policy = {"model": str(checkpoint("wan")), "dtype": "float32", "max_sequence_length": 64, "lora_rank": 2}
    config = merge(
        config,
        {
            "policy": {**policy, "likelihood": {"segments": 2}},
            "data": {"path": str(tmp_path / "rows.jsonl"), "root": str(tmp_path), **size},
            "rollout": {
                "num_prompts": 1,
                "engine": {0: {**size, "num_inference_steps": 4}, 2: {"segments": 2}},
            },
        },
    )
    config["rollout"]["engine"][2]["segments"] = 2
    config["rewards"] = ["tests.diffusion.test_pool_training:brighter"]
    SEEN.clear()
    run = trained(config, tmp_path)
    # Two steps with two segments each: the same frames of both videos stand side by side.
    assert len(SEEN) == 4 and all(len(group) == 2 and group[0] == group[1] for group in SEEN)
    assert SEEN[0] != SEEN[1]
    assert any((a != b).any() for a, b in zip(run.before, weights_of(run), strict=True))


def test_gdro_learns_from_a_pool(checkpoint, tmp_path):
    names = [str(save_image(picture(i), tmp_path / f"{i}.png").name) for i in range(8)]
    row = {"prompt": "a", "images": names, "scores": {"clip_score": torch.linspace(0, 1, 8).tolist()}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    config = read(method_file("gdro"))
    policy = {"name": "diffusion.flow", "model": str(checkpoint("sd3")), "dtype": "float32", "lora_rank": 2}
    config = merge(config, {"policy": {**policy, "max_sequence_length": 1}})
    config |= {
        "data": {"name": "diffusion.images", "path": str(tmp_path / "train.jsonl"), "root": str(tmp_path)},
        "rewards": [{"name": "precomputed", "key": "clip_score"}],
        "rollout": {**config["rollout"], "num_prompts": 1},
    }
    run = trained(config, tmp_path)
    assert any((a != b).any() for a, b in zip(run.before, weights_of(run), strict=True))
    assert run.journal.read()[0]["reward"] == pytest.approx(0.5, abs=0.3)
