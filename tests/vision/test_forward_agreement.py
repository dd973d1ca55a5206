"""The doctor compares what is read here with plain transformers, for every family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.core.types import Outcome, Trajectory
from mmrl.vision.checks.forward_agreement import forward_agreement
from mmrl.vision.checks.media_conditioning import media_conditioning
from mmrl.vision.models import model_families
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny
from tests.vision.test_media_conditioning import examined


@pytest.mark.parametrize("family", sorted(tiny.MAKERS))
def test_every_family_is_read_as_transformers_read_it(exact, family):
    asked = examined(exact(family), *mixed.prompts(family))
    assert not list(forward_agreement(asked, rows=9))
    assert not list(media_conditioning(asked, rows=9)), "the comparison would show nothing"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_vl", {"positions": lambda core, inputs: model_families.linear(core, inputs).expand(3, -1)}),
        ("glm46v", {"positions": lambda core, inputs: model_families.linear(core, inputs).expand(3, -1)}),
        ("gemma3", {"types": ""}),
    ],
)
def test_a_family_that_is_not_known_enough_is_named(checkpoint, monkeypatch, family, changes):
    known = model_families.FAMILIES[family]
    monkeypatch.setitem(model_families.FAMILIES, family, replace(known, **changes))
    policy = Tokens(model=str(checkpoint(family)), dtype="float32")
    # Text alone has the same positions and masks.
    assert not list(forward_agreement(examined(policy, tiny.ask("text", "the fox"))))
    (finding,) = forward_agreement(examined(policy, *mixed.prompts(family)[:3]), tolerance=1e-3)
    assert f"a model of type '{family}' finds the answer to prompt 'picture" in finding.what
    assert "FAMILIES" in finding.advice


def test_what_cannot_be_compared_is_left_out(exact):
    policy = exact("qwen2_5_vl")
    assert not list(
        forward_agreement(examined(policy, tiny.ask("clip", tiny.clip(4), "when")), tolerance=1e-9)
    )
    assert not list(forward_agreement(examined(object(), tiny.ask("text", "the fox"))))
    prompt = tiny.ask("text", "the fox")
    empty = examined(policy)
    empty = replace(empty, rollouts=(Trajectory(prompt, "text", (Outcome(text=""),), None, 1),))
    assert not list(forward_agreement(empty, tolerance=1e-9))


def test_what_a_processor_gives_has_the_types_of_tokens(exact):
    policy, prompt = exact("gemma3"), tiny.ask("p", tiny.picture(), "what")
    inputs = PromptEncoder(policy.processor, policy.core).processor_inputs(prompt)
    assert {"input_ids", "attention_mask", "token_type_ids", "pixel_values"} == inputs.keys()
    assert torch.equal(inputs["input_ids"][0], policy.prompt_encoder.encode(prompt).ids)
