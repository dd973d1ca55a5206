"""Prompts are computed and held once, and nothing that rows say or learn depends on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.compression.transforms.visual_computation import drop_visual_heads
from mmrl.core.types import Outcome
from mmrl.kv_cache import hf_cache
from mmrl.kv_cache.attention_interface import record_keys
from mmrl.vision.decoding.prefill import prefill
from mmrl.vision.decoding.token_steps import distinct_prompts, read_cached
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny

EVERY = pytest.mark.parametrize("family", sorted(tiny.MAKERS))
TIGHT = {"rtol": 0, "atol": 1e-10}


def encoded(policy: Tokens, family: str):
    return [policy.prompt_encoder.encode(prompt) for prompt in mixed.prompts(family)]


def ragged(policy: Tokens, family: str):
    """Make rows of groups of different sizes, prompts out of order."""
    rows = mixed.answered(policy, family)
    return tuple(row for i, row in enumerate((*rows[::2], *rows[1::2])) if i % 5 != 3)


def walk(policy: Tokens, family: str, *, share_prefix: bool) -> list[torch.Tensor]:
    """Read given tokens behind prompts, several at once and one by one, while rows leave: all states."""
    prompts, gen = encoded(policy, family), torch.Generator().manual_seed(0)
    which = torch.tensor([1, 0, 1, 2, 1, 2])
    with torch.no_grad():
        prefix = prefill(policy.core, prompts[:3], share_prefix=share_prefix).select(which)
        assert len(prefix.cache.layers) == policy.model.config.get_text_config().num_hidden_layers
        found = []
        for num, kept in ((1, None), (3, [0, 2, 3, 4]), (1, [3, 1, 2]), (40, [0, 1]), (1, None), (1, [0])):
            ids = torch.randint(20, 200, (len(prefix.last), num), generator=gen)
            found.append(prefix.read(ids))
            if kept is not None:
                prefix = prefix.select(torch.tensor(kept))
    return found


@EVERY
def test_answers_grow_behind_a_shared_prompt_as_behind_copies_of_it(exact, family):
    shared, copied = (walk(exact(family), family, share_prefix=share) for share in (True, False))
    for one, other in zip(shared, copied, strict=True):
        mixed.assert_close(family, one, other, **TIGHT)


@pytest.mark.parametrize("family", sorted(tiny.MAKERS.keys() - {"qwen3_5"}))  # whose states are copied
def test_a_prompt_is_held_once_however_many_rows_read_it(exact, family):
    policy = exact(family)
    with torch.no_grad():
        prefix = prefill(policy.core, encoded(policy, family)[:2])
        held = [layer for layer in prefix.cache.layers]
        before = [(one.keys.data_ptr(), one.values.data_ptr()) for one in held]
        prefix = prefix.select(torch.tensor([0, 1] * 8))
        prefix.read(prefix.last[:, None])
        assert [(one.keys.data_ptr(), one.values.data_ptr()) for one in held] == before
        assert all(len(one.keys) == len(one.values) == 2 for one in held)
        prefix.select(torch.tensor([1, 3, 5]))
        # Nobody reads the first prompt any more.
        assert all(len(one.keys) == len(one.values) == 1 for one in held)


@EVERY
def test_values_and_gradients_are_those_of_copies(exact, family, monkeypatch):
    policy = exact(family)
    batch = policy.collate(ragged(policy, family))
    results = []
    for share in (True, False):
        monkeypatch.setattr(policy.module, "share", share)
        value = mixed.loss(policy, batch)
        value.backward()
        results.append({"loss": value.detach(), **mixed.gradients(policy)})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        mixed.assert_close(family, value, results[1][name], rtol=1e-9, atol=1e-9, msg=name)


class Norm(nn.Module):
    """The norm of a language model, in the precision of its weights."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def precise(checkpoint, family: str, **options) -> Tokens:
    """Load a policy whose norms compute in float64 as well: those of transformers round to float32."""
    policy = Tokens(model=str(checkpoint(family)), dtype="float64", **options)
    for parent in list(policy.model.modules()):
        for name, module in list(parent.named_children()):
            if hasattr(module, "variance_epsilon") and family not in tiny.IN_FLOAT32:
                setattr(parent, name, Norm(module))
    return policy


