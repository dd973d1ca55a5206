"""Two real processes train as one, and what is behind it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.build import build
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Batch
from mmrl.reporting import html
from mmrl.reporting.metrics import Journal
from mmrl.rewards.adapters import per_outcome
from mmrl.runtime.distributed import Processes
from mmrl.runtime.launcher import check_joined, check_restarts
from mmrl.runtime.watchdog import ProcessFailed
from mmrl.training.loop import train
from tests.support.distributed_worker import launch, start
from tests.support.toy_flow import flow_plan
from tests.support.toys import ToyGenerate, ToyText, plan, prompts


def process(rank: int, world: int) -> Processes:
    """Make one of several processes without a launcher: enough for what needs no exchange."""
    one = object.__new__(Processes)
    one.rank, one.world = rank, world
    return one


def test_restarts_that_would_read_addresses_of_ended_processes_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    check_restarts()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(ConfigError, match=r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 .* --rdzv_backend c10d"):
        Processes()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    check_restarts()


def test_groups_are_shared_whole_and_evenly():
    # 4, 2, 2 and 1 rollouts on two processes: the 4 go to the first, the next 2 to the idle second, whose
    # 2 are still fewer than 4, so the third group follows; then both have 4, and ties go to the first.
    asked = [prompts()[i] for i, count in enumerate((4, 2, 2, 1)) for _ in range(count)]
    parts = [process(rank, 2).assign_prompts(asked, RewardTable.empty()) for rank in range(2)]
    assert [[p.uid for p in mine] for mine, _ in parts] == [["p0"] * 4 + ["p3"], ["p1", "p1", "p2", "p2"]]
    assert [counts for _, counts in parts] == [True, True]


def test_a_group_stays_where_it_began():
    began = RewardTable.empty().replace(uids=("p0", "p1"), process=torch.tensor([1, 1]))
    asked = [prompts()[i] for i in (0, 1, 2)]
    parts = [process(rank, 2).assign_prompts(asked, began)[0] for rank in range(2)]
    assert [[p.uid for p in mine] for mine in parts] == [["p2"], ["p0", "p1"]]


def test_a_process_without_work_keeps_step_with_a_rollout_that_does_not_count():
    mine, counts = process(2, 3).assign_prompts([prompts()[0]] * 4, RewardTable.empty())
    assert ([p.uid for p in mine], counts) == (["p0"], False)


def test_micro_batches_are_repeated_without_counting():
    row = ToyText().encode(prompts()[0], prompts()[0].answers[0])
    micros: list[Batch] = ToyText().collate((row, row)).split(1, 1)
    one = process(0, 2)
    one._all_bytes = lambda data: [data, b"4"]
    assert [(counts, last) for _, counts, last in one.pad_micro_batches(micros)] == [
        (1.0, False),
        (1.0, False),
        (0.0, False),
        (0.0, True),
    ]


def test_a_number_that_a_process_lacks_is_zero_there(monkeypatch):
    one = process(0, 2)
    one._all_bytes = lambda data: [data, b'[{"loss": 3.0, "sampling/kl": 1.0}, []]']
    # (1 + 3) / 2, and (0 + 1) / 2.
    assert one.means({"loss": 1.0}) == {"loss": 2.0, "sampling/kl": 0.5}


def test_a_count_of_another_process_is_added_up_too():
    one = process(0, 2)
    one._all_bytes = lambda data: [data, b'[{"loss": 3.0, "restarts": 2.0}, ["restarts"]]']
    assert one.means({"loss": 1.0}) == {"loss": 2.0, "restarts": 2.0}


PLANS = {
    "uneven": {
        "rollout": {"num_prompts": 5, "max_rounds": 3},
        "group_filter": "varied",
        "advantage": ["total", "group_normalize", {"name": "high_entropy", "top": 0.5}],
        "objective": {"aggregation": "step_mean", "penalty": [{"name": "k3", "coef": 0.1}]},
        "references": {"ref": "frozen"},
        "learn": {"num_iterations": 2, "micro_batch_steps": 9},
        "evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 3}, "num_generations": 2},
        "eval_steps": 2,
    },
    "minibatches": {  # of 1, 2, 1 and 2 groups, where each process for itself would make 0, 2, 2 and 2
        "rollout": {"num_prompts": 6},
        "advantage": ["total", "group_normalize"],
        "learn": {"minibatches": 4, "num_iterations": 2},
    },
    "nothing to do": {  # on the second process
        "data": {"name": "tests.support.toys:prompts", "num": 1},
        "rollout": {"num_prompts": 1},
        "advantage": ["total", "tests.support.toys:RunningMean"],
        "learn": {"optimizer": "adamw"},
    },
    "kl in the reward": {
        "rollout": {"num_prompts": 5, "num_generations": 3, "max_rounds": 2},
        "group_filter": "varied",
        "advantage": ["total", "per_step", {"name": "kl_in_reward", "coef": 0.1}, "batch_normalize"],
        "references": {"ref": {"name": "ema", "decay": 0.5}},
    },
    "brought back": {
        "policy": {"name": "tests.support.toys:ToyRecalling", "double": True},
        "rollout": {"num_prompts": 3, "engine": ["tests.support.toys:ToyNoting", "with_replay"]},
        "rewards": ["tests.support.toys:share_right"],
        "objective": {"ratio": {"name": "step_ratio", "against": "engine"}},
        "max_steps": 5,
    },
    "compared with stored answers": {
        "policy": {"name": "tests.support.toys:ToyRecalling", "double": True},
        "rollout": {
            "num_prompts": 5,
            "num_generations": 2,
            "engine": ["tests.support.toys:ToyNoting", {"name": "with_contrast", "learn_from_replay": True}],
        },
        "rewards": ["tests.support.toys:share_right"],
        "max_steps": 5,
    },
    "with a critic": {
        "rollout": {"num_prompts": 5, "num_generations": 3, "max_rounds": 2},
        "group_filter": "varied",
        "advantage": ["total", "gae"],
        "references": {
            "critic": {
                "name": "second_model",
                "policy": {"name": "tests.support.toys:ToyCritic", "double": True},
                "advantage": ["total", "lambda_returns"],
                "objective": {"name": "value_regression", "cliprange_value": 0.5},
                "optimizer": "sgd",
                "learning_rate": 0.5,
                "minibatches": 2,
            },
        },
        "max_steps": 5,
    },
    "with a verifier": {
        "rewards": ["tests.support.toys:share_right"],
        "rollout": {
            "num_prompts": 5,
            "num_generations": 3,
            "engine": [
                "tests.support.toys:ToyGenerate",
                {
                    "name": "vision.with_prefix_rollouts",
                    **{"cut": "token", "interval": 1, "num_probes": 2, "share": 0.5},
                },
            ],
        },
        "sampler": ["uniform", {"name": "allocate", "value_model": "verifier", "at_most": 4}],
        "advantage": ["total", "mean_by_end", "verifier_values", "process_advantage", "group_center"],
        "references": {
            "verifier": {
                "name": "second_model",
                "policy": {"name": "tests.support.toys:ToyCritic", "double": True, "probability": True},
                "advantage": ["total", "mean_by_end", "value_targets"],
                "objective": "value_cross_entropy",
                "optimizer": "sgd",
                "learning_rate": 0.5,
            },
        },
        "max_steps": 5,
    },
    "with process rewards": {
        "rewards": ["tests.support.toys:share_right"],
        "rollout": {"num_prompts": 5, "num_generations": 3},
        "advantage": ["total", "process_returns"],
        "references": {
            "ref": "frozen",
            "prm": {
                "name": "second_model",
                "advantage": ["total"],
                "objective": {
                    "name": "comparison",
                    "implicit_reward": "log_ratio",
                    "compare": ["cross_entropy"],
                },
                "optimizer": "sgd",
                "learning_rate": 0.5,
                "learns_first": True,
            },
        },
        "max_steps": 5,
    },
    "only a demonstration": {  # on one process, and sampled rollouts on the other
        "data": "tests.support.toys:half_shown",
        "sampler": {"name": "uniform", "shuffle": False},
        "rollout": {
            "num_prompts": 2,
            "num_generations": 1,
            "engine": ["tests.support.toys:ToyGenerate", "with_demos"],
            "policy": "slow",
        },
        "advantage": ["total"],
        "objective": {"step_weight": ["truncated_importance"], "aggregation": "length_weighted"},
        "references": {"slow": {"name": "ema", "decay": 0.5}},
    },
}


PAIR = {
    "data": {"name": "tests.support.toys:prompts", "answers": 2},
    "rollout": {"engine": ["offline"], "num_prompts": 5, "num_generations": 2},
    "advantage": ["total", "best_vs_worst"],
    "objective": {"name": "comparison", "implicit_reward": "log_ratio", "compare": ["sigmoid"]},
    "references": {"ref": "frozen"},
}
ASKED_TWICE = {  # with noise and hints, beside answers to shuffled frames, and learned by Reg-GRPO
    "data": "tests.papers.test_deepvideo_r1:filmed",
    "sampler": [
        "uniform",
        {"name": "vision.difficulty_augmentation", "hint_column": "solution", "max_reward": 0.2},
    ],
    "rollout": {
        "num_prompts": 5,
        "max_rounds": 2,
        "engine": ["tests.support.toys:ToyGenerate", "vision.with_shuffled_frames"],
    },
    "advantage": [
        {"name": "vision.temporal_contrast", "of": "share_right"},
        "total",
        "group_normalize",
    ],
    "objective": {
        "name": "comparison",
        "implicit_reward": {"name": "log_ratio", "against": "old"},
        "compare": ["regression"],
        "penalty": [{"name": "k3", "coef": 0.1}],
    },
    "references": {"ref": "frozen"},
    "learn": {"num_iterations": 2, "micro_batch_steps": 9},
}
FLOW = {
    "rollout": {"num_prompts": 3},
    "advantage": ["total", "group_normalize"],
    "objective": {
        "name": "policy_gradient",
        "surrogate": "clip",
        "aggregation": "step_mean",
        "penalty": [{"name": "gaussian_kl", "coef": 0.1}],
    },
    "references": {"ref": "frozen"},
    "learn": {"num_iterations": 2, "micro_batch_steps": 9},
}
NOTED = "tests.support.toys:ToyNoting"
LIKELY = {"name": "vision.with_prefix_rollouts", "cut": "token", "interval": 1, "num_probes": 2}
PLANS |= {
    "completed prefixes": {
        "rollout": {"num_prompts": 3, "num_generations": 3, "engine": [NOTED, LIKELY]},
        "advantage": ["total", "mean_by_end", "increments"],
    },
    "a tree": {
        "rollout": {
            "num_prompts": 3,
            "num_generations": 4,
            "engine": [NOTED, {"name": "vision.with_branches", "branching": [2], "segment_length": 2}],
        },
        "advantage": ["total", "tree_values"],
        "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
    },
    "a greedy answer": {
        "rollout": {"num_prompts": 3, "num_generations": 2, "engine": [NOTED, "vision.with_greedy"]},
        "advantage": ["total", "greedy_baseline"],
    },
    "a step ahead": {
        "rollout": {
            "num_prompts": 5,
            "engine": ["tests.training.test_ahead:Beginning"],
            "max_staleness": 1,
        },
        "objective": {"step_weight": ["truncated_importance"]},
        "max_steps": 5,
    },
    "three steps ahead": {
        "rollout": {
            "num_prompts": 5,
            "engine": ["tests.training.test_ahead:Beginning"],
            "max_staleness": 3,
        },
        "max_steps": 7,
    },
    "a pair": PAIR,
    "asked twice": ASKED_TWICE,
    "a flow": {"of": "flow", **FLOW},
    "a flow that matches": {
        "of": "flow",
        **FLOW,
        "policy": {"name": "tests.support.toy_flow:ToyFlow", "form": "matching"},
        "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
    },
}


def plan_of(name, folder):
    changes = PLANS[name]
    if changes.get("of") == "flow":
        given = {key: value for key, value in changes.items() if key != "of"}
        learn = {"optimizer": "sgd", "learning_rate": 0.05, **given.get("learn", {})}
        return flow_plan(folder, **{**given, "learn": learn})
    learn = {"optimizer": "sgd", "learning_rate": 0.5, **changes.get("learn", {})}
    usual = {"policy": {"name": "tests.support.toys:ToyText", "double": True}}
    return plan(folder, **{**usual, **changes, "learn": learn})


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Train every plan on two processes, all of them in one pair of processes: they start slowly."""
    folder = tmp_path_factory.mktemp("two")
    launch([plan_of(name, folder / name) for name in PLANS], folder)
    return folder


