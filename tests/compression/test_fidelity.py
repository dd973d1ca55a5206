"""The gate: what a cache changes is measured, printed, and refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mmrl.compression.caches.kivi import kivi
from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.compression.engines import FidelityGate
from mmrl.compression.fidelity import gate, measure
from mmrl.compression.transforms.visual_computation import drop_visual_layers
from mmrl.core.rng import Stream
from mmrl.vision.engines.generate import Generate
from mmrl.vision.policies.tokens import Tokens
from tests.compression.caching import llava, prompts
from tests.vision import mixed


@pytest.fixture(scope="module")
def model():
    return llava()


def asked():
    return [prompts(4)[i] for i in (0, 2, 3)]


def test_a_cache_that_loses_nothing_agrees_in_everything(model):
    found = measure(model, asked(), partial(visual_quant, nbits=16), num_tokens=5)
    assert (found.agreement, found.num_tokens) == (1.0, 15)
    assert abs(found.kl) < 1e-12
    assert "100.0% of 15 tokens agree, KL 0.0000 nats" in str(found).replace("-0.0000", "0.0000")


def test_kl_is_that_of_the_full_distribution_to_the_other(model):
    # By hand: the first prompt, one token, the last token of the prompt held back.
    from transformers import DynamicCache

    one = asked()[0]
    ids = one["input_ids"]
    said = []
    for cache in (
        DynamicCache(config=model.config),
        visual_quant(model.config, ids[:, :-1] == model.config.image_token_id, None, nbits=1),
    ):
        with torch.no_grad():
            model(input_ids=ids[:, :-1], pixel_values=one["pixel_values"], past_key_values=cache)
            said.append(model(input_ids=ids[:, -1:], past_key_values=cache).logits[0, -1].log_softmax(-1))
    kl = (said[0].exp() * (said[0] - said[1])).sum()
    found = measure(model, [one], partial(visual_quant, nbits=1), num_tokens=1)
    assert found.kl == found.worst_kl == pytest.approx(float(kl), rel=1e-9)
    assert found.kl > 0.01
    assert found.agreement == float(said[0].argmax() == said[1].argmax())


def test_bytes_of_both_are_told(model):
    found = measure(model, asked(), partial(kivi, nbits=8, q_group_size=8, residual_length=8), num_tokens=3)
    lengths = sum(one["input_ids"].shape[1] - 1 + 3 for one in asked())
    assert found.full_nbytes == lengths * 2 * 2 * 2 * 16 * 8
    assert 0 < found.nbytes < found.full_nbytes


def test_the_gate_prints_and_refuses_below_its_threshold(model, capsys):
    with pytest.raises(ValueError, match="the cache changes the answers: .* wanted are 99.0%"):
        gate(model, asked(), partial(visual_quant, nbits=1), num_tokens=5, min_agreement=0.99)
    assert capsys.readouterr().out.startswith("cache: ")
    found = gate(model, asked(), partial(visual_quant, nbits=1), num_tokens=5, allow=True)
    assert found.kl > 0.01
    gate(model, asked(), partial(visual_quant, nbits=16), num_tokens=5, min_agreement=1.0, max_kl=1e-9)
    # Agreement alone is not enough.
    with pytest.raises(ValueError, match="at most 0.001 nats"):
        gate(model, asked(), partial(visual_quant, nbits=1), num_tokens=1, min_agreement=0.0, max_kl=1e-3)


def test_there_must_be_a_prompt(model):
    with pytest.raises(ValueError, match="no prompt to compare caches on"):
        measure(model, [], partial(visual_quant, nbits=1))


# ---- in front of an engine


def engine(policy, **cache):
    made = partial(visual_quant, **cache) if cache else None
    return Generate(policy, stream=Stream(0), max_completion_length=4, cache=made)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_check_cache_lets_a_faithful_cache_pass_and_measures_once(exact, family, capsys):
    policy = exact(family)
    checked = FidelityGate(engine(policy, nbits=16), num_prompts=3, num_tokens=3)
    rows = checked.rollout(mixed.prompts(family))
    expected = engine(policy).rollout(mixed.prompts(family))
    assert [row.steps.ids.tolist() for row in rows] == [row.steps.ids.tolist() for row in expected]
    checked.rollout(mixed.prompts(family)[:1])
    out = capsys.readouterr().out
    assert out.count("cache: 100.0% of 9 tokens agree") == 1


def test_check_cache_stops_a_cache_that_changes_answers(exact):
    policy = exact("qwen2_5_vl")
    asked = mixed.prompts("qwen2_5_vl")[1:]
    with pytest.raises(ValueError, match="the cache changes the answers"):
        FidelityGate(engine(policy, nbits=1), num_tokens=4).rollout(asked)
    rows = FidelityGate(engine(policy, nbits=1), num_tokens=4, allow=True).rollout(asked)
    assert len(rows) == len(asked)


def test_the_gate_measures_what_transforms_change_as_well(model, capsys):
    whole, half = drop_visual_layers(model, after=2), drop_visual_layers(model, after=1)
    found = gate(model, asked(), None, num_tokens=4, cheaper=whole)
    assert (found.agreement, found.num_tokens) == (1.0, 12) and abs(found.kl) < 1e-12
    assert capsys.readouterr().out.startswith("cheaper model: 100.0%")
    # A layer in two holds no image of 16 tokens; there is one in the first prompt and in the last, two in
    # the other.
    found = measure(model, asked(), None, num_tokens=4, cheaper=half)
    lengths = [one["input_ids"].shape[1] - 1 + 4 for one in asked()]
    numbers = 2 * 2 * 16 * 8  # keys and values, 2 heads of 16 in float64
    assert found.full_nbytes == sum(lengths) * 2 * numbers
    notes = 2 * 8 * (2 * sum(lengths) - 64)  # places and kinds, of both stages
    assert found.nbytes <= (2 * sum(lengths) - 64) * numbers + notes
    assert found.kl > 1e-3
    with pytest.raises(ValueError, match="the cheaper model and cache changes the answers"):
        gate(model, asked(), partial(visual_quant, nbits=1), num_tokens=4, cheaper=half, max_kl=1e-3)


def test_check_cache_measures_an_engines_transforms_with_its_cache(exact, capsys):
    policy = exact("qwen2_5_vl")
    asked = mixed.prompts("qwen2_5_vl")[1:3]

    def cheap(after, **cache):
        made = partial(visual_quant, **cache) if cache else None
        transform = (partial(drop_visual_layers, after=after),)
        return Generate(policy, stream=Stream(0), max_completion_length=3, cache=made, transform=transform)

    checked = FidelityGate(cheap(2, nbits=16), num_tokens=3)
    rows, expected = checked.rollout(asked), engine(policy).rollout(asked)
    assert [row.steps.ids[:3].tolist() for row in rows] == [row.steps.ids[:3].tolist() for row in expected]
    assert capsys.readouterr().out.startswith("cheaper model and cache: 100.0% of 6 tokens agree, KL")
    with pytest.raises(ValueError, match="the cheaper model changes the answers"):
        FidelityGate(cheap(1), num_tokens=3, max_kl=1e-4).rollout(asked)


def test_check_cache_measures_a_model_that_computes_its_layers_anew(checkpoint):
    policy = Tokens(model=str(checkpoint("llava")), dtype="float64", gradient_checkpointing=True)
    FidelityGate(engine(policy, nbits=16), num_tokens=2).rollout(mixed.prompts("llava"))
    assert any(module.training for module in policy.model.modules())


def test_check_cache_needs_something_to_measure(exact):
    with pytest.raises(ValueError, match="`fidelity_gate` compares an accelerated engine with its policy"):
        FidelityGate(engine(exact("llava")))