def repeated(policy: Tokens, rows, weight: torch.Tensor) -> torch.Tensor:
    """Compute the loss as transformers would: every row with its own prompt, through the whole model."""
    total = 0.0
    for i, row in enumerate(rows):
        logits = mixed.logits_of(policy, row)
        hidden = torch.zeros(logits.shape[1]).index_fill(
            0, torch.tensor(policy.prompt_encoder.placeholders), -1e30
        )
        said = (logits + hidden).log_softmax(-1).gather(-1, row.steps.ids[:, None])[:, 0]
        total = total + (said * weight[i, : row.length]).sum()
    return total


@pytest.mark.parametrize(
    ("family", "lora"), [*((family, 0) for family in sorted(tiny.MAKERS)), ("qwen2_5_vl", 2), ("internvl", 2)]
)
def test_values_and_gradients_are_those_of_repeated_prompts(checkpoint, family, lora):
    policy = precise(checkpoint, family, lora_rank=lora)
    rows = ragged(policy, family)
    batch = policy.collate(rows)
    weight = torch.linspace(0.5, 2.0, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape)
    together = (policy(batch).logp * weight * batch.mask).sum()
    together.backward()
    found = mixed.gradients(policy)
    apart = repeated(policy, rows, weight)
    apart.backward()
    wanted = mixed.gradients(policy)
    mixed.assert_close(family, together, apart, rtol=1e-10, atol=1e-10)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        mixed.assert_close(family, value, wanted[name], rtol=1e-10, atol=1e-10, msg=name)


@EVERY
def test_recomputed_layers_give_the_gradients_of_a_shared_prompt(checkpoint, family):
    results = []
    for again in (False, True):
        policy = precise(checkpoint, family, gradient_checkpointing=again)
        batch = policy.collate(ragged(policy, family))
        mixed.loss(policy, batch).backward()
        results.append(mixed.gradients(policy))
    for name, value in results[0].items():
        mixed.assert_close(family, results[1][name], value, rtol=1e-10, atol=1e-10, msg=name)


