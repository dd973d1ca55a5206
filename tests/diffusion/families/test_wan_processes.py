"""Two networks on two processes: rows of a process may all be of one network."""

from __future__ import annotations

import json
import os
from functools import cache

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, parse
from mmrl.diffusion.flow_network import FlowNetwork
from mmrl.rewards.adapters import per_outcome
from mmrl.runtime.checkpoint import MODEL
from mmrl.training.loop import train
from tests.diffusion import tiny_wan
from tests.diffusion.test_flow_runs import ANCHORED, MATCHING, plan
from tests.support.distributed_worker import start

if os.environ.get("BY_BLOCKS"):  # in processes of the test: every block is gathered on its own
    FlowNetwork._no_split_modules = ["WanTransformerBlock"]


@per_outcome
def redness(prompt, outcome) -> float:
    """Measure the mean of the red channel of a video."""
    return float(outcome.video[:, 0].float().mean() / 255)


# A micro-batch is one time of one row, so that the two processes often need other networks. One process also
# samples a group at a time: pixels, and so rewards, round alike. With SGD weights tell of gradients. The
# references run the networks without gradients.
CHANGES = merge(
    ANCHORED,
    {
        "policy": {"max_sequence_length": 8},
        "rollout": {
            "engine": {"0": {"num_frames": 5, "height": 16, "width": 16, "batch_size": 2}},
            "num_generations": 2,
        },
        "rewards": ["tests.diffusion.families.test_wan_processes:redness"],
        "learn": {"learning_rate": 0.3, "optimizer": "sgd", "micro_batch_steps": 1},
    },
)
KINDS = {"both": {}, "low": {"policy": {"networks": "low", "lora_rank": 2}}}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    model = tmp_path_factory.mktemp("wan_a14b")
    tiny_wan.tiny_wan_a14b(model)
    return lambda kind, folder: plan(model, folder / kind, MATCHING, **merge(CHANGES, KINDS[kind]))


def trained(run):
    return {name: p for name, p in run.policy.module.named_parameters() if p.requires_grad}


def copied(run):
    return {name: p.detach().clone() for name, p in trained(run).items()}


@pytest.fixture(scope="module")
def on_one(plans, tmp_path_factory):
    """Train each kind on one process, for all ways; return the run, and a copy of what it trained."""
    folder = tmp_path_factory.mktemp("one")

    def go(kind):
        run = build(parse(plans(kind, folder), Config), quiet=True)
        before = copied(run)
        train(run)
        wanted = copied(run)
        assert {name.split(".")[2] for name in wanted if not torch.equal(before[name], wanted[name])} == {
            "both": {"transformer", "transformer_2"},
            "low": {"transformer_2"},
        }[kind]
        return run, wanted

    return cache(go)


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize(("way", "blocks"), [("ddp", ""), ("fsdp2", ""), ("fsdp2", "1")])
def test_two_processes_train_two_networks_as_one_process_does(plans, on_one, tmp_path, way, blocks):
    listed = tmp_path / "plans.json"
    listed.write_text(json.dumps([plans(kind, tmp_path / "two") for kind in KINDS]))
    processes = start("tests.support.real_worker", [str(listed), way], 2, BY_BLOCKS=blocks)
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(printed)
    for kind in KINDS:
        run, wanted = on_one(kind)
        for weight in trained(run).values():
            weight.data.zero_()
        (saved,) = (tmp_path / "two" / kind).glob(f"checkpoint-*/{MODEL}")
        run.policy.load(saved)
        for name, weight in trained(run).items():
            torch.testing.assert_close(weight.detach(), wanted[name], rtol=2e-4, atol=2e-5, msg=name)
