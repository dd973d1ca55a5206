"""What an engine that generates text holds while it answers."""

from __future__ import annotations

import pytest
import torch

from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.core.rng import Stream
from mmrl.costs import operations
from mmrl.vision.costs import held_bytes, keys_and_values
from mmrl.vision.engines.generate import Generate
from tests.vision import tiny

# A token of the tiny LLaVA: keys and values of 2 layers, 2 heads of 8 channels, float64.
TOKEN = 2 * 2 * 2 * 8 * 8


@pytest.fixture
def policy(exact):
    return exact("llava")


def spent(policy, prompts, **options):
    engine = Generate(policy, stream=Stream(0), **{"max_completion_length": 3, **options})
    with keys_and_values(engine) as found, torch.no_grad():
        engine.rollout(prompts)
    return found["bytes of keys and values"]


def length(policy, prompt):
    return len(policy.prompt_encoder.encode(prompt).ids)


@pytest.fixture
def asked():
    return [tiny.ask("one", tiny.picture(), "what"), tiny.ask("two", tiny.picture(seed=1), "what")]


def test_prompts_are_held_once_and_answers_for_every_row(policy, asked, monkeypatch):
    monkeypatch.setattr(policy.prompt_encoder, "end", [])
    many = length(policy, asked[0])
    one, both = spent(policy, asked[:1]), spent(policy, asked)
    # The mask of a prompt and who reads it are held as well: less than a token a row.
    assert many * TOKEN <= one < (many + 40) * TOKEN, "an answer has room for 32 tokens more"
    assert both == pytest.approx(2 * one, rel=0.02)
    group = spent(policy, asked[:1] * 8)
    assert group < one + 7 * 36 * TOKEN < 8 * one, "rows of a group share their prompt"


def test_batches_are_added_up(policy, asked, monkeypatch):
    monkeypatch.setattr(policy.prompt_encoder, "end", [])
    assert spent(policy, asked, batch_size=1) == pytest.approx(spent(policy, asked), rel=0.02)


def test_copies_cost_what_they_take(policy, exact, asked, monkeypatch):
    copying = exact("llava", share_prefix=False)
    for one in (policy, copying):
        monkeypatch.setattr(one.prompt_encoder, "end", [])
    many = length(policy, asked[0])
    # Without sharing, each of 8 rows holds the prompt and two tokens of its answer; the third is never read.
    assert spent(copying, asked[:1] * 8) == 8 * (many + 2) * TOKEN


def test_codes_are_measured_as_they_are_held(policy, monkeypatch):
    monkeypatch.setattr(policy.prompt_encoder, "end", [])
    pictures = tiny.ask("pictures", *(tiny.picture(seed=i) for i in range(6)))
    full = spent(policy, [pictures])
    coded = spent(policy, [pictures], cache=lambda *given: visual_quant(*given, nbits=1))
    sixteen = spent(policy, [pictures], cache=lambda *given: visual_quant(*given, nbits=16))
    assert coded < full < 1.5 * sixteen


def test_nothing_is_held_where_nothing_is_generated():
    with keys_and_values(None) as found:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert found == {"bytes of keys and values": 0.0}


def test_the_hook_is_gone_afterwards_even_after_a_fault():
    hooks = torch.nn.modules.module._global_forward_hooks
    before = len(hooks)
    with pytest.raises(RuntimeError), keys_and_values(None):
        assert len(hooks) == before + 1
        raise RuntimeError
    assert len(hooks) == before


def test_what_shares_memory_counts_once():
    x = torch.zeros(10)
    thing = type("Thing", (), {})()
    thing.parts = [x, x[:5], {"again": x.view(2, 5)}, ("words", 3, None)]
    thing.itself = thing
    thing.model = torch.nn.Linear(9, 9)
    assert held_bytes(thing) == 40


def test_operations_of_a_rollout_are_those_of_its_products(policy, asked, monkeypatch):
    monkeypatch.setattr(policy.prompt_encoder, "end", [])

    def counted(many):
        engine = Generate(policy, stream=Stream(0), max_completion_length=many)
        with operations(engine) as found, torch.no_grad():
            engine.rollout(asked[:1])
        return found["operations"]

    # One token more passes 2 layers of width 32: queries and outputs 32 by 32, keys and values 32 by 16,
    # three times 32 by 64, then the head; attention comes on top: scores and sums over what is there.
    width, words = 32, policy.model.get_output_embeddings().weight.shape[0]
    products = 2 * (2 * width * 32 + 2 * width * 16 + 3 * width * 64) + width * words
    seen = length(policy, asked[0]) + 1
    assert counted(2) - counted(1) == 2 * products + 2 * 2 * 2 * width * seen
