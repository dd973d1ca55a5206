"""HiLL with a real model: two roles with an adapter each, hints that are read, paid and learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import read
from mmrl.config.schema import Config, parse
from mmrl.core.types import Outcome, Prompt
from mmrl.reporting import html
from mmrl.rewards.adapters import per_outcome
from mmrl.training.collect import collect
from mmrl.training.loop import train
from tests.runtime.test_real_processes import SPEAKING
from tests.support.configs import method_file
from tests.vision import tiny

ROLES = ("reasoner", "hinter")


class Tagging:
    """Write the tags of hints, which a model that was never trained does not."""

    notes = frozenset()

    def __init__(self, engine) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts):
        return tuple(
            replace(row, outcomes=(replace(row.outcomes[-1], text=f"<hint>{row.outcomes[-1].text}</hint>"),))
            if row.prompt.tags["role"] == "hinter"
            else row
            for row in self.engine.rollout(prompts)
        )


def seen():
    return [tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(4)]


@per_outcome
def exact_match(prompt: Prompt, outcome: Outcome) -> float:
    """Call a rare kind of answer right, so that groups fail, and hinted ones do not always."""
    return float(sum(map(ord, outcome.text or "")) % 9 == 0)


def plan(checkpoint, folder, **changes):
    model = {"model": str(checkpoint("qwen2_5_vl")), "dtype": "float32", "lora_rank": 2, "roles": ROLES}
    variant = read(method_file("hill"))
    uniform, hints = variant["sampler"]
    engines = [*SPEAKING["rollout"]["engine"], *variant["rollout"]["engine"][1:3]]
    return {
        **SPEAKING,
        **{name: variant[name] for name in ("advantage", "objective", "group_filter")},
        "references": {},
        "policy": {"name": "vision.tokens", **model},
        "data": f"{__name__}:seen",
        "sampler": [uniform, {**hints, "written": 2, "num_hinted": 3}],
        "rewards": [
            {"name": f"{__name__}:exact_match", "label": "exact_match", "at": "role=reasoner"},
            *variant["rewards"][1:],
        ],
        "rollout": {
            "num_prompts": 3,
            "num_generations": 3,
            "max_rounds": 2,
            "engine": [*engines, f"{__name__}:Tagging", "with_hinter"],
        },
        "output_dir": str(folder),
        **changes,
    }


def go(checkpoint, folder, **changes):
    run = build(parse(plan(checkpoint, folder, **changes), Config), quiet=True)
    train(run)
    return {key: value for key, value in run.policy.module.named_parameters() if value.requires_grad}


@pytest.mark.slow
def test_both_adapters_learn_and_a_run_is_resumed_bit_for_bit(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(html, "write_page", lambda folder: folder)
    whole = go(checkpoint, tmp_path / "whole")
    go(checkpoint, tmp_path / "half", max_steps=2)
    again = go(checkpoint, tmp_path / "half")
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    for role in ROLES:  # the second factor of an adapter is 0 at the start
        learned = [value for key, value in whole.items() if f"lora_B.{role}" in key]
        assert learned and any(value.abs().max() > 0 for value in learned), role


def test_reliance_is_measured_of_answers_that_saw_a_written_hint(checkpoint, tmp_path):
    run = build(parse(plan(checkpoint, tmp_path), Config), quiet=True)
    seen = collect(run).seen
    hinted, wrote = seen.ids["hint"][:, 0] != 0, seen.ids["wrote"][:, 0] != 0
    reliance, gate = seen.at_end("hint_reliance"), seen.at_end("precomputed")
    assert int(hinted.sum()) == 3 * int(wrote.sum()) > 0
    assert torch.equal(~reliance.isnan(), hinted) and bool((reliance[hinted] != 0).any())
    assert torch.equal(~gate.isnan(), wrote)
    assert torch.equal(~seen.at_end("exact_match").isnan(), ~wrote)
