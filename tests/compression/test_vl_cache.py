"""`vl_cache`: what the text looks at stays."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from mmrl.compression.caches.vl_cache import allocate, choose, score_tokens, vl_cache
from mmrl.config.schema import ConfigError
from tests.compression import caching
from tests.compression.caching import answers, batch, llava, masks, prompts, read
from tests.vision import mixed


@pytest.fixture(scope="module")
def model():
    return llava()


OPTIONS = {"window": 50, "threshold": 0.01, "pool": 1}


def test_a_token_scores_what_the_text_after_the_image_pays_it():
    # One head, two visual tokens, two words behind them. Keys are unit vectors, queries log-weights: the
    # first word pays 1/2, 1/4, 1/4 to what it sees, the second 1/8, 1/8, 1/2, 1/4.
    keys = torch.eye(4, dtype=torch.float64)[None, None]
    query = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    query[0, 0, 2, :3] = torch.tensor([0.5, 0.25, 0.25]).log()
    query[0, 0, 3] = torch.tensor([0.125, 0.125, 0.5, 0.25]).log()
    visual = torch.tensor([[True, True, False, False]])
    real = torch.ones(1, 4, dtype=torch.bool)
    scores, density = score_tokens(query, keys, visual, real, 1.0, **OPTIONS)
    assert_close(scores[0, 0], torch.tensor([0.625, 0.375, 0.75, 0.25], dtype=torch.float64))
    assert density.tolist() == [1.0]
    # With a threshold of 0.3 of the largest weight, 1/8 of 1/2 does not count: 3 of 3 and 2 of 4 are 5 of 7.
    strict = {**OPTIONS, "threshold": 0.3}
    assert score_tokens(query, keys, visual, real, 1.0, **strict)[1].tolist() == pytest.approx([5 / 7])
    # A window of one token asks the second word only.
    found = score_tokens(query, keys, visual, real, 1.0, **{**OPTIONS, "window": 1})[0]
    assert_close(found[0, 0], torch.tensor([0.125, 0.125, 0.5, 0.25], dtype=torch.float64))


def test_denser_layers_keep_more():
    # Densities 0.1 and 0.3, half of the tokens of two layers: a quarter and three quarters.
    assert_close(allocate(torch.tensor([[0.1], [0.3]]), 0.5), torch.tensor([[0.25], [0.75]]))
    # No share is above 1 or below 0.01.
    assert_close(allocate(torch.tensor([[0.0], [0.3]]), 0.5), torch.tensor([[0.01], [1.0]]))


def test_layers_keep_the_same_share_without_density(model):
    inputs = batch(prompts()[2:3])
    cache = vl_cache(*masks(model, inputs), keep=0.5, layers="uniform")
    read(model, inputs, cache, answers(1, 1))
    kept = [(part.slots >= 0).sum(-1).tolist() for layer in cache.layers for part in layer.shared[0]]
    assert kept == [[[inputs["input_ids"].shape[1] // 2] * 2]] * 2


def test_the_highest_scores_and_the_newest_tokens_stay():
    real = torch.ones(1, 10, dtype=torch.bool)
    scores = torch.tensor([[[9.0, 0, 8, 0, 7, 0, 0, 0, 0, 0]]])
    # Half of ten tokens: a fifth of them is the newest one, four go to the highest; ties to the newer.
    assert choose(scores, real, torch.tensor([0.5]), 0.2).tolist() == [[[0, 2, 4, 8, 9]]]
    # A shorter row has a smaller budget, and padding is never chosen.
    padded = torch.cat([real, torch.tensor([[False] * 6 + [True] * 4])])
    both = choose(scores.expand(2, 1, 10), padded, torch.tensor([0.5, 0.5]), 0.2)
    assert both[1].tolist() == [[8, 9, -1, -1, -1]]


def test_what_keeps_everything_changes_no_logit(model):
    inputs, answer = batch(prompts()), answers(8)
    expected = read(model, inputs, DynamicCache(config=model.config), answer)
    for layers in ("density", "uniform"):
        cache = vl_cache(*masks(model, inputs), keep=1.0, layers=layers)
        assert_close(read(model, inputs, cache, answer), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"keep": 0.5}, {"keep": 0.3, "layers": "uniform", "pool": 3}], ids=str)
def test_eight_ragged_rows_together_are_eight_rows_alone(model, options):
    listed, answer = prompts(), answers(8)
    inputs = batch(listed)
    together = read(model, inputs, vl_cache(*masks(model, inputs), **options), answer)
    for i, one in enumerate(listed):
        alone = batch([one])
        said = read(model, alone, vl_cache(*masks(model, alone), **options), answer[i : i + 1])
        assert_close(together[i : i + 1], said, rtol=0, atol=1e-9)


def test_dropping_is_the_same_as_hiding(model):
    # A full cache whose dropped tokens are masked out, head by head, in one layer's attention.
    inputs = batch(prompts(3))
    cache = vl_cache(*masks(model, inputs), keep=0.4)
    with torch.no_grad():
        full = DynamicCache(config=model.config)
        for held in (cache, full):
            model(**inputs, past_key_values=held)
    held = cache.layers[0]
    query = torch.randn(3, 4, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = inputs["attention_mask"].bool()[:, None, None]
    said = held.attend(query, mask, 0.25)[:, 0]
    part = held.shared[0][0]
    kept = torch.zeros(3, 2, mask.shape[-1] + 1, dtype=torch.bool)
    kept.scatter_(2, part.slots.where(part.slots >= 0, mask.shape[-1]), True)
    seen = (kept[..., :-1] & mask[:, 0]).repeat_interleave(2, 1)[:, :, None]
    keys, values = (x.repeat_interleave(2, 1) for x in (full.layers[0].keys, full.layers[0].values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen, scale=0.25
    )
    assert_close(said, expected[:, :, 0], rtol=0, atol=1e-10)
    assert not torch.equal(kept[..., :-1] & mask[:, 0], mask[:, 0].expand_as(kept[..., :-1]))


def test_bytes_fall_to_what_is_kept(model):
    inputs = batch(prompts()[2:3])
    sizes = []
    for keep in (1.0, 0.25):
        cache = vl_cache(*masks(model, inputs), keep=keep, layers="uniform")
        read(model, inputs, cache, answers(1, 1)[:, :0].new_ones(1, 1))
        sizes.append(sum(part.block.nbytes for layer in cache.layers for part in layer.shared[0]))
    length = inputs["input_ids"].shape[1]
    assert sizes[1] / sizes[0] == (length // 4) / length


def generated(model, inputs, cache, **options):
    with torch.no_grad():
        return model.generate(
            **inputs, past_key_values=cache, max_new_tokens=6, pad_token_id=0, do_sample=False, **options
        )


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_generate_takes_it(model, options):
    inputs = batch(prompts(4))
    whole = vl_cache(*masks(model, inputs), keep=1.0)
    assert torch.equal(
        generated(model, inputs, whole, **options),
        generated(model, inputs, DynamicCache(config=model.config), **options),
    )
    assert generated(model, inputs, vl_cache(*masks(model, inputs), keep=0.2), **options).shape[1] > 6


def test_rows_are_chosen_and_repeated(model):
    inputs, answer = batch(prompts(4)), answers(4, 3)
    make = partial(vl_cache, *masks(model, inputs), keep=0.4)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(answer)], 1)
    more = answers(4, 3, seed=5)
    once = make()
    read(model, inputs, once, answer)
    expected = caching.follow(model, mask, once, more)
    for rows in ([3, 0], [1, 1, 2, 0], [2]):
        cache = make()
        read(model, inputs, cache, answer)
        rows = torch.tensor(rows)
        cache.batch_select_indices(rows)
        assert_close(caching.follow(model, mask[rows], cache, more[rows]), expected[rows], rtol=0, atol=1e-10)


def test_the_engine_rolls_out_with_it(exact):
    policy = exact("qwen2_5_vl")
    asked = mixed.prompts("qwen2_5_vl") * 2
    ids = lambda rows: [row.steps.ids.tolist() for row in rows]
    whole = mixed.generate(policy, asked, cache=partial(vl_cache, keep=1.0))
    assert ids(whole) == ids(mixed.generate(policy, asked))
    half = mixed.generate(policy, asked, cache=partial(vl_cache, keep=0.5))
    alone = mixed.generate(policy, asked, cache=partial(vl_cache, keep=0.5), batch_size=1)
    assert ids(half) == ids(alone) != ids(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.0}, "must be more than 0 and at most 1, not 0.0"),
        ({"keep": 1.1}, "must be more than 0 and at most 1, not 1.1"),
        ({"window": 0}, "must be at least 1, not 0"),
        ({"recent": 2.0}, "must be at least 0 and at most 1, not 2.0"),
    ],
    ids=str,
)
def test_options_out_of_their_range_are_refused(options, message):
    (name,) = options
    with pytest.raises(ConfigError, match=f"'cache.{name}' {message}"):
        caching.check_options("vl_cache", **options)


def test_a_mean_over_neighbours_is_centred(model):
    with pytest.raises(ValueError, match="`pool` of vl_cache must be odd, .* not 2"):
        vl_cache(model.config, None, None, pool=2)
