"""`binary_codebook`: prompts, or their visual tokens, as sums of vectors."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from mmrl.compression.caches.binary_codebook import binary_codebook
from mmrl.compression.contrib.codebook_calibration import calibrate_codebooks, read_codebooks, write_codebooks
from mmrl.config.registry import find
from mmrl.config.schema import ConfigError
from tests.compression import caching
from tests.compression.caching import answers, batch, llava, masks, prompts, read
from tests.vision import mixed

PATHS = pytest.mark.parametrize("fused", [True, False])


@pytest.fixture(scope="module")
def model():
    return llava()


@pytest.fixture(scope="module")
def codebook(model, tmp_path_factory):
    """Fit codebooks on the tiny model's own prompts."""
    path = tmp_path_factory.mktemp("codebook") / "codebook.safetensors"
    asked = [one for i, one in enumerate(prompts()) if i not in (1, 6)]
    write_codebooks(made(model, asked, nbits=1.0, value_nbits=1.5), path)
    return str(path)


def made(model, asked, **options):
    draw = torch.Generator().manual_seed(0)
    return calibrate_codebooks(model, asked, num_tokens=4, generator=draw, **{"first": 0, **options})


def lend(options: dict, codebook: str) -> dict:
    return {**options, "codebook": codebook} if options.get("codebook") else options


OPTIONS = [
    {"nbits": 1},
    {"nbits": 1.5, "value_nbits": 0.75, "first": 2, "newest": 3},
    {"nbits": 4, "of": "visual", "first": 0},
    {"nbits": 16, "value_nbits": 1},
    {"of": "visual", "codebook": "given", "first": 0},
]


