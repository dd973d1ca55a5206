"""`visual_quant`: visual tokens in few bits, everything else as it came."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.config.schema import ConfigError
from mmrl.kv_cache import quantization
from mmrl.kv_cache.layout import find_visual
from tests.compression import caching
from tests.compression.caching import answers, batch, llava, masks, prompts, read
from tests.vision import mixed, tiny

PATHS = pytest.mark.parametrize("fused", [True, False])


@pytest.fixture(scope="module")
def model():
    return llava()


def full(model, inputs, answer):
    return read(model, inputs, DynamicCache(config=model.config), answer)


@PATHS
def test_at_full_precision_no_logit_changes(model, fused):
    inputs, answer = batch(prompts()), answers(8)
    cache = visual_quant(*masks(model, inputs), nbits=16, fused=fused)
    assert_close(read(model, inputs, cache, answer), full(model, inputs, answer), rtol=0, atol=1e-10)


def test_both_paths_say_the_same_and_eight_bits_nearly_that_of_the_full_cache(model):
    inputs, answer = batch(prompts()), answers(8)
    expected = full(model, inputs, answer)
    gaps = []
    for nbits in (8, 1):
        said = [
            read(model, inputs, visual_quant(*masks(model, inputs), nbits=nbits, fused=fused), answer)
            for fused in (True, False)
        ]
        assert_close(*said, rtol=0, atol=1e-10)
        gaps.append((said[0] - expected).abs().max().item())
    assert gaps[0] < 0.1 < gaps[1]


OPTIONS = [
    {"nbits": 1},
    {"nbits": 1, "rule": "shrunk", "score_drop": 3.0},
    {"nbits": 2, "value_nbits": 1, "rule": "quantile"},
    {"nbits": 4, "axis_value": "token", "rotate": True},
    {"nbits": 2, "per_image": True, "rule": "centred"},
    {"nbits": 1, "q_group_size": 5, "rule": "range"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_eight_ragged_rows_together_are_eight_rows_alone(model, options):
    made, answer = prompts(), answers(8)
    inputs = batch(made)
    together = read(model, inputs, visual_quant(*masks(model, inputs), **options), answer)
    for i, one in enumerate(made):
        alone = batch([one])
        said = read(model, alone, visual_quant(*masks(model, alone), **options), answer[i : i + 1])
        assert_close(together[i : i + 1], said, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS[2:], ids=str)
def test_the_fused_path_is_that_over_dense_tensors(model, options):
    inputs, answer = batch(prompts()), answers(8)
    said = [
        read(model, inputs, visual_quant(*masks(model, inputs), fused=fused, **options), answer)
        for fused in (True, False)
    ]
    assert_close(*said, rtol=0, atol=1e-10)


def test_rows_without_a_image_keep_every_logit(model):
    inputs, answer = batch(prompts()), answers(8)
    said = read(model, inputs, visual_quant(*masks(model, inputs), nbits=1), answer)
    gap = (said - full(model, inputs, answer)).abs().amax((1, 2))
    assert (gap < 1e-10).tolist() == [i in (1, 6) for i in range(8)]
    words = batch([prompts()[1], prompts()[6]])
    assert_close(
        read(model, words, visual_quant(*masks(model, words), nbits=1), answer[:2]),
        full(model, words, answer[:2]),
        rtol=0,
        atol=1e-10,
    )


def test_bytes_shrink_as_the_formula_says():
    # Two layers, keys and values, two heads of 16 channels: 1024 visual tokens at one bit are 2 bytes a head
    # and token, with two scales of 16 numbers of 8 bytes a head.
    visual = torch.ones(1, 1024, dtype=torch.bool)
    cache = visual_quant(llava().config, visual, visual, nbits=1)
    keys = torch.randn(1, 2, 1024, 16, dtype=torch.float64)
    for layer in range(2):
        cache.update(keys, keys, layer)
    codes = 2 * 2 * 2 * (1024 * 2 + 2 * 16 * 8)
    slots = 1024 * 8  # where tokens stand, which both layers share
    assert cache.nbytes == codes + slots
    dense = 2 * 2 * 2 * 1024 * 16 * 8
    assert dense / codes > 50


# ---- what generation does with a cache


def generated(model, inputs, cache, **options):
    with torch.no_grad():
        return model.generate(
            **inputs,
            past_key_values=cache,
            max_new_tokens=6,
            pad_token_id=0,
            **{"do_sample": False, **options},
        )


@PATHS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=str,
)
def test_generate_takes_it(model, fused, options):
    inputs = batch(prompts(4))
    said = []
    for cache in (
        DynamicCache(config=model.config),
        visual_quant(*masks(model, inputs), nbits=16, fused=fused),
    ):
        torch.manual_seed(0)
        said.append(generated(model, inputs, cache, **options))
    assert torch.equal(*said)


def test_rows_that_repeat_a_prompt_hold_it_once(model):
    inputs = batch(prompts(4))
    sizes = []
    for many in (1, 8):
        cache = visual_quant(*masks(model, inputs), nbits=8)
        generated(model, inputs, cache, do_sample=True, num_return_sequences=many)
        sizes.append(
            sum(part.block.nbytes for layer in cache.layers for side in layer.shared for part in side)
        )
    assert sizes[0] == sizes[1]


@PATHS
def test_rows_are_chosen_repeated_and_dropped(model, fused):
    inputs = batch(prompts(4))
    make = partial(visual_quant, *masks(model, inputs), nbits=1, fused=fused)
    answer = answers(4, 3)
    once = make()
    expected = read(model, inputs, once, answer)
    more = answers(4, 3, seed=5)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(answer)], 1)
    behind = caching.follow(model, mask, once, more)
    for rows in ([2, 0], [3, 3, 1], [0, 0, 1, 1, 2, 2, 3, 3], [1]):
        cache = make()
        assert_close(read(model, inputs, cache, answer), expected)
        rows = torch.tensor(rows)
        cache.batch_select_indices(rows)
        said = caching.follow(model, mask[rows], cache, more[rows])
        assert_close(said, behind[rows], rtol=0, atol=1e-10)
        # A second choice among the chosen rows.
        cache = make()
        read(model, inputs, cache, answer)
        cache.batch_select_indices(rows)
        cache.reorder_cache(torch.tensor([len(rows) - 1]))
        last = rows[-1:]
        assert_close(caching.follow(model, mask[last], cache, more[last]), behind[last], rtol=0, atol=1e-10)
    cache = make()
    read(model, inputs, cache, answer)
    cache.batch_repeat_interleave(2)
    twice = torch.arange(4).repeat_interleave(2)
    assert_close(caching.follow(model, mask[twice], cache, more[twice]), behind[twice], rtol=0, atol=1e-10)


def test_prompts_that_nobody_reads_any_more_are_freed(model):
    inputs = batch(prompts(4))
    cache = visual_quant(*masks(model, inputs), nbits=8)
    read(model, inputs, cache, answers(4, 1))
    before = cache.nbytes
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.nbytes < before / 3


@PATHS
def test_a_conversation_goes_on_in_one_pass(model, fused):
    inputs, answer, turn = batch(prompts()), answers(8, 2), answers(8, 7, seed=4)
    said = []
    for cache in (
        DynamicCache(config=model.config),
        visual_quant(*masks(model, inputs), nbits=16, fused=fused),
    ):
        read(model, inputs, cache, answer)
        mask = torch.cat([inputs["attention_mask"], torch.ones(8, 9, dtype=torch.int64)], 1)
        position = (mask.cumsum(1) - 1)[:, -7:]
        with torch.no_grad():
            logits = model(
                input_ids=turn, attention_mask=mask, position_ids=position, past_key_values=cache
            ).logits
        said += [logits, caching.follow(model, mask, cache, answer)]
    assert_close(said[0], said[2], rtol=0, atol=1e-10)
    assert_close(said[1], said[3], rtol=0, atol=1e-10)


@pytest.mark.parametrize("shared", [1, 4])
def test_heads_may_have_keys_of_their_own_or_all_share_one(shared):
    model = llava(shared=shared)
    inputs, answer = batch(prompts(3)), answers(3)
    said = [
        read(model, inputs, visual_quant(*masks(model, inputs), nbits=2, fused=fused), answer)
        for fused in (True, False)
    ]
    assert_close(*said, rtol=0, atol=1e-10)


# ---- in the engine


@pytest.mark.parametrize("family", sorted(tiny.MAKERS.keys() - {"gemma3", "qwen3_5"}))
def test_the_engine_rolls_out_with_it_on_every_family(exact, family):
    policy = exact(family)
    asked = mixed.prompts(family)
    asked = [*asked, asked[1], asked[1]]
    expected = mixed.generate(policy, asked)
    rows = mixed.generate(policy, asked, cache=partial(visual_quant, nbits=16))
    assert [row.steps.ids.tolist() for row in rows] == [row.steps.ids.tolist() for row in expected]
    lossy = mixed.generate(policy, asked, cache=partial(visual_quant, nbits=1))
    alone = mixed.generate(policy, asked, cache=partial(visual_quant, nbits=1), batch_size=1)
    assert [row.steps.ids.tolist() for row in lossy] == [row.steps.ids.tolist() for row in alone]
    assert [row.steps.ids.tolist() for row in lossy[1:]] != [row.steps.ids.tolist() for row in expected[1:]]
    # What was in words only is untouched.
    assert torch.equal(lossy[0].notes["logp"], expected[0].notes["logp"])


@pytest.mark.parametrize(("family", "layers"), [("gemma3", "sliding"), ("qwen3_5", "linear")])
def test_layers_of_other_attention_are_refused(exact, family, layers):
    with pytest.raises(ValueError, match=f"stores layers of full attention, but .* of {layers}_attention"):
        mixed.generate(exact(family), mixed.prompts(family)[:1], cache=partial(visual_quant, nbits=1))


def test_placeholders_are_found_alike_by_engine_and_plainly(exact):
    policy = exact("qwen2_5_vl")
    for prompt in mixed.prompts("qwen2_5_vl"):
        ids = policy.prompt_encoder.encode(prompt).ids[None]
        config = policy.core.config
        wanted = (ids == config.image_token_id) | (ids == config.video_token_id)
        assert torch.equal(find_visual(config, ids)[0], wanted)


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbits": 3}, "'cache.nbits' must be one of 1, 2, 4, 8, 16, not 3"),
        ({"value_nbits": 5}, "'cache.value_nbits' must be one of 1, 2, 4, 8, 16, not 5"),
        ({"rule": "median"}, "'cache.rule' must be one of 'shrunk', .*, 'range', 'fitted', not 'median'"),
    ],
)
def test_options_out_of_their_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        caching.check_options("visual_quant", **options)
    # 16 bits leave keys or values as they are.
    caching.check_options("visual_quant", nbits=16, value_nbits=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_image": True, "q_group_size": 8}, "give one of them"),
        ({"score_drop": 3.0, "fused": False}, "needs `fused: true`"),
    ],
)
def test_options_that_do_not_fit_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        visual_quant(model.config, torch.ones(1, 2), None, **options)


def test_a_model_without_image_placeholders_is_refused(model):
    with pytest.raises(ValueError, match="type 'llama' has no placeholder token"):
        find_visual(model.config.text_config, torch.ones(1, 2))
    with pytest.raises(ValueError, match="this cache needs `visual`"):
        visual_quant(model.config, None, None)


def test_heads_that_fill_no_bytes_are_refused():
    import transformers as t

    config = t.LlamaConfig(hidden_size=24, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    with pytest.raises(ValueError, match="heads of size 12 do not fill whole bytes"):
        visual_quant(config, torch.ones(1, 2), None)


def test_layers_of_another_kind_are_named():
    import transformers as t

    config = t.Gemma2Config(num_hidden_layers=2, head_dim=16)
    with pytest.raises(ValueError, match="has layers of sliding_attention"):
        visual_quant(config, torch.ones(1, 2), None)


def test_a_cache_of_another_model_or_batch_is_refused(model):
    inputs = batch(prompts(2))
    other = visual_quant(*masks(llava(layers=1), inputs))
    with pytest.raises(ValueError, match="made for 1 layers, but the model has a layer number 1"):
        read(model, inputs, other, answers(2))
    other = visual_quant(*masks(llava(size=8), inputs))
    with pytest.raises(
        ValueError, match="made for 2 key-value heads of size 8, but the model gives 2 of size 16"
    ):
        read(model, inputs, other, answers(2))
    longer = batch(prompts(3))
    with pytest.raises(ValueError, match="masks of the cache are for 2 prompts of 21 tokens"):
        read(model, longer, visual_quant(*masks(model, inputs)), answers(3))
    used = visual_quant(*masks(model, inputs))
    with pytest.raises(ValueError, match="belongs to one batch of prompts"):
        used.reset()
    with pytest.raises(ValueError, match="drops no tokens"):
        used.crop(-1)


def test_no_gradient_is_lost_in_silence(model):
    inputs = batch(prompts(2))
    with pytest.raises(ValueError, match="no gradient flows through codes"):
        model(**inputs, past_key_values=visual_quant(*masks(model, inputs)))


def test_the_registry_knows_it():
    from mmrl.config.registry import find

    assert find("cache", "compression.visual_quant").target is visual_quant
    assert {"nbits", "rule", "fused"} <= set(find("cache", "compression.visual_quant").options)
    assert set(quantization.Rule.__args__) == {"shrunk", "centred", "quantile", "range", "fitted"}
