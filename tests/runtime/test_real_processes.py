"""Real classes on two processes, whole and sharded, train as one process does."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, parse
from mmrl.reporting import html
from mmrl.reporting.metrics import Journal
from mmrl.runtime import deepspeed
from mmrl.runtime.checkpoint import MODEL
from mmrl.training.loop import train
from tests.diffusion import tiny as pipelines
from tests.diffusion.test_flow_runs import ANCHORED, KEPT_NEAR, MATCHING
from tests.diffusion.test_flow_runs import plan as flow_plan
from tests.support.distributed_worker import start
from tests.vision import tiny

SPEAKING = {
    "data": "tests.support.real_worker:seen",
    "rollout": {
        "engine": [{"name": "vision.generate", "max_completion_length": 6}],
        "num_prompts": 2,
        "num_generations": 3,
        "policy": "slow",
    },
    "rewards": ["tests.support.real_worker:longer"],
    "advantage": ["total", "group_normalize"],
    "objective": {
        "name": "policy_gradient",
        "surrogate": "clip",
        "aggregation": "step_mean",
        "penalty": [{"name": "k3", "coef": 0.1}],
    },
    "references": {"ref": "frozen", "slow": {"name": "ema", "decay": 0.5}},
    "learn": {"learning_rate": 1e-2, "optimizer": "sgd", "micro_batch_steps": 64, "max_grad_norm": 0.5},
    "report": {"trackers": []},
    "max_steps": 3,
    "save_steps": 2,
}
CRITIC = {
    "advantage": ["total", "gae"],
    "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
    "rollout": {**SPEAKING["rollout"], "policy": ""},
    "references": {
        "critic": {
            "name": "second_model",
            "policy": "vision.critic",
            "advantage": ["total", "lambda_returns"],
            "objective": "value_regression",
            "optimizer": "sgd",
            "learning_rate": 0.1,
        }
    },
}
TALKING = {
    "rollout": {
        **SPEAKING["rollout"],
        "engine": [
            {"name": "vision.generate", "max_completion_length": 6},
            {"name": "tests.vision.talking:Talkative", "tool": ["vision.crop", "tests.vision.talking:ruled"]},
        ],
    }
}
PLAYING = {
    "data": "tests.vision.playing:seen",
    "rewards": [{"name": "precomputed", "key": "Ladder"}, "tests.vision.playing:rungs_left"],
    "rollout": {
        **SPEAKING["rollout"],
        "engine": [
            {"name": "vision.generate", "max_completion_length": 6},
            {"name": "tests.vision.playing:Playing", "environment": "tests.vision.playing:Ladder"},
        ],
    },
}
GAMING = {
    "rollout": {
        **SPEAKING["rollout"],
        "engine": [
            {"name": "vision.generate", "max_completion_length": 6},
            {"name": "play", "game": "tests.support.playing:Telephone"},
        ],
    },
    "rewards": [{"name": "precomputed", "key": "payoff", "label": "payoff", "at": "every"}],
    "advantage": [
        "total",
        {"name": "returns", "by": ["role"]},
        {"name": "group_center", "by": ["group", "role"]},
    ],
}
# SGD, so that weights tell of gradients: the first step of Adam is as long for a small one.
FLOW = {"learn": {"learning_rate": 0.3, "optimizer": "sgd"}, "max_steps": 3, "save_steps": 2}
LORA = merge({"policy": {"lora_rank": 2}}, KEPT_NEAR)


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.MAKERS["qwen2_5_vl"](folder / "vlm")
    pipelines.MAKERS["sd3"](folder / "sd3")

    def speak(**policy):
        named = {"name": "vision.tokens", "model": str(folder / "vlm"), "dtype": "float32"}
        return lambda output: {**SPEAKING, "policy": {**named, **policy}, "output_dir": str(output)}

    def draw(likelihood, changes):
        return lambda output: flow_plan(folder / "sd3", output, likelihood, **merge(changes, FLOW))

    return {
        "a model that speaks": speak(freeze_vision_tower=False),
        "an adapter": speak(lora_rank=2, gradient_checkpointing=True),
        "a conversation": lambda output: {**speak(freeze_vision_tower=False)(output), **TALKING},
        "an environment": lambda output: {**speak(freeze_vision_tower=False)(output), **PLAYING},
        "a game": lambda output: {**speak(freeze_vision_tower=False)(output), **GAMING},
        "a critic": lambda output: {**speak(freeze_vision_tower=False)(output), **CRITIC},
        "a model that draws": draw(MATCHING, ANCHORED),
        "an adapter that draws": draw("diffusion.transition", LORA),
    }


@pytest.fixture(scope="module")
def on_two(plans, tmp_path_factory):
    """Train every plan on two processes, each way in one pair of processes; the last step after a stop."""

    def go(way):
        folder = tmp_path_factory.mktemp(way)
        several = {name: make for name, make in plans.items() if way != "zero1" or name != "a critic"}
        stopped = [{**make(folder / name), "max_steps": 2} for name, make in several.items()]
        listed = folder / "plans.json"
        listed.write_text(json.dumps([*stopped, *(make(folder / name) for name, make in several.items())]))
        processes = start("tests.support.real_worker", [str(listed), way], 2)
        printed = [process.communicate(timeout=600)[0] for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(printed)
        return folder

    return cache(go)


NAMES = (
    "a model that speaks",
    "an adapter",
    "a conversation",
    "an environment",
    "a game",
    "a critic",
    "a model that draws",
    "an adapter that draws",
)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "zero1"])
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_real_models_as_one(name, way, plans, on_two, tmp_path):
    if name == "a critic" and way == "zero1":
        pytest.skip("DeepSpeed trains one model")
    if way == "zero1":
        pytest.importorskip("deepspeed", reason="an extra of its own")
    run = build(parse(plans[name](tmp_path), Config), quiet=True)
    train(run)
    trained = {key: p.detach().clone() for key, p in run.policy.module.named_parameters() if p.requires_grad}
    run.policy.load(on_two(way) / name / "checkpoint-3" / MODEL)
    for key, parameter in run.policy.module.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.detach(), trained[key], rtol=2e-4, atol=2e-5, msg=key)
    for kind, second in run.seconds.items():
        learned = {key: p.detach().clone() for key, p in second.policy.module.named_parameters()}
        second.load(on_two(way) / name / "checkpoint-3")
        for key, parameter in second.policy.module.named_parameters():
            torch.testing.assert_close(
                parameter.detach(), learned[key], rtol=2e-4, atol=2e-5, msg=f"{kind} {key}"
            )
    found, wanted = Journal(on_two(way) / name).read(), run.journal.read()
    assert [record["step"] for record in found] == [record["step"] for record in wanted]
    for one, other in zip(found, wanted, strict=True):
        for key in ("reward", "completions/mean_length", "grad_norm", "kl"):
            if key in other:
                assert one[key] == pytest.approx(other[key], rel=2e-4, abs=1e-6), key


@pytest.mark.parametrize(
    "stage, optimizer, said",
    [
        (2, torch.optim.AdamW, "ZeRO-2 exchanges gradients"),
        (3, torch.optim.AdamW, "ZeRO-3 exchanges gradients"),
        (1, torch.optim.Adagrad, "Adagrad needs their shapes; set learn.optimizer=adamw"),
    ],
)
def test_what_deepspeed_would_train_wrongly_is_refused(stage, optimizer, said):
    with pytest.raises(ValueError, match=said):
        deepspeed.check(stage, optimizer([torch.nn.Parameter(torch.zeros(2))]))
    deepspeed.check(1, torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]))