@PATHS
@pytest.mark.parametrize("of", ["prompt", "visual"])
def test_at_full_precision_no_logit_changes(model, fused, of):
    inputs, answer = batch(prompts()), answers(8)
    cache = binary_codebook(*masks(model, inputs), nbits=16, of=of, fused=fused)
    expected = read(model, inputs, DynamicCache(config=model.config), answer)
    assert_close(read(model, inputs, cache, answer), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_paths_say_the_same(model, codebook, options):
    inputs, answer = batch(prompts()), answers(8)
    said = [
        read(
            model,
            inputs,
            binary_codebook(*masks(model, inputs), fused=fused, **lend(options, codebook)),
            answer,
        )
        for fused in (True, False)
    ]
    assert_close(*said, rtol=0, atol=1e-10)
    full = read(model, inputs, DynamicCache(config=model.config), answer)
    assert (said[0] - full).abs().max() > 1e-3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ragged_rows_together_are_rows_alone(model, codebook, options):
    listed, answer = prompts(4), answers(4)
    inputs = batch(listed)
    together = read(model, inputs, binary_codebook(*masks(model, inputs), **lend(options, codebook)), answer)
    for i, one in enumerate(listed):
        alone = batch([one])
        said = read(
            model, alone, binary_codebook(*masks(model, alone), **lend(options, codebook)), answer[i : i + 1]
        )
        assert_close(together[i : i + 1], said, rtol=0, atol=1e-9)


def test_more_bits_are_nearer_to_the_full_cache(model):
    inputs, answer = batch(prompts()), answers(8)
    expected = read(model, inputs, DynamicCache(config=model.config), answer)
    gaps = [
        (read(model, inputs, binary_codebook(*masks(model, inputs), nbits=nbits), answer) - expected)
        .square()
        .mean()
        .item()
        for nbits in (8, 4, 2, 0.5)
    ]
    assert gaps == sorted(gaps) and gaps[0] < 0.01 < gaps[3]


def test_what_stays_is_exact_and_short_rows_stay_whole():
    config = llava().config
    keys = torch.randn(2, 2, 40, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, :21] = False
    cache = binary_codebook(config, None, real, nbits=1, first=2, newest=3, fused=False)
    for layer in range(2):
        cache.update(keys, keys, layer)
    new = torch.zeros(2, 2, 1, 16, dtype=torch.float64)
    found = cache.update(new, new, 0)[0][:, :, :40]
    same = (found == keys).all(-1)[:, 0]
    # Row 0: 2 first and 3 newest of 40. Row 1: 19 tokens, 14 to be coded, fewer than 16 channels: all stay.
    assert same[0].nonzero()[:, 0].tolist() == [0, 1, 37, 38, 39]
    assert same[1, 21:].all()


def test_bytes_shrink_as_the_formula_says():
    config = llava().config
    real = torch.ones(1, 1028, dtype=torch.bool)
    cache = binary_codebook(config, None, real, nbits=1.5, value_nbits=0.5, first=4)
    x = torch.randn(1, 2, 1028, 16, dtype=torch.float64)
    for layer in range(2):
        cache.update(x, x, layer)
    # Two layers of two heads: 24 and 8 vectors of 16 bytes with two scales of 8, a low of 16 numbers each,
    # 4 bytes a token, 4 exact tokens; slots of 1024 coded and 4 exact ones, which layers share.
    codebooks = (24 + 8) * (16 + 16) + 2 * 16 * 8
    assert cache.nbytes == 2 * 2 * (codebooks + 1024 * 4 + 2 * 4 * 16 * 8) + 1028 * 8


@PATHS
def test_rows_are_chosen_and_repeated(model, codebook, fused):
    inputs = batch(prompts(4))
    answer, more = answers(4, 3), answers(4, 3, seed=5)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(answer)], 1)
    for options in ({"nbits": 1}, {"of": "visual", "codebook": codebook}):
        once = binary_codebook(*masks(model, inputs), fused=fused, **options)
        read(model, inputs, once, answer)
        behind = caching.follow(model, mask, copy.deepcopy(once), more)
        for rows in ([2, 0], [3, 3, 1], [0, 0, 1, 1, 2, 2, 3, 3]):
            cache, rows = copy.deepcopy(once), torch.tensor(rows)
            cache.batch_select_indices(rows)
            assert_close(
                caching.follow(model, mask[rows], cache, more[rows]), behind[rows], rtol=0, atol=1e-10
            )
            cache = copy.deepcopy(once)
            cache.batch_select_indices(rows)
            cache.reorder_cache(torch.tensor([len(rows) - 1]))
            last = rows[-1:]
            assert_close(
                caching.follow(model, mask[last], cache, more[last]), behind[last], rtol=0, atol=1e-10
            )


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str
)
def test_generate_takes_it(model, options):
    inputs = batch(prompts(4))

    def generated(cache):
        torch.manual_seed(0)
        call = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **options}
        with torch.no_grad():
            return model.generate(**inputs, past_key_values=cache, **call)

    make = partial(binary_codebook, *masks(model, inputs))
    assert torch.equal(generated(make(nbits=16)), generated(DynamicCache(config=model.config)))
    assert torch.equal(generated(make(nbits=1)), generated(make(nbits=1, fused=False)))


def test_the_engine_rolls_out_with_it(exact):
    policy = exact("qwen2_5_vl")
    asked = mixed.prompts("qwen2_5_vl")
    options = {"nbits": 1, "of": "visual"}
    together = mixed.generate(policy, asked, cache=partial(binary_codebook, **options))
    alone = mixed.generate(policy, asked, cache=partial(binary_codebook, **options), batch_size=1)
    assert [row.steps.ids.tolist() for row in together] == [row.steps.ids.tolist() for row in alone]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbits": 0}, "`nbits` must be above 0 and at most 8, or 16, not 0"),
        ({"value_nbits": 9}, "`value_nbits` must be above 0 and at most 8, or 16, not 9"),
        ({"of": "visual"}, "`of: visual` needs `visual`"),
        ({"codebook": "x", "nbits": 1}, "the codebook 'x' fixes the number of bits"),
        ({"codebook": "nowhere"}, "cannot read the codebook 'nowhere'"),
    ],
)
def test_options_that_do_not_fit_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        binary_codebook(model.config, None, None, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": "text"}, "'cache.of' must be one of 'prompt', 'visual', not 'text'"),
        ({"first": -1}, "'cache.first' must be at least 0, not -1"),
    ],
)
def test_options_out_of_their_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        caching.check_options("binary_codebook", **options)


