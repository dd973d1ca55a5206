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
from mmrl.training.checkpointing import CONFIG
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
FLOW = {"learn": {"learning_rate": 0.3, "optimizer": "sgd"}, "max_steps": 2}
LORA = merge({"policy": {"lora_rank": 2}}, KEPT_NEAR)
DRAWN_GROUP_BY_GROUP = {"policy": {"dtype": "bfloat16"}, "learn": {"micro_batch_steps": 1}}
BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None

pytestmark = pytest.mark.usefixtures("no_page")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.MAKERS["qwen2_5_vl"](folder / "vlm")
    pipelines.MAKERS["sd3"](folder / "sd3")

    def speak(**policy):
        named = {"name": "vision.tokens", "model": str(folder / "vlm"), "dtype": "float32"}
        usual = {**SPEAKING, "policy": {**named, **policy}, "max_steps": 2}
        return lambda output: {**usual, "output_dir": str(output)}

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


# Which runs of `on_two` are stopped after a step and go on, beside `MOVED` and `IN_16_BITS`.
STOPPED = (
    "a 16-bit model",
    "an adapter over 4 bits",
    "answers from elsewhere",
    "a critic",
    "a model that draws",
    "a 16-bit model that draws",
)
MOVED = ("a model that speaks", "an adapter of a 16-bit model")  # from one process to two, and back
# The state of the optimizer is taken up too, which SGD has with momentum alone.
MOVING = {"learn": {"optimizer": {"name": "sgd", "momentum": 0.9}}}
IN_16_BITS = ("an adapter of a 16-bit model", "a 16-bit model")
ADAMW = {"learn": {"optimizer": {"name": "adamw"}}}
LONG = {**ADAMW, "max_steps": 6, "save_steps": 1}  # for a run whose processes are killed


@pytest.fixture(scope="module")
def on_two(plans, tmp_path_factory):
    """Train all plans of a way in one pair of processes: those of every test that needs no other ones."""

    def go(way):
        folder = tmp_path_factory.mktemp(way)

        def plan(name, within="", steps=2, **changes):
            return merge(plans[name](folder / within / name), {**changes, "max_steps": steps})

        several = [name for name in plans if not left_out(name, way)]
        listed = [plan(name, steps=1) for name in STOPPED if name in several]
        listed += [plan(name) for name in several]
        for name in MOVED:
            trained_alone(plan(name, "moved", steps=1, **MOVING))
            listed.append(plan(name, "moved", **MOVING))
        if way == "fsdp2":
            for run in (("through", 2), ("stopped", 1), ("stopped", 2)):
                listed += [plan(name, *run, **ADAMW) for name in IN_16_BITS]
            listed.append(merge(plans["a 16-bit model"](folder / "long"), LONG))
        printed, ended = on_processes(listed, folder, way)
        assert ended, printed
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
        run = trained_alone(plans[name](tmp_path_factory.mktemp("one")))
        return run, copied(run.policy, trained=True), {k: copied(s.policy) for k, s in run.seconds.items()}

    return cache(go)


def trained_alone(plan):
    """Train a plan on this process."""
    run = build(parse(plan, Config), quiet=True)
    train(run)
    return run


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
    run.policy.load(on_two(way) / name / "checkpoint-2" / MODEL)
    for second in run.seconds.values():
        second.load(on_two(way) / name / "checkpoint-2")
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


@pytest.fixture(scope="module")
def moved_nowhere(plans, tmp_path_factory):
    """Train what is moved elsewhere on one process."""
    folder = tmp_path_factory.mktemp("nowhere")
    return cache(lambda name: trained_alone(merge(plans[name](folder / name), {**MOVING, "max_steps": 3})))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_run_goes_on_with_another_number_of_processes(way, plans, on_two, moved_nowhere):
    for name in MOVED:
        plan = plans[name](on_two(way) / "moved" / name)  # which went from one to two
        assert_same_run(trained_alone(merge(plan, {**MOVING, "max_steps": 3})), moved_nowhere(name))


