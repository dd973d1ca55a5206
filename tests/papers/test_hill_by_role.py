"""An adapter for every role over one base model, in rollouts, in learning and on the disk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from mmrl.build import build, load_engine
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Part, Prompt
from mmrl.papers.hill import ByRole
from mmrl.reporting import html
from mmrl.training.loop import train
from mmrl.vision.engines.generate import Generate
from mmrl.vision.policies.tokens import Tokens
from tests.runtime.test_real_processes import SPEAKING
from tests.vision import tiny

ROLES = ("spy", "guard")


@pytest.fixture(scope="module")
def policy(checkpoint):
    made = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float64", lora_rank=2, roles=ROLES)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():  # new adapters change nothing
        for weight in (w for name in ROLES for w in made.roles.weights[name]):
            weight += 0.3 * torch.randn(weight.shape, generator=draw, dtype=weight.dtype)
    return made


def asked(num=4):
    prompts = [tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(num)]
    return [replace(p, tags={"role": ROLES[i % 2]}) for i, p in enumerate(prompts) for _ in range(2)]


def rollout(policy, prompts):
    return ByRole(Generate(policy, stream=Stream(0), max_completion_length=6)).rollout(prompts)


def test_rows_that_the_engine_adds_come_last(policy, monkeypatch):
    inner = Generate(policy, stream=Stream(0), max_completion_length=2)
    rollout = inner.rollout
    monkeypatch.setattr(inner, "rollout", lambda prompts: (rows := rollout(prompts)) + rows[:1])
    rows = ByRole(inner).rollout(asked())
    assert [row.prompt.uid for row in rows] == [f"p{i}" for i in range(4) for _ in range(2)] + ["p0", "p1"]


def test_rows_are_written_and_read_with_the_adapter_of_their_role(policy):
    rows = rollout(policy, asked())
    assert [row.prompt.uid for row in rows] == [f"p{i}" for i in range(4) for _ in range(2)]
    batch = policy.collate(rows)
    inside = batch.mask.bool()
    with torch.no_grad():
        logp = policy(batch).logp
        torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=2e-5)
        # A micro-batch of some rows is the same, and with the other adapter it would be another.
        some = torch.tensor([1, 2, 5])
        cut = policy.module(batch.steps[some, slice(None)], frozenset())["logp"]
        torch.testing.assert_close(cut, logp[some, : cut.shape[1]], rtol=0, atol=1e-9)
        swapped = [
            replace(r, prompt=replace(r.prompt, tags={"role": ROLES[i // 2 % 2 - 1]}))
            for i, r in enumerate(rows)
        ]
        other = policy(policy.collate(swapped)).logp
    assert (other - logp)[inside].abs().max() > 1e-3


def test_each_adapter_learns_from_its_own_rows(policy):
    rows = [row for row in rollout(policy, asked()) if row.prompt.tags["role"] == "spy"]
    policy.module.zero_grad()
    policy(policy.collate(rows)).logp.sum().backward()
    spy, guard = (policy.roles.weights[name] for name in ROLES)
    assert all(weight.grad is not None for weight in (*spy, *guard))
    assert any(weight.grad.abs().max() > 0 for weight in spy)
    assert all(weight.grad.abs().max() == 0 for weight in guard)
    policy.module.zero_grad()


def test_the_folders_are_those_of_peft(policy, checkpoint, tmp_path):
    policy.save(tmp_path)
    again = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float64", lora_rank=2, roles=ROLES)
    again.load(tmp_path)
    for name in ROLES:
        for one, other in zip(policy.roles.weights[name], again.roles.weights[name], strict=True):
            assert torch.equal(one, other)
    words = Prompt("words", (Message("user", (Part("what"),)),), tags={"role": "guard"})
    rows = rollout(policy, [words])
    prompt = rows[0].steps.prompt
    base = AutoModelForImageTextToText.from_pretrained(checkpoint("qwen2_5_vl"), dtype=torch.float64)
    alone = PeftModel.from_pretrained(base, str(tmp_path / "guard")).eval()
    ids = torch.cat([prompt.ids, rows[0].steps.ids])[None]
    with torch.no_grad():
        logits = alone(input_ids=ids).logits[0, len(prompt.ids) - 1 : -1]
    logits = logits.index_fill(-1, torch.tensor(policy.prompt_encoder.placeholders), -1e30)
    logp = logits.log_softmax(-1).gather(1, rows[0].steps.ids[:, None])[:, 0]
    torch.testing.assert_close(rows[0].notes["logp"].double(), logp, rtol=0, atol=2e-5)


def test_rows_without_a_role_and_policies_without_roles_are_errors(policy, checkpoint, exact):
    with pytest.raises(
        ValueError, match="adapters of the roles spy, guard, but the tag `role` of prompt 'p0'"
    ):
        rollout(policy, [replace(asked()[0], tags={})])
    with pytest.raises(ConfigError, match=r"set `roles` and `lora_rank`"):
        rollout(exact("qwen2_5_vl"), [])
    with pytest.raises(ConfigError, match=r"are different names.*\n*.*set `lora_rank`"):
        Tokens(model=str(checkpoint("qwen2_5_vl")), roles=ROLES)


def seen():
    return list({prompt.uid: prompt for prompt in asked()}.values())


@pytest.mark.slow
def test_a_run_with_adapters_by_role_is_resumed_bit_for_bit(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(html, "write_page", lambda folder: folder)
    engines = [*SPEAKING["rollout"]["engine"], "vision.by_role"]

    def go(name, **changes):
        model = {"model": str(checkpoint("qwen2_5_vl")), "dtype": "float32", "lora_rank": 2, "roles": ROLES}
        plan = {
            **SPEAKING,
            "data": f"{__name__}:seen",
            "rollout": {**SPEAKING["rollout"], "engine": engines},
            "policy": {"name": "vision.tokens", **model},
            "output_dir": str(tmp_path / name),
            **changes,
        }
        run = build(parse(plan, Config), quiet=True)
        train(run)
        return {key: value for key, value in run.policy.module.named_parameters() if value.requires_grad}

    whole = go("whole")
    go("half", max_steps=2)
    again = go("half")
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    used = load_engine(str(tmp_path / "whole"))
    learned = dict(used.policy.module.named_parameters())
    assert all(torch.equal(learned[key], whole[key]) for key in whole)
    assert len(used.rollout(seen())) == 4
    for name in ROLES:
        learned = [value for key, value in whole.items() if f"lora_B.{name}" in key]
        assert learned and any(value.abs().max() > 0 for value in learned)