@pytest.mark.parametrize("name", PLANS)
def test_two_processes_train_as_one(name, two_processes, tmp_path, monkeypatch):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    assert_trained_as_one(name, two_processes, 2, tmp_path)


OF_THREE = ("uneven", "minibatches", "nothing to do", "a pair", "a step ahead", "a flow")


@pytest.fixture(scope="module")
def three_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    launch([plan_of(name, folder / name) for name in OF_THREE], folder, world=3)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THREE)
def test_three_processes_train_as_one(name, three_processes, tmp_path, monkeypatch):
    """Groups cannot be shared out evenly among three."""
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    assert_trained_as_one(name, three_processes, 3, tmp_path)


def assert_trained_as_one(name, several, world, tmp_path):
    """Train a plan on one process, and compare its weights and its journal with those of several."""
    run = build(parse(plan_of(name, tmp_path / "one"), Config), quiet=True)
    train(run)
    assert run.policy.table.abs().max() > 0.005
    # A flow computes in float32, where sums of other parts differ in their last digits. So do the float32
    # shares of a loss where they are thirds, while halves are exact.
    exact = 1e-12 if run.policy.table.dtype == torch.float64 and world == 2 else 2e-6
    for rank in range(world):
        weights = load_file(several / name / f"weights-{rank}" / "model.safetensors")["table"]
        torch.testing.assert_close(weights, run.policy.table.data, rtol=exact, atol=exact)
    records = zip(Journal(several / name).read(), run.journal.read(), strict=True)
    for found, expected in records:
        timed = {key for key in expected if "time" in key or "seconds" in key}
        assert found.keys() == expected.keys()
        for key in expected.keys() - timed:
            wanted = pytest.approx(expected[key], rel=max(1e-6, 50 * exact), abs=1e-6, nan_ok=True)
            assert found[key] == wanted, key


