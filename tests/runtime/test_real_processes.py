"""Real classes on two processes, whole and sharded, train as one process does."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import time
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, parse
from mmrl.reporting.metrics import Journal
from mmrl.runtime.checkpoint import MODEL
from mmrl.training.loop import train
from mmrl.vision.policies.tokens import Tokens
from tests.diffusion import tiny as pipelines
from tests.diffusion.test_flow_runs import ANCHORED, KEPT_NEAR, MATCHING
from tests.diffusion.test_flow_runs import plan as flow_plan
from tests.support.distributed_worker import start
from tests.support.real_worker import seen
from tests.support.vllm_stand_in import StandIn
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
PARTING = {
    "rollout": {
        **SPEAKING["rollout"],
        "num_generations": 4,
        "engine": [
            {"name": "vision.generate", "max_completion_length": 6},
            {**TALKING["rollout"]["engine"][1], "name": "tests.vision.parting:Branching"},
        ],
    },
    "advantage": ["total", "tree_values"],
}
STEPPING = {
    "rollout": {
        **SPEAKING["rollout"],
        "engine": [
            {"name": "vision.generate", "max_completion_length": 6},
            {
                **TALKING["rollout"]["engine"][1],
                "name": "tests.vision.parting:Stepwise",
                "reward": SPEAKING["rewards"],
            },
        ],
    },
    "rewards": [{"name": "precomputed", "key": "step_reward"}],
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
ELSEWHERE = {
    "rollout": {
        **SPEAKING["rollout"],
        "engine": [*SPEAKING["rollout"]["engine"], "tests.support.real_worker:Elsewhere"],
    },
    "evaluation": {"data": "tests.support.real_worker:seen"},
    "eval_steps": 2,
}
# In 16 bits, sums depend on what is in a batch, so one process has the batches of two: a group each.
GROUP_BY_GROUP = {
    "rollout": {
        **SPEAKING["rollout"],
        "engine": [{"name": "vision.generate", "max_completion_length": 6, "batch_size": 3}],
    },
    "learn": {**SPEAKING["learn"], "micro_batch_steps": 1},
}
# SGD, so that weights tell of gradients: the first step of Adam is as long for a small one.
FLOW = {"learn": {"learning_rate": 0.3, "optimizer": "sgd"}, "max_steps": 3, "save_steps": 2}
LORA = merge({"policy": {"lora_rank": 2}}, KEPT_NEAR)
DRAWN_GROUP_BY_GROUP = {"policy": {"dtype": "bfloat16"}, "learn": {"micro_batch_steps": 1}}
BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None

pytestmark = pytest.mark.usefixtures("no_curves")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.MAKERS["qwen2_5_vl"](folder / "vlm")
    pipelines.MAKERS["sd3"](folder / "sd3")

    def speak(**policy):
        named = {"name": "vision.tokens", "model": str(folder / "vlm"), "dtype": "float32"}
        return lambda output: {**SPEAKING, "policy": {**named, **policy}, "output_dir": str(output)}

    if BITSANDBYTES:
        tiny.in_few_bits(folder / "vlm", folder / "four")

    def half(**policy):
        return lambda output: {**speak(dtype="bfloat16", **policy)(output), **GROUP_BY_GROUP}

    def draw(likelihood, changes):
        return lambda output: flow_plan(folder / "sd3", output, likelihood, **merge(changes, FLOW))

    return {
        "a model that speaks": speak(freeze_vision_tower=False),
        "an adapter": speak(lora_rank=2, gradient_checkpointing=True),
        "an adapter of a 16-bit model": half(lora_rank=2, gradient_checkpointing=True),
        "a 16-bit model": half(gradient_checkpointing=True),
        "an adapter over 4 bits": speak(model=str(folder / "four"), lora_rank=2),
        "a conversation": lambda output: {**speak(freeze_vision_tower=False)(output), **TALKING},
        "a tree of conversations": lambda output: {**speak(freeze_vision_tower=False)(output), **PARTING},
        "candidates of turns": lambda output: {**speak(freeze_vision_tower=False)(output), **STEPPING},
        "an environment": lambda output: {**speak(freeze_vision_tower=False)(output), **PLAYING},
        "a game": lambda output: {**speak(freeze_vision_tower=False)(output), **GAMING},
        "answers from elsewhere": lambda output: {**speak(lora_rank=2)(output), **ELSEWHERE},
        "a critic": lambda output: {**speak(freeze_vision_tower=False)(output), **CRITIC},
        "a model that draws": draw(MATCHING, ANCHORED),
        "an adapter that draws": draw("diffusion.transition", LORA),
        "a 16-bit model that draws": draw(MATCHING, merge(ANCHORED, DRAWN_GROUP_BY_GROUP)),
    }


def left_out(name, way):
    """Say why a plan cannot be trained in a way; nothing where it can."""
    if "4 bits" in name and (way != "ddp" or not BITSANDBYTES):
        return "weights of 4 bits are for data parallelism, and need bitsandbytes"
    if name in ENGINES and way != "ddp":
        return "engines hold conversations in the same way with weights in shards: one plan shows it"
    return ""


@pytest.fixture(scope="module")
def on_two(plans, tmp_path_factory):
    """Train every plan on two processes, each way in one pair of processes; the last step after a stop."""

    def go(way):
        folder = tmp_path_factory.mktemp(way)
        several = {name: make for name, make in plans.items() if not left_out(name, way)}
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
    "an adapter of a 16-bit model",
    "a 16-bit model",
    "an adapter over 4 bits",
    "a conversation",
    "a tree of conversations",
    "candidates of turns",
    "an environment",
    "a game",
    "answers from elsewhere",
    "a critic",
    "a model that draws",
    "an adapter that draws",
    "a 16-bit model that draws",
)


ENGINES = ("a tree of conversations", "candidates of turns", "an environment", "a game")


@pytest.fixture(scope="module")
def on_one(plans, tmp_path_factory):
    """Train a plan on one process, once for all ways; return the run and copies of its weights."""

    def go(name):
        run = build(parse(plans[name](tmp_path_factory.mktemp("one")), Config), quiet=True)
        train(run)
        return run, copied(run.policy, trained=True), {k: copied(s.policy) for k, s in run.seconds.items()}

    return cache(go)


def copied(policy, trained=False):
    """Copy the weights of a model, or those that are trained."""
    named = policy.module.named_parameters()
    return {key: p.detach().clone() for key, p in named if p.requires_grad or not trained}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_real_models_as_one(name, way, on_one, on_two):
    if reason := left_out(name, way):
        pytest.skip(reason)
    run, trained, learned = on_one(name)
    for weight in run.policy.module.parameters():
        if weight.requires_grad:
            weight.data.zero_()
    run.policy.load(on_two(way) / name / "checkpoint-3" / MODEL)
    for second in run.seconds.values():
        second.load(on_two(way) / name / "checkpoint-3")
    assert_close(copied(run.policy, trained=True), trained)
    for kind, second in run.seconds.items():
        assert_close(copied(second.policy), learned[kind])
    found, wanted = Journal(on_two(way) / name).read(), run.journal.read()
    assert [record["step"] for record in found] == [record["step"] for record in wanted]
    for one, other in zip(found, wanted, strict=True):
        for key in ("reward", "completions/mean_length", "grad_norm", "kl"):
            if key in other:
                assert one[key] == pytest.approx(other[key], rel=2e-4, abs=1e-6), key


def assert_close(found, wanted):
    """Compare weights by name."""
    assert found.keys() == wanted.keys()
    for key, weight in wanted.items():
        torch.testing.assert_close(found[key], weight, rtol=2e-4, atol=2e-5, msg=key)


SAVED = "checkpoint-3/**/*.safetensors"


def on_processes(plans, folder, way, world=2):
    """Train plans on so many processes; return what they print, and whether they came to their end."""
    listed = folder / "plans.json"
    listed.write_text(json.dumps(plans))
    processes = start("tests.support.real_worker", [str(listed), way], world)
    printed = [process.communicate(timeout=600)[0] for process in processes]
    return "\n".join(printed), not any(process.returncode for process in processes)


def assert_same_run(found, wanted):
    """Compare the trained weights of two models and the journals of their runs."""
    for (key, one), other in zip(
        found.policy.module.named_parameters(), wanted.policy.module.parameters(), strict=True
    ):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=2e-4, atol=2e-5, msg=key)
    steps = zip(found.journal.read(), wanted.journal.read(), strict=True)
    for one, other in steps:
        assert [one["step"], one["reward"]] == [other["step"], pytest.approx(other["reward"], rel=2e-4)]


# The state of the optimizer is taken up too, which SGD has with momentum alone.
MOVING = {"learn": {"optimizer": {"name": "sgd", "momentum": 0.9}}}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_run_goes_on_with_another_number_of_processes(way, plans, tmp_path):
    names = ("a model that speaks", "an adapter", "an adapter of a 16-bit model")

    def plan(name, steps, folder="run"):
        return {**merge(plans[name](tmp_path / folder / name), MOVING), "max_steps": steps}

    def alone(name, steps, folder="run"):
        run = build(parse(plan(name, steps, folder), Config), quiet=True)
        train(run)
        return run

    for name in names:
        alone(name, 1)
    printed, ended = on_processes([plan(name, 2) for name in names], tmp_path, way)  # from one to two
    assert ended, printed
    for name in names:  # and from two to one
        assert_same_run(alone(name, 3), alone(name, 3, "alone"))


@pytest.mark.slow
def test_shards_of_16_bits_go_on_bit_for_bit(plans, tmp_path):
    """The trained weights are float32: those of an adapter, and those that became so once sharded."""
    names = ("an adapter of a 16-bit model", "a 16-bit model")

    def plan(name, folder, steps=3):
        adamw = {"learn": {"optimizer": {"name": "adamw"}}, "max_steps": steps}
        return merge(plans[name](tmp_path / folder / name), adamw)

    runs = (("through", 3), ("stopped", 2), ("stopped", 3))
    printed, ended = on_processes([plan(name, *run) for run in runs for name in names], tmp_path, "fsdp2")
    assert ended, printed
    for name in names:
        one, other = (
            {file.name: load_file(file) for file in (tmp_path / folder / name).rglob(SAVED)}
            for folder in ("through", "stopped")
        )
        assert one.keys() == other.keys() and one
        for file, weights in one.items():
            assert all(torch.equal(weight, other[file][key]) for key, weight in weights.items()), (name, file)


@pytest.mark.slow
def test_a_killed_process_of_shards_is_named_and_the_run_goes_on_bit_for_bit(plans, tmp_path):
    def plan(folder):
        adamw = {"learn": {"optimizer": {"name": "adamw"}}, "max_steps": 6, "save_steps": 1}
        return merge(plans["a 16-bit model"](tmp_path / folder), adamw)

    printed, ended = on_processes([plan("through")], tmp_path, "fsdp2")
    assert ended, printed
    draw = random.Random(0)
    for turn in range(int(os.environ.get("MMRL_KILLED_RUNS", "2"))):
        folder, rank = f"killed-{turn}", 1 - turn % 2
        listed = tmp_path / "killed.json"
        listed.write_text(json.dumps([plan(folder)]))
        processes = start("tests.support.real_worker", [str(listed), "fsdp2"], 2)
        steps = draw.randint(1, 4)
        while len(Journal(tmp_path / folder).read()) < steps and processes[rank].poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1))
        processes[rank].kill()
        printed = [process.communicate(timeout=600)[0] for process in processes]
        assert processes[1 - rank].returncode == 1, printed[1 - rank]
        assert re.search(rf"process {rank} of 2 .*is gone", printed[1 - rank]), printed[1 - rank]
        again, ended = on_processes([plan(folder)], tmp_path, "fsdp2")
        assert ended, again
        assert_same_files(tmp_path / "through", tmp_path / folder, "checkpoint-6/**/*.safetensors")


def assert_same_files(one, other, pattern):
    """Compare the tensors of two runs bit for bit."""
    found = {folder: sorted(folder.rglob(pattern)) for folder in (one, other)}
    assert len(found[one]) == len(found[other]) > 1  # weights, and the state of the trainer
    for mine, its in zip(found[one], found[other], strict=True):
        tensors = load_file(its)
        assert all(torch.equal(value, tensors[key]) for key, value in load_file(mine).items()), mine


@pytest.mark.slow
@pytest.mark.skipif(not BITSANDBYTES, reason="needs bitsandbytes")
def test_weights_of_4_bits_are_refused_as_shards(plans, tmp_path):
    printed, ended = on_processes([plans["an adapter over 4 bits"](tmp_path / "run")], tmp_path, "fsdp2")
    assert not ended and "which FSDP2 cannot shard; launch with configs/accelerate/ddp.yaml" in printed


@pytest.mark.slow
def test_shards_a_step_ahead_are_gathered_and_taken_up_again(plans, tmp_path):
    def plan(folder, once=""):
        engines = [
            *SPEAKING["rollout"]["engine"],
            {"name": "tests.support.real_worker:Beginning", "once": once},
        ]
        return {
            **plans["a model that speaks"](tmp_path / folder),
            "rollout": {**SPEAKING["rollout"], "engine": engines, "max_staleness": 1, "policy": ""},
            "objective": {**SPEAKING["objective"], "step_weight": ["truncated_importance"]},
            "references": {"ref": "frozen"},
            "max_steps": 5,
            "save_steps": 1,
        }

    listed = [plan("shards", str(tmp_path / "once"))]
    printed, ended = on_processes(listed, tmp_path, "fsdp2")
    assert "with rollouts in flight" in printed and not ended
    printed, ended = on_processes(listed, tmp_path, "fsdp2")
    assert ended, printed
    wanted = build(parse(plan("alone"), Config), quiet=True)
    train(wanted)
    found = build(parse({**plan("shards", str(tmp_path / "once"))}, Config), quiet=True)
    found.policy.load(tmp_path / "shards" / "checkpoint-5" / MODEL)
    assert_same_run(found, wanted)


@pytest.mark.slow
def test_servers_get_the_weights_of_shards_and_answer_while_they_stay_shards(plans, tmp_path):
    adapter = plans["an adapter"](tmp_path / "run")
    served = Tokens(**{key: value for key, value in adapter["policy"].items() if key in ("model", "dtype")})
    stand_in = StandIn(served, seen())
    engine = {"name": "vision.vllm", "servers": [stand_in.url], "max_completion_length": 6}
    plan = {
        **adapter,
        "rollout": {
            **SPEAKING["rollout"],
            "engine": [{**engine, "weights_folder": str(tmp_path / "weights")}],
            "policy": "",
        },
        # Steps this small change weights, and log-probabilities by less than a server may differ.
        "learn": {**SPEAKING["learn"], "learning_rate": 1e-7},
    }
    printed, ended = on_processes([plan], tmp_path, "fsdp2")
    assert ended, printed
    assert stand_in.paths().count("v1/load_lora_adapter") == 3  # of three steps
    stand_in.off = 0.1
    printed, ended = on_processes([{**plan, "output_dir": str(tmp_path / "other")}], tmp_path, "fsdp2")
    stand_in.kill()
    assert not ended and "does not sample from the policy" in printed
