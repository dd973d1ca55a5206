"""What image and video pipelines take of memory, without their weights."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.diagnostics.memory_estimates import estimate_memory, estimate_with
from tests.diffusion import tiny


def config_of(model, **options):
    engine = {"name": "diffusion.denoise", "num_inference_steps": 3, "height": 32, "width": 32}
    plain = {
        "policy": {"name": "diffusion.flow", "model": str(model), **options},
        "data": "tests.support.real_worker:seen",
        "rollout": {"engine": [engine], "num_prompts": 2, "num_generations": 2},
        "rewards": ["tests.support.real_worker:longer"],
        "advantage": ["total", "group_normalize"],
        "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
        "references": {"ref": "frozen"},
        "output_dir": "nowhere",
    }
    return parse(plain, Config)


@pytest.mark.parametrize("family", sorted(tiny.MAKERS))
def test_weights_of_pipelines_need_not_be_there(family, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(family), tmp_path / "model")
    given = ({"dtype": "float32"}, {"dtype": "bfloat16", "lora_rank": 2}, {"dtype": "float16"})
    configs = [config_of(folder, **options) for options in given]
    wanted = [
        estimate_with(config, Pieces(Stream(0)).make("policy", config.policy), []) for config in configs
    ]
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    # The scale of an embedding, a buffer that no file has, is in 16 or 32 bits.
    assert [dict(estimate_memory(config)) for config in configs] == [
        pytest.approx(dict(sizes), rel=1e-3) for sizes in wanted
    ]
    assert all({"weights", "optimizer", "encoders and decoder", "paths"} <= sizes.keys() for sizes in wanted)


def test_paths_by_hand(checkpoint):
    config = config_of(checkpoint("sd3_pixel"), dtype="float32")
    ends = 2 * 2 * (3 * 32 * 32) * 4  # 2 prompts with 2 images of 3 x 32 x 32 in 4 bytes
    assert estimate_memory(config)["paths"] == ends
    (engine,) = config.rollout.engine
    recorded = replace(engine, options={**engine.options, "solver": "diffusion.flow_sde"})
    config = replace(config, rollout=replace(config.rollout, engine=(recorded,)))
    assert estimate_memory(config)["paths"] == ends * (1 + 3)  # the start, and what each of 3 steps ends with
