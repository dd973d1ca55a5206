"""Shards of a network on two processes, of which one has images of more sizes than the other."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import replace

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, parse
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Size
from mmrl.diffusion.flow_network import FlowNetwork
from mmrl.runtime.checkpoint import MODEL
from mmrl.runtime.json_client import png
from mmrl.training.loop import train
from tests.diffusion import tiny_flux_kontext
from tests.diffusion.flows import asked, picture
from tests.diffusion.test_flow_runs import MATCHING, plan
from tests.support.distributed_worker import start

FlowNetwork._no_split_modules = ["FluxTransformerBlock"]  # every block is gathered on its own

CHANGES = {
    "policy": {"max_sequence_length": 8},
    "data": "tests.diffusion.families.test_calls_in_shards:prompts",
    "rollout": {"num_prompts": 4, "num_generations": 2, "engine": {"0": {"batch_size": 2}}},
    "learn": {"learning_rate": 0.3, "optimizer": "sgd", "micro_batch_steps": 8},
    "max_steps": 1,
}


# Pairs of a rollout and a recorded image, kept whole by their loss. For two prompts their sizes differ.
PAIRS = {
    "data": "tests.diffusion.families.test_calls_in_shards:pairs",
    "rollout": {"num_prompts": 4, "num_generations": 2},
    "objective": {"penalty": [{"name": "sft", "coef": 1.0}]},
    "learn": {"learning_rate": 0.3, "optimizer": "sgd", "micro_batch_steps": 4},
    "policy": {"max_sequence_length": 8},
    "max_steps": 1,
}


def pairs(**options) -> list[Prompt]:
    """Make prompts of three sizes with a recorded image of 32 pixels."""
    answer = Outcome(image=picture(9))
    given = zip(
        asked("p0", "p1", "p2", "p3", answers=[answer]), (48, 0, 64, 0), strict=True
    )  # every second one is on one process
    return [replace(prompt, size=Size(1, side, 32) if side else None) for prompt, side in given]


def prompts(**options) -> list[Prompt]:
    """Make prompts without an image, and with images of two sizes."""
    made = []
    for i, side in enumerate((0, 0, 32, 64)):
        parts = [Part(f"p{i}")]
        if side:
            frames, file = Frames(picture(i, side)[None], torch.zeros(1)), b64decode(png(picture(i, side)))
            parts.insert(0, Part(media=Media("image", f"{i}.png", lambda shown=frames: shown, source=file)))
        made.append(Prompt(f"p{i}", (Message("user", tuple(parts)),)))
    return made


RUNS = {"sources": CHANGES, "results": PAIRS}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    model = tmp_path_factory.mktemp("flux_kontext")
    tiny_flux_kontext.tiny_flux_kontext(model)

    def make(name, folder):
        given = plan(model, folder / name, MATCHING, **merge(RUNS[name], {}))
        if name == "results":
            given["rollout"]["engine"].append({"name": "with_demos", "per_group": 1})
        return given

    return make


@pytest.fixture(scope="module")
def two_processes(plans, tmp_path_factory):
    """Train all runs in one pair of processes."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "plans.json").write_text(json.dumps([plans(name, folder) for name in RUNS]))
    processes = start("tests.support.real_worker", [str(folder / "plans.json"), "fsdp2"], 2)
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(printed)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("name", RUNS)
def test_processes_that_make_fewer_calls_take_part_in_those_of_others(plans, two_processes, tmp_path, name):
    run = build(parse(plans(name, tmp_path), Config), quiet=True)
    train(run)
    wanted = {key: p.detach().clone() for key, p in run.policy.module.named_parameters()}
    (saved,) = (two_processes / name).glob(f"checkpoint-*/{MODEL}")
    run.policy.load(saved)
    for key, weight in run.policy.module.named_parameters():
        torch.testing.assert_close(weight, wanted[key], rtol=2e-4, atol=2e-5, msg=key)
