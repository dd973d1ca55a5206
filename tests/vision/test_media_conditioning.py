"""What a doctor of vision-language models looks at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.config.registry import Needs
from mmrl.config.schema import Config, parse
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Outcome, Trajectory
from mmrl.diagnostics.context import Examined
from mmrl.doctor import examine
from mmrl.rewards.adapters import per_outcome
from mmrl.vision.checks.media_conditioning import media_conditioning, negative
from mmrl.vision.memory_estimates import tokens
from mmrl.vision.policies.tokens import Tokens
from tests.vision import tiny

HERE = __name__
FAMILY = "qwen2_5_vl"


class Blind:
    """A policy whose model is shown black, whatever the prompt holds."""

    def __init__(self, policy: Tokens) -> None:
        self.policy, self.collate = policy, policy.collate

    def encode(self, asked, outcome):
        row = self.policy.encode(asked, outcome)
        media = {
            name: torch.zeros_like(value) if value.is_floating_point() else value
            for name, value in row.steps.prompt.media.items()
        }
        return replace(row, steps=replace(row.steps, prompt=replace(row.steps.prompt, media=media)))

    def __call__(self, batch, extra=frozenset()):
        return self.policy(batch, extra)


def examined(policy, *prompts):
    rows = tuple(Trajectory(one, one.uid, (Outcome(text="a fox"),), None, 3) for one in prompts)
    return Examined(None, policy, None, (), Needs(), rows, RewardTable.empty(), micro_batch_steps=10**6)


def shown(*, num: int = 3):
    """Ask about images, with a right answer."""
    return [
        replace(
            tiny.ask(f"p{i}", tiny.picture(seed=i), "what is it?"),
            answers=(Outcome(text="xyz"[i] * 3),),
            target="xyz"[i],
        )
        for i in range(num)
    ]


@per_outcome
def letters(prompt, outcome):
    """Count the right letter, and a little of every other, so that answers differ."""
    return outcome.text.count(prompt.target) + 0.001 * len(set(outcome.text))


def test_a_negative_is_another_image_of_the_same_prompt():
    asked = shown()[0]
    one, other = asked.media[0], negative(asked).media[0]
    assert (one.load().pixels + other.load().pixels == 255).all()
    assert negative(asked).text == asked.text


def test_a_model_that_sees_is_told_from_one_that_does_not(exact):
    policy = exact(FAMILY)
    asked = shown(num=2)
    assert not list(media_conditioning(examined(policy, *asked)))
    (symptom,) = media_conditioning(examined(Blind(policy), *asked))
    assert symptom.what.startswith("the media of prompt 'p0' and 1 more do not reach the model")
    assert not list(media_conditioning(examined(Blind(policy), tiny.ask("t", "no picture here"))))


def raw(checkpoint, folder, **policy):
    return {
        "policy": {"name": "vision.tokens", "model": str(checkpoint(FAMILY)), "lora_rank": 2, **policy},
        "data": f"{HERE}:shown",
        "rollout": {
            "engine": [{"name": "vision.generate", "max_completion_length": 6}],
            "num_prompts": 2,
            "num_generations": 3,
        },
        "rewards": [f"{HERE}:letters"],
        "advantage": ["total", "group_normalize"],
        "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
        "output_dir": str(folder),
    }


@pytest.mark.slow
def test_a_run_on_a_real_model_is_examined(checkpoint, tmp_path):
    report = examine(parse(raw(checkpoint, tmp_path / "run", dtype="float32"), Config), num_prompts=2)
    found = {entry.full_name: [symptom.text for symptom in said] for entry, said in report.found}
    assert "vision.media_conditioning" in found and "diffusion.text_conditioning" not in found
    assert not any(found.values()), found
    assert {"weights", "optimizer", "rollouts/cache", "step table"} <= report.memory.keys()
    assert not (tmp_path / "run").exists()


def test_the_cache_and_the_table_are_estimated(exact):
    # 2 layers, 2 heads of 8, keys and values of 8 bytes: 512 bytes a token; 2 prompts once, and 6 answers of
    # 10 tokens in buffers of 16.
    policy = exact(FAMILY)
    asked = shown(num=2)
    config = parse(
        {
            **raw(lambda family: "", "nowhere"),
            "rollout": {
                "engine": [{"name": "vision.generate", "max_completion_length": 10}],
                "num_prompts": 2,
                "num_generations": 3,
            },
        },
        Config,
    )
    length = len(policy.prompt_encoder.encode(asked[0]).ids)
    said = tokens(config, policy, asked)
    assert said["rollouts/cache"] == (2 * length + 6 * 16) * 512
    assert said["step table"] == 4 * 6 * 10 * 6
    # One micro-batch: activations and logits stand where gradients come to stand.
    assert min(said["rollouts/passes"], said["learning/activations"] + said["learning/logits"]) > 0
