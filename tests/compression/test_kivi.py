"""`kivi`: KIVI's streams of codes behind a window of exact tokens."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from mmrl.compression.caches.kivi import kivi
from mmrl.config.schema import ConfigError
from tests.compression import caching
from tests.compression.caching import answers, batch, llava, masks, prompts, read
from tests.vision import mixed

PATHS = pytest.mark.parametrize("fused", [True, False])
SMALL = {"q_group_size": 8, "residual_length": 8}


@pytest.fixture(scope="module")
def model():
    return llava()


def made(model, inputs, **options):
    return kivi(*masks(model, inputs), **{**SMALL, **options})


@PATHS
def test_while_everything_stands_in_the_window_no_logit_changes(model, fused):
    inputs, answer = batch(prompts()), answers(8)
    cache = made(model, inputs, nbits=2, residual_length=128, fused=fused)
    expected = read(model, inputs, DynamicCache(config=model.config), answer)
    assert_close(read(model, inputs, cache, answer), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options", [{"nbits": 2}, {"nbits": 2, "value_nbits": 1, "rule": "fitted", "rotate": True}], ids=str
)
def test_both_paths_say_the_same_while_tokens_leave_the_window(model, options):
    # 20 tokens behind the prompt: every row's window of 8 keys empties twice or more, at steps of its own.
    inputs, answer = batch(prompts()), answers(8, 20)
    said = [
        read(model, inputs, made(model, inputs, fused=fused, **options), answer) for fused in (True, False)
    ]
    assert_close(*said, rtol=0, atol=1e-9)


@PATHS
def test_groups_of_one_number_change_no_logit(model, fused):
    # A group of one key or one value has its own `low`: the number itself.
    inputs, answer = batch(prompts()), answers(8, 20)
    cache = made(model, inputs, nbits=8, q_group_size=1, fused=fused)
    expected = read(model, inputs, DynamicCache(config=model.config), answer)
    assert_close(read(model, inputs, cache, answer), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [{"nbits": 2}, {"nbits": 4, "rotate": True}], ids=str)
def test_ragged_rows_together_are_rows_alone(model, options):
    listed, answer = prompts(4), answers(4, 20)
    inputs = batch(listed)
    together = read(model, inputs, made(model, inputs, **options), answer)
    for i, one in enumerate(listed):
        alone = batch([one])
        said = read(model, alone, made(model, alone, **options), answer[i : i + 1])
        assert_close(together[i : i + 1], said, rtol=0, atol=1e-9)


def test_more_bits_are_nearer_to_the_full_cache(model):
    inputs, answer = batch(prompts()), answers(8, 12)
    expected = read(model, inputs, DynamicCache(config=model.config), answer)
    gaps = [
        (read(model, inputs, made(model, inputs, nbits=nbits), answer) - expected).square().mean().item()
        for nbits in (8, 4, 2, 1)
    ]
    assert gaps == sorted(gaps)
    assert gaps[0] < 1e-3 < gaps[3]


def window(length: int, residual: int = 8):
    """Hold `length` tokens of one row, one layer, one head of 8 channels, as they come one by one."""
    import transformers as t

    config = t.LlamaConfig(hidden_size=8, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    cache = kivi(config, None, None, nbits=2, q_group_size=4 * 2, residual_length=residual, fused=False)
    tokens = torch.randn(1, 1, length, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return cache, tokens


def test_keys_leave_together_and_values_one_by_one():
    cache, tokens = window(30)
    cache.update(tokens[:, :, :10], tokens[:, :, :10], 0)
    held = cache.layers[0]
    # Of 10 keys 10 mod 8 = 2 stay; of 10 values the newest 8.
    assert (held.tail.new_keys.count.item(), held.tail.new_values.count.item()) == (2, 8)
    seen = []
    for t in range(10, 20):
        keys, values = cache.update(tokens[:, :, t : t + 1], tokens[:, :, t : t + 1], 0)
        exact_keys = (keys == tokens[:, :, : t + 1]).all(-1)[0, 0]
        exact_values = (values == tokens[:, :, : t + 1]).all(-1)[0, 0]
        seen.append(
            (
                int(exact_keys.flip(0).long().cumprod(0).sum()),
                int(exact_values.flip(0).long().cumprod(0).sum()),
            )
        )
    # A step still sees the window that it fills (8 keys, then 1), and one value more than stays.
    assert seen == [(3, 9), (4, 9), (5, 9), (6, 9), (7, 9), (8, 9), (1, 9), (2, 9), (3, 9), (4, 9)]


def test_what_left_is_never_touched_again():
    cache, tokens = window(40)
    cache.update(tokens[:, :, :16], tokens[:, :, :16], 0)
    first = None
    for t in range(16, 40):
        keys, values = cache.update(tokens[:, :, t : t + 1], tokens[:, :, t : t + 1], 0)
        first = (keys[:, :, :16], values[:, :, :8]) if first is None else first
        assert torch.equal(keys[:, :, :16], first[0])
        assert torch.equal(values[:, :, :8], first[1])
    # Groups of 8 keys in 2 bits of their channel's range: three steps of a third each.
    error = (first[0] - tokens[:, :, :16]).abs().unflatten(2, (2, 8))
    span = tokens[:, :, :16].unflatten(2, (2, 8))
    assert (error.amax(3) <= (span.amax(3) - span.amin(3)) / 6 + 1e-9).all()


def test_bytes_are_those_of_codes_scales_and_window():
    import transformers as t

    config = t.LlamaConfig(hidden_size=64, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    cache = kivi(config, None, None, nbits=2, q_group_size=32, residual_length=32)
    x = torch.randn(1, 1, 1024, 64, dtype=torch.bfloat16)
    cache.update(x, x, 0)
    # Keys: all 1024 in groups of 32, 2 + 32 / 32 = 3 bits a number. Values: 992 at 3 bits, 32 of 16 bits.
    slots = 8 * (1024 + 992 + 32)
    assert cache.nbytes == (1024 + 992) * 64 * 3 // 8 + 32 * 64 * 2 + slots


@PATHS
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_generate_takes_it(model, fused, options):
    inputs = batch(prompts(4))
    said = []
    for cache in (
        DynamicCache(config=model.config),
        made(model, inputs, nbits=8, residual_length=64, fused=fused),
    ):
        with torch.no_grad():
            said.append(
                model.generate(
                    **inputs,
                    past_key_values=cache,
                    max_new_tokens=10,
                    pad_token_id=0,
                    do_sample=False,
                    **options,
                )
            )
    assert torch.equal(*said)


@PATHS
def test_rows_are_chosen_repeated_and_cropped(model, fused):
    inputs, answer = batch(prompts(4)), answers(4, 11)
    make = partial(made, model, inputs, nbits=2, fused=fused)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(answer)], 1)
    more = answers(4, 11, seed=5)
    once = make()
    read(model, inputs, once, answer)
    expected = caching.follow(model, mask, copy.deepcopy(once), more)
    for rows in ([3, 0], [1, 1, 2, 0], [2]):
        cache, rows = copy.deepcopy(once), torch.tensor(rows)
        cache.batch_select_indices(rows)
        assert_close(caching.follow(model, mask[rows], cache, more[rows]), expected[rows], rtol=0, atol=1e-9)


def test_a_conversation_goes_on_in_one_pass(model):
    inputs, answer, turn = batch(prompts()), answers(8, 2), answers(8, 30, seed=4)
    said = []
    for fused in (True, False):
        cache = made(model, inputs, nbits=2, fused=fused)
        read(model, inputs, cache, answer)
        mask = torch.cat([inputs["attention_mask"], torch.ones(8, 32, dtype=torch.int64)], 1)
        position = (mask.cumsum(1) - 1)[:, -30:]
        with torch.no_grad():
            logits = model(
                input_ids=turn, attention_mask=mask, position_ids=position, past_key_values=cache
            ).logits
        said.append(torch.cat([logits, caching.follow(model, mask, cache, answer)], 1))
    assert_close(*said, rtol=0, atol=1e-9)


def test_the_engine_rolls_out_with_it(exact):
    policy = exact("qwen2_5_vl")
    asked = mixed.prompts("qwen2_5_vl")
    options = {**SMALL, "nbits": 4}
    together = mixed.generate(policy, asked * 2, cache=partial(kivi, **options))
    alone = mixed.generate(policy, asked * 2, cache=partial(kivi, **options), batch_size=1)
    assert [row.steps.ids.tolist() for row in together] == [row.steps.ids.tolist() for row in alone]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual_length": 100}, r"`residual_length` \(100\) must be a multiple of `q_group_size` \(8\)"),
        (
            {"q_group_size": 32, "residual_length": 32},
            r"`q_group_size` \(32\) must divide the head size \(16\)",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        kivi(model.config, None, None, **{**SMALL, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbits": 3}, "'cache.nbits' must be one of 1, 2, 4, 8, not 3"),
        ({"q_group_size": 0}, "'cache.q_group_size' must be at least 1, not 0"),
    ],
)
def test_options_out_of_their_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        caching.check_options("kivi", **options)