def test_processes_leave_their_group_before_python_ends(two_processes):
    """Else one in ten aborts at its end, after all its work is done."""
    assert [json.loads((two_processes / f"left-{rank}").read_text()) for rank in range(2)] == [True, True]


# ---- failures


@per_outcome
def fails_on_one(prompt, outcome):
    """Fail where the rollouts of p0 are, which is on one process."""
    if prompt.uid == "p0":
        raise LookupError("no span in p0")
    return 0.5


class DiesOnOne(ToyGenerate):
    """An engine that runs out of memory on the second process."""

    def rollout(self, asked):
        if int(os.environ["RANK"]) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().rollout(asked)


class FailsInLearning(ToyText):
    """A policy whose forward pass fails on the second process, while the first waits for its gradients."""

    def __call__(self, batch, extra=frozenset()):
        if int(os.environ["RANK"]) == 1 and torch.is_grad_enabled():
            raise LookupError("a kernel failed")
        return super().__call__(batch, extra)


HERE = __name__
FAILURES = {
    "a reward": (
        {"rewards": [f"{HERE}:fails_on_one"], "sampler": {"name": "uniform", "shuffle": False}},
        "RewardFault: reward 'fails_on_one' raised LookupError: no span in p0",
        "process 0 of 2 failed while making and scoring rollouts: RewardFault: reward 'fails_on_one'",
    ),
    "an engine": (
        {"rollout": {"engine": [f"{HERE}:DiesOnOne"]}},
        "OutOfMemory: out of memory while making rollouts of step 0",
        "process 1 of 2 failed while making and scoring rollouts: OutOfMemory: out of memory",
    ),
    "learning": (
        {"policy": f"{HERE}:FailsInLearning"},
        "LookupError: a kernel failed",
        "process 1 of 2 failed: LookupError: a kernel failed",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILURES)
def test_where_one_process_fails_every_other_is_told_instead_of_waiting(case, tmp_path):
    changes, own, heard = FAILURES[case]
    began = time.monotonic()
    printed = launch([plan(tmp_path / "run", **changes)], tmp_path, failing=True)
    assert time.monotonic() - began < 240
    said = [(tmp_path / "run" / f"failed-{rank}").read_text() for rank in range(2)]
    assert any(text.startswith(own) for text in said), (said, printed)
    assert any(text.startswith(f"ProcessFailed: {heard}") for text in said), (said, printed)
    # Leaving the group could wait for the others where only one of them knows why it fails.
    left = [json.loads((tmp_path / f"left-{rank}").read_text()) for rank in range(2)]
    assert all(left) == (case != "learning")


def test_a_process_that_finds_nothing_wrong_is_told_who_did(monkeypatch):
    one = process(0, 2)
    one._all_bytes = lambda data: [data, b"\"KeyError: 'span'\""]
    told = "process 1 of 2 failed while scoring: KeyError: 'span'"
    with pytest.raises(ProcessFailed, match=told), one.fail_together("scoring"):
        pass
    with pytest.raises(OSError, match="no room"), one.fail_together("saving"):
        raise OSError("no room")
    one._all_bytes = lambda data: [data, b'""']
    with one.fail_together("scoring"):
        pass


def test_an_error_is_not_lost_where_another_process_is_gone():
    one, gone = process(0, 2), RuntimeError("Connection closed by peer")

    def breaks(data):
        raise gone

    one._all_bytes = breaks
    with pytest.raises(OSError, match="no room") as raised, one.fail_together("saving"):
        raise OSError("no room")
    assert raised.value.__cause__ is gone
    with pytest.raises(RuntimeError, match="closed by peer"), one.fail_together("saving"):
        pass


@pytest.mark.slow
def test_a_launch_that_accelerate_does_not_join_is_refused(tmp_path):
    """As torchrun starts processes on a machine without a GPU."""
    listed = tmp_path / "plans.json"
    listed.write_text(json.dumps([plan(tmp_path / "run")]))
    started = start("tests.support.distributed_worker", [str(listed)], 2, ACCELERATE_USE_CPU="false")
    printed = [process.communicate(timeout=400)[0] for process in started]
    assert all(process.returncode for process in started) and not (tmp_path / "run").exists()
    assert all("ConfigError: WORLD_SIZE is 2, but accelerate sees one process" in text for text in printed)


def test_world_size_alone_is_refused_too(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="accelerate sees one process"):
        Processes()


@pytest.mark.parametrize("gpu", [False, True])
def test_the_advice_is_a_command_for_the_devices_that_are_there(gpu, monkeypatch):
    """`accelerate launch` on a machine without a GPU must not be told to use `accelerate launch`."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: gpu)
    with pytest.raises(ConfigError) as error:
        check_joined()
    assert ("start with `accelerate launch" in str(error.value)) is gpu
    assert ("`ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2" in str(error.value)) is not gpu


def test_machines_that_accelerate_does_not_join_are_refused(monkeypatch):
    """As `accelerate launch --cpu --num_machines 2` starts them."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    check_joined()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    with pytest.raises(ConfigError, match="MASTER_ADDR is set as for several processes"):
        check_joined()


# ---- weights of which every process holds a part


def test_sharded_weights_are_saved_whole_and_taken_up_again(tmp_path):
    started = start("tests.support.sharded_worker", [str(tmp_path)], 2)
    printed = [process.communicate(timeout=400)[0] for process in started]
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(2)), "\n".join(printed)


def test_on_one_process_nothing_is_sharded():
    from mmrl.runtime.fsdp import gathered, reshard_state, whole

    module, state = torch.nn.Linear(2, 2), {"a": [torch.ones(2)]}
    weight = module.weight
    with gathered(module, changed=True):
        assert module.weight is weight
    assert whole(state)["a"][0] is state["a"][0] and reshard_state(state, [weight]) is state


# ---- configurations of the launcher

LAUNCHER = sorted((Path(__file__).parents[2] / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", LAUNCHER, ids=lambda path: path.stem)
def test_accelerate_knows_every_key_of_a_launcher_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(path))
    assert path.read_text().startswith("# ") and str(path.name) in path.read_text()
    kind = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}[path.stem]
    assert str(found.distributed_type).endswith(kind)


def test_the_launcher_configurations_are_there():
    assert [path.stem for path in LAUNCHER] == ["ddp", "fsdp2"]