@pytest.mark.slow
def test_shards_of_16_bits_go_on_bit_for_bit(on_two):
    """The trained weights are float32: those of an adapter, and those that became so once sharded."""
    for name in IN_16_BITS:
        through, stopped = (on_two("fsdp2") / folder / name for folder in ("through", "stopped"))
        assert_same_files(through, stopped, "checkpoint-2/**/*.safetensors")


@pytest.mark.slow
def test_a_killed_process_of_shards_is_named_and_the_run_goes_on_bit_for_bit(plans, on_two, tmp_path):
    draw = random.Random(0)
    for turn in range(int(os.environ.get("MMRL_KILLED_RUNS", "1"))):
        plan = merge(plans["a 16-bit model"](tmp_path / f"killed-{turn}"), LONG)
        journal, listed = Journal(tmp_path / f"killed-{turn}"), tmp_path / "killed.json"
        listed.write_text(json.dumps([plan]))
        for rank in (1, 0):
            steps = len(journal.read()) + 1
            processes = start("tests.support.real_worker", [str(listed), "fsdp2"], 2)
            while len(journal.read()) < steps and processes[rank].poll() is None:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.7))
            processes[rank].kill()
            printed = [process.communicate(timeout=600)[0] for process in processes]
            assert processes[1 - rank].returncode == 1, printed[1 - rank]
            assert re.search(rf"process {rank} of 2 .*is gone", printed[1 - rank]), printed[1 - rank]
        again, ended = on_processes([plan], tmp_path, "fsdp2")
        assert ended, again
        assert_same_files(on_two("fsdp2") / "long", journal.path.parent, "checkpoint-6/**/*.safetensors")


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
            "max_steps": 4,
            "save_steps": 1,
        }

    listed = [plan("shards", str(tmp_path / "once"))]
    printed, ended = on_processes(listed, tmp_path, "fsdp2")
    assert "with rollouts in flight" in printed and not ended
    printed, ended = on_processes(listed, tmp_path, "fsdp2")
    assert ended, printed
    wanted = trained_alone(plan("alone"))
    found = build(parse({**plan("shards", str(tmp_path / "once"))}, Config), quiet=True)
    found.policy.load(tmp_path / "shards" / "checkpoint-4" / MODEL)
    assert_same_run(found, wanted)


@pytest.mark.slow
def test_servers_get_the_weights_of_shards_and_answer_while_they_stay_shards(plans, tmp_path):
    adapter = plans["an adapter"](tmp_path / "run")
    served = Tokens(**{key: value for key, value in adapter["policy"].items() if key in ("model", "dtype")})
    stand_in = StandIn(served, seen())
    engine = {"name": "vision.vllm", "servers": [stand_in.url], "max_completion_length": 6}

    def plan(name, steps):
        served = {**engine, "weights_folder": str(tmp_path / f"weights of {name}")}
        return {
            **adapter,
            "rollout": {**SPEAKING["rollout"], "engine": [served], "policy": ""},
            # Steps this small change weights, and log-probabilities by less than a server may differ.
            "learn": {**SPEAKING["learn"], "learning_rate": 1e-7},
            "max_steps": steps,
            "output_dir": str(tmp_path / name),
        }

    listed = tmp_path / "plans.json"
    listed.write_text(json.dumps([plan("right", 2), plan("wrong", 1000)]))
    processes = start("tests.support.real_worker", [str(listed), "fsdp2"], 2)
    while not (tmp_path / "wrong" / CONFIG).exists() and processes[0].poll() is None:
        time.sleep(0.01)
    stand_in.off = 0.1
    printed = "\n".join(process.communicate(timeout=600)[0] for process in processes)
    stand_in.kill()
    assert (tmp_path / "right" / "checkpoint-2").exists(), printed
    loaded = [str(content) for path, content in stand_in.told if path == "v1/load_lora_adapter"]
    assert sum("weights of right" in content for content in loaded) == 2  # of two steps
    assert all(process.returncode for process in processes)
    assert "does not sample from the policy" in printed
