"""Two processes compute the layers of a long row together: as one process does, within 1e-5."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from mmrl.config.loading import ConfigError
from mmrl.reporting.metrics import Journal
from mmrl.vision.policies.tokens import Tokens
from tests.runtime.test_real_processes import SPEAKING
from tests.support.distributed_worker import start

LORA = {"lora_rank": 4, "freeze_vision_tower": False}
CASES = {
    "fast": (
        ("qwen2_5_vl", {"freeze_vision_tower": False}),
        ("qwen2_5_vl", {**LORA, "gradient_checkpointing": True}),
        ("qwen3_vl", {"freeze_vision_tower": False}),  # features of earlier layers of the tower
    ),
    "slow": (
        # Of what a process shares out, the features of the tower alone have a gradient.
        ("qwen3_vl", {**LORA, "lora_target_modules": ["q_proj", "deepstack_merger_list.0.linear_fc1"]}),
        ("qwen2_5_vl", LORA),
        ("qwen2_5_vl", {"lora_rank": 4}),
        ("qwen2_vl", {**LORA, "video": False}),
    ),
}


@pytest.fixture(scope="module")
def compared(checkpoint, tmp_path_factory):
    """Compare the fast or the slow cases in one pair of processes; return their folder, and what is said."""

    def go(speed):
        folder, listed = tmp_path_factory.mktemp("cases"), []
        for number, (family, options) in enumerate(CASES[speed]):
            (folder / str(number)).mkdir()
            listed.append((str(folder / str(number)), str(checkpoint(family)), options))
        (folder / "cases.json").write_text(json.dumps(listed))
        processes = start("tests.support.sequence_worker", [str(folder / "cases.json")], 2)
        try:
            printed = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return folder, "\n".join(printed)

    return cache(go)


@pytest.mark.parametrize(
    ("speed", "number"),
    [
        pytest.param(speed, number, marks=[pytest.mark.slow] if speed == "slow" else [])
        for speed, cases in CASES.items()
        for number in range(len(cases))
    ],
)
def test_values_and_gradients_are_those_of_one_process(compared, speed, number):
    folder, printed = compared(speed)
    assert all((folder / f"{number}/done-{rank}").exists() for rank in range(2)), printed


@pytest.mark.slow
def test_a_run_is_that_of_data_parallelism(checkpoint, tmp_path):
    def plan(name, **policy):
        named = {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float32"}
        policy = {**named, "share_prefix": False, **policy}
        return {**SPEAKING, "policy": policy, "max_steps": 2, "output_dir": str(tmp_path / name)}

    plans = [plan("together", sp_size=2), plan("apart")]
    (tmp_path / "plans.json").write_text(json.dumps(plans))
    processes = start("tests.support.real_worker", [str(tmp_path / "plans.json"), "ddp"], 2)
    printed = [process.communicate(timeout=600)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(printed)
    steps = zip(*(Journal(tmp_path / name).read() for name in ("together", "apart")), strict=True)
    for one, other in steps:
        for key in ("reward", "loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    one, other = (
        {file.name: load_file(file) for file in (tmp_path / name).glob("checkpoint-2/model/*.safetensors")}
        for name in ("together", "apart")
    )
    assert one.keys() == other.keys() and one
    for file, weights in one.items():
        for key, weight in weights.items():
            torch.testing.assert_close(weight, other[file][key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "wanted"),
    [
        ("qwen2_5_vl", {}, "needs `share_prefix: false`"),
        ("qwen2_5_vl", {"share_prefix": False, "sp_size": 3}, "attention heads that 3 divides, not"),
        ("qwen2_5_vl", {"share_prefix": False, "attn_implementation": "eager"}, "needs `attn_impl.*'eager'"),
        ("qwen2_5_vl", {"share_prefix": False, "lora_rank": 4, "roles": ("a", "b")}, "needs no `roles`"),
        ("llava", {"share_prefix": False}, "needs a model of type .*, not 'llava'"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_before_weights_are_loaded(
    checkpoint, monkeypatch, family, options, wanted
):
    monkeypatch.setattr("mmrl.vision.models.loading.load_model", lambda *_, **__: pytest.fail("loaded"))
    options = {"sp_size": 2, **options}
    folder = str(checkpoint(family))
    with pytest.raises(ConfigError, match=wanted):
        Tokens(model=folder, **options)
    with pytest.raises(ConfigError, match=wanted):
        Tokens.check_folders({"model": folder, **options})