@EVERY
def test_rollouts_are_those_of_copies(exact, family, monkeypatch):
    policy = exact(family)
    # One token in ten ends an answer, so rows leave one after the other.
    monkeypatch.setattr(policy.prompt_encoder, "end", [policy.prompt_encoder.end[0], *range(0, 256, 10)])
    asked = mixed.prompts(family)
    asked = [*asked * 2, asked[1]]
    results = []
    for share, size in ((True, 0), (True, 4), (False, 0)):
        monkeypatch.setattr(policy, "share_prefix", share)
        results.append(mixed.generate(policy, asked, max_completion_length=12, batch_size=size))
    assert len({row.length for row in results[0]}) > 2
    for one, *others in zip(*results, strict=True):
        for other in others:
            assert one.steps.ids.tolist() == other.steps.ids.tolist()
            torch.testing.assert_close(one.notes["logp"], other.notes["logp"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [3, 12, 30, 60, 200])
def test_layers_with_a_sliding_window_see_as_far_as_they_do_in_copies(checkpoint, window):
    policy = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float64")
    config = policy.model.config.text_config
    config.sliding_window, config.layer_types = window, ["full_attention", "sliding_attention"]
    for layer, kind in zip(policy.model.get_decoder().layers, config.layer_types, strict=True):
        layer.self_attn.layer_type = layer.attention_type = kind
        layer.self_attn.sliding_window = window if kind == "sliding_attention" else None
    decoder = policy.model.get_decoder()
    decoder.has_sliding_layers = True
    shared, copied = (walk(policy, "qwen2_5_vl", share_prefix=share) for share in (True, False))
    for one, other in zip(shared, copied, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)
    config.layer_types = ["full_attention"] * 2
    for layer in decoder.layers:
        layer.self_attn.layer_type = layer.attention_type = "full_attention"
        layer.self_attn.sliding_window = None
    far = walk(policy, "qwen2_5_vl", share_prefix=True)
    assert (window == 200) == torch.allclose(far[-2], shared[-2], **TIGHT)


def test_an_eager_model_shares_its_prompts_too(checkpoint):
    # The softmax of eager attention is float32, in which the mask of a float64 model is no number.
    policy = Tokens(model=str(checkpoint("llava")), dtype="float32", attn_implementation="eager")
    shared, copied = (walk(policy, "llava", share_prefix=share) for share in (True, False))
    for one, other in zip(shared, copied, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_prompts_of_rows(exact):
    policy = exact("llava")
    long = tiny.ask("long", tiny.picture(), "what " * 60)
    rows = [policy.encode(long, Outcome(text="0")) for _ in range(8)]
    sizes = []
    for share in (True, False):
        kept: dict[int, int] = {}

        def note(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            states = read_cached(policy.core, policy.collate(tuple(rows)).steps, share_prefix=share)
        states.sum()
        sizes.append(sum(kept.values()))
    # Eight copies of the keys and values of two layers are more than everything else of this model together.
    assert sizes[0] < 0.75 * sizes[1]


def test_a_cache_that_is_given_goes_on_as_it_did(checkpoint):
    policy = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float64")
    rows = mixed.answered(policy, "qwen2_5_vl")
    batch = policy.collate(rows)
    with torch.no_grad():
        before = policy(batch).logp
        prompts, _ = distinct_prompts([row.steps.prompt for row in rows])
        prefix = prefill(policy.core, prompts, lambda config, *given: visual_quant(config, *given, nbits=16))
        assert type(prefix.cache).__name__ == "PromptCache"
        # That cache taught the model to read codes, for good; exact prompts are shared behind it.
        assert policy.model.config.text_config._attn_implementation == "mmrl_sdpa"
        torch.testing.assert_close(policy(batch).logp, before, **TIGHT)
        shared = prefill(policy.core, prompts)
    assert type(shared.cache).__name__ == "PromptCache"


def test_a_model_that_attends_in_its_own_way_gets_copies(exact):
    policy = exact("llava")
    model = drop_visual_heads(policy.model, keep=0.5)
    with torch.no_grad():
        prefix = prefill(model.base_model, encoded(policy, "llava"))
    assert type(prefix.cache).__name__ == "DynamicCache"


def test_masks_of_another_kind_are_left_alone():
    text = SimpleNamespace(_attn_implementation="flash_attention_2")
    config = SimpleNamespace(get_text_config=lambda decoder: text)
    with record_keys(config) as recorded:
        assert text._attn_implementation == "flash_attention_2"
    assert recorded == []


def test_the_models_own_attention_stands_in_its_config_whatever_happens(exact):
    policy = exact("qwen2_5_vl")
    text = policy.model.config.text_config
    with torch.no_grad():
        prefix = prefill(policy.core, encoded(policy, "qwen2_5_vl")[:1])
        assert text._attn_implementation == "sdpa"
        with pytest.raises(IndexError):
            prefix.read(torch.tensor([[10**6]]))
    assert text._attn_implementation == "sdpa"


def test_a_cache_that_is_larger_than_without_says_so_once(monkeypatch, recwarn):
    monkeypatch.setattr(hf_cache, "LARGER", [])
    text = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=2, head_dim=8, hidden_size=16)
    config = SimpleNamespace(get_text_config=lambda decoder: text)
    exact = 2 * 2 * 2 * 8 * 5 * 4  # keys and values, layers, heads, size, tokens, bytes
    for held in (None, exact, exact + 1, exact + 2):
        hf_cache.warn_of_larger(SimpleNamespace(nbytes=held), config, 5, torch.float32)
    (warned,) = (str(one.message) for one in recwarn)
    assert f"holds {exact + 1:,} bytes for 5 tokens" in warned and f"the {exact:,} bytes without it" in warned
