"""Decode steps without the modules of the text model: the same states, for models that are known alone."""

from __future__ import annotations

import pytest
import torch
import transformers as t
from torch.utils._python_dispatch import TorchDispatchMode

from mmrl.core import onednn as module
from mmrl.core.onednn import onednn
from mmrl.core.rng import seeded
from mmrl.vision.decoding.decoding import CachedReader
from mmrl.vision.decoding.prefill import prefill
from mmrl.vision.decoding.single_step import AHEAD, FAMILIES, find_decoder, single_steps, step_of
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 60, "initializer_range": 0.3, "max_position_embeddings": 4096,
}  # fmt: skip
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def single(checkpoint, family: str, **options) -> Tokens:
    return Tokens(model=str(checkpoint(family)), dtype="float32", **options)


@torch.no_grad()
def states(policy: Tokens, prompts: list[EncodedPrompt], *, used: bool) -> torch.Tensor:
    """Read the same tokens step by step, the last two with fewer rows: logits, side by side."""
    core = policy.core if used else torch.nn.Identity()
    with onednn(policy.model, pack=used) as packed, single_steps(core, packed):
        assert (step_of(policy.core) is not None) == used
        return read(CachedReader(policy, prompts), steps=5)


def read(reader: CachedReader, steps: int) -> torch.Tensor:
    rows, token, found = torch.arange(len(reader.prefix.last)), None, []
    for step in range(steps):
        if step == 3:
            rows = rows[1:]  # groups differ in size from here on
            token = token[1:]
            reader.keep(torch.arange(1, len(rows) + 1))
        logits = reader.read(token)
        found.append(logits)
        token = (7 * step + 3 * rows) % 40
    assert reader.prefix.mask.shape[1] == reader.prefix.cache.get_seq_length()
    return torch.cat(found)


@pytest.mark.parametrize("family", sorted(tiny.MAKERS.keys() - {"gemma3", "glm46v", "qwen3_5"}))
def test_states_of_every_family_are_those_of_its_modules(checkpoint, family):
    policy = single(checkpoint, family)
    prompts = [policy.prompt_encoder.encode(prompt) for prompt in mixed.prompts(family)[:3]]
    for rows in ([prompts[1]] * 3, [*[prompts[0]] * 2, *[prompts[1]] * 2], [prompts[2], *prompts[:2]] * 2):
        torch.testing.assert_close(states(policy, rows, used=True), states(policy, rows, used=False), **CLOSE)


@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 2}])
def test_packed_weights_and_adapters(checkpoint, monkeypatch, adapter):
    policy = single(checkpoint, "qwen2_5_vl", **adapter)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)  # else an adapter is 0 at its start
    prompt = policy.prompt_encoder.encode(mixed.prompts("qwen2_5_vl")[1])
    wanted = states(policy, [prompt] * 3, used=False)
    torch.testing.assert_close(states(policy, [prompt] * 3, used=True), wanted, **CLOSE)
    monkeypatch.setattr(module, "MANY", 0)
    torch.testing.assert_close(states(policy, [prompt] * 3, used=True), wanted, **CLOSE)


def text_model(family: str, **options) -> torch.nn.Module:
    with seeded(0):
        model = t.AutoModel.from_config(t.AutoConfig.for_model(family, **SMALL, **options)).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith("_vl")])
def test_language_models_agree_with_a_whole_read_past_the_angles_of_one_batch(family, window):
    model = text_model(family, **({"sliding_window": window} if family == "mistral" else {}))
    ids = torch.arange(9 + AHEAD + 4) * 7 % 50
    wanted = model(ids[None]).last_hidden_state[0, 8:]
    prompt = EncodedPrompt("a", ids[:9], torch.arange(9)[None], {})
    with single_steps(model, {}):
        assert step_of(model) is not None
        prefix = prefill(model, [prompt]).select(torch.tensor([0, 0]))
        found = [prefix.read(token.expand(2, 1))[:, 0] for token in ids[8:]]
    for row in torch.stack(found, 1):
        torch.testing.assert_close(row, wanted, **CLOSE)


def test_layers_that_are_not_known_or_changed_go_through_their_modules():
    model = text_model("llama")
    assert find_decoder(model) is model
    assert find_decoder(text_model("gemma")) is None  # norms of other weights
    assert find_decoder(text_model("llama").double()) is None  # of which norms are in float32
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert find_decoder(text_model("llama", rope_parameters=scaled)) is None
    hook = model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + 1)
    assert find_decoder(model) is None
    hook.remove()
    model.layers[0].mlp.forward = lambda x: x
    assert find_decoder(model) is None
    del model.layers[0].mlp.forward
    model.layers[0].__class__ = type("Steered", (type(model.layers[0]),), {})
    assert find_decoder(model) is None


def test_a_gradient_autocast_and_another_model_are_not_served():
    model = text_model("qwen3")
    with single_steps(model, {}):
        assert step_of(model) is None  # gradients are on
        with torch.no_grad():
            assert step_of(model) is not None
            assert step_of(text_model("qwen3")) is None
            with torch.autocast("cpu", torch.bfloat16):
                assert step_of(model) is None
    with torch.no_grad():
        assert step_of(model) is None


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_steps_under_autocast_are_as_near_to_float32_as_modules(family, weights):
    model, ids = text_model(family).to(weights), torch.arange(40) * 7 % 50
    exact = text_model(family)(ids[None]).last_hidden_state[0, 8:]
    prompt, gaps = EncodedPrompt("a", ids[:9], torch.arange(9)[None], {}), []
    for used in (False, True):
        with torch.autocast("cpu", torch.bfloat16), single_steps(model if used else torch.nn.Identity(), {}):
            prefix = prefill(model, [prompt]).select(torch.tensor([0, 0]))
            assert (step_of(model) is not None) == used
            found = torch.stack([prefix.read(token.expand(2, 1))[0, 0] for token in ids[8:]])
            assert used or found.dtype == weights
        gaps.append((found.float() - exact).norm() / exact.norm())
    assert gaps[1] < 1.3 * gaps[0] < 0.2, gaps


class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize(("low", "share"), [(False, 2 / 3), (True, 5 / 9)])
def test_a_step_takes_few_operators(low, share):
    model, calls = text_model("qwen2"), []
    prompt = EncodedPrompt("a", torch.arange(9), torch.arange(9)[None], {})
    for used in (False, True):
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=low)
        with autocast, single_steps(model if used else torch.nn.Identity(), {}):
            prefix = prefill(model, [prompt]).select(torch.zeros(4, dtype=torch.int64))
            for _ in range(2):  # the second step has its angles
                prefix.read(torch.ones(4, 1, dtype=torch.int64))
            with Count() as count:
                prefix.read(torch.ones(4, 1, dtype=torch.int64))
        calls.append(count.calls)
    assert calls[1] <= share * calls[0], calls