# ---- codebooks that are fitted once


def test_a_book_is_of_the_model_that_it_was_fitted_for(model, codebook):
    assert len(read_codebooks(codebook, 2)) == 2
    with pytest.raises(ValueError, match="is for 2 layers, but the model has 1"):
        binary_codebook(*masks(llava(layers=1), batch(prompts(2))), of="visual", codebook=codebook)
    other, inputs = llava(size=8), batch(prompts(2))
    with pytest.raises(ValueError, match="fitted for 2 heads of 16 channels, but the model has 2 of 8"):
        read(
            other, inputs, binary_codebook(*masks(other, inputs), of="visual", codebook=codebook), answers(2)
        )


def test_a_metric_is_the_second_moment_of_the_gradient_of_the_lead(model):
    asked = prompts(1)
    found = made(model, asked)
    ids = asked[0]["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], pixel_values=asked[0]["pixel_values"], past_key_values=cache)
    read = [[x.detach().requires_grad_() for x in (one.keys, one.values)] for one in cache.layers]
    # Greedy by hand, four tokens behind the last one of the prompt.
    answer = ids[:, -1:]
    for _ in range(4):
        kept = DynamicCache(config=model.config)
        for layer, pair in enumerate(read):
            kept.update(*pair, layer)
        said = model(input_ids=answer, past_key_values=kept).logits[0].float()
        answer = torch.cat([ids[:, -1:], said.argmax(-1)[None]], 1)
    signs = 2.0 * torch.randint(2, (4,), generator=torch.Generator().manual_seed(0)) - 1
    ordered = said.sort(-1, descending=True).values
    lead = ((ordered[:, 0] - ordered[:, 1]) * signs).sum()
    slopes = torch.autograd.grad(lead, [x for one in read for x in one])
    visual = (ids[0, :-1] == caching.PICTURE).nonzero()[:, 0]
    for at, side in ((0, "keys"), (1, "values")):
        slope = slopes[at][0, :, visual].float()
        moment = slope.mT @ slope
        size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        assert_close(found[f"{side}.metric"][0], moment / size + 0.003 * torch.eye(16), rtol=1e-4, atol=1e-5)


def test_how_sure_a_model_is_does_not_change_what_errors_cost(model):
    asked = prompts(1)
    plain = made(model, asked)
    sure = copy.deepcopy(model)
    with torch.no_grad():
        sure.get_output_embeddings().weight *= 1000  # the same answers, certain to the last digit
    found = made(sure, asked)
    for side in ("keys", "values"):
        assert_close(found[f"{side}.metric"], plain[f"{side}.metric"], rtol=1e-3, atol=1e-4)


def test_a_book_of_text_serves_a_model_of_text():
    import transformers as t

    config = t.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=64,
        eos_token_id=5,
    )
    text = t.LlamaForCausalLM(config).eval()
    asked = [{"input_ids": torch.arange(6, 46)[None]}]
    codebooks = made(text, asked, of="prompt")
    assert {name: tuple(x.shape) for name, x in codebooks.items() if name.startswith("keys")} == {
        "keys.mean": (1, 2, 1, 16),
        "keys.vectors": (1, 2, 16, 16),
        "keys.metric": (1, 2, 16, 16),
    }
    with pytest.raises(ValueError, match="no prompt to fit codebooks on"):
        calibrate_codebooks(text, [])


def test_the_registry_knows_it():
    assert find("cache", "compression.binary_codebook").target is binary_codebook
    assert {"nbits", "of", "codebook"} <= set(find("cache", "compression.binary_codebook").options)
