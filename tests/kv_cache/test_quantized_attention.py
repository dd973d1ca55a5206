"""The fused path: products with codes, in torch and in Triton, and how a model's attention learns to read
them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.kv_cache import packed_matmul, quantization
from mmrl.kv_cache.attention_interface import attend, install
from mmrl.kv_cache.blocks import CodedBlock, ExactBlock, collect, spread
from mmrl.kv_cache.layout import PromptLayout
from mmrl.kv_cache.row_groups import group_slots
from tests.compression import caching
from tests.compression.caching import answers, batch, llava, masks, prompts

ROOT = Path(__file__).parents[2]


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("nbits", quantization.BITS)
@pytest.mark.parametrize(("tokens", "queries"), [(7, 3), (300, 1), (300, 6), (5000, 2)])
def test_products_with_codes_are_those_with_their_numbers(nbits, tokens, queries):
    # Short blocks are multiplied together, long ones one by one.
    size = 24
    codes = torch.randint(0, 2**nbits, (3, tokens, size), generator=torch.Generator().manual_seed(1))
    packed = quantization.pack(codes, nbits)
    query, weights = numbers(3, queries, size), numbers(3, queries, tokens)
    assert_close(packed_matmul.dots(query, packed, nbits), query @ codes.double().transpose(1, 2))
    assert_close(packed_matmul.mix(weights, packed, nbits, size), weights @ codes.double())


@pytest.mark.parametrize("nbits", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 6])
def test_products_of_bytes_are_those_of_numbers(nbits, queries):
    if not packed_matmul.multiplies_bytes():
        pytest.skip("this processor does not multiply matrices of bytes")
    codes = torch.randint(0, 2**nbits, (3, 300, 24), generator=torch.Generator().manual_seed(1))
    packed, exact = quantization.pack(codes, nbits), codes.double()
    query, weights = numbers(3, queries, 24), numbers(3, queries, 300, seed=1).softmax(-1)
    query[0, 0] = 0
    # The largest query becomes 2^22 or more: of each of 24 products at most a 2^22th of it is lost.
    lost = 24 * (2**nbits - 1) * float(query.abs().max()) / 2**22
    found = packed_matmul.dots(query.float(), packed, nbits)
    assert_close(found.double(), query @ exact.transpose(1, 2), rtol=1e-6, atol=lost / 4)
    found = packed_matmul.mix(weights.float(), packed, nbits, 24)
    assert_close(found.double(), weights @ exact, rtol=3e-6, atol=0)


def test_small_weights_do_not_shrink_together():
    # 4095 weights of some units of the last digit: cutting each off would lose half a unit of 5e-7,
    # 1e-3 in all; rounding loses as much as it adds.
    small = torch.rand(4095, generator=torch.Generator().manual_seed(1)) * 8 / 128**3
    weights = torch.cat([torch.ones(1), small])[None, None]
    found = packed_matmul.mix(weights, quantization.pack(torch.ones(1, 4096, 8), 1), 1, 8)
    assert_close(found, weights.sum().expand(1, 1, 8), rtol=5e-5, atol=0)


@pytest.mark.parametrize("queries", [1, 3, 20])
def test_processors_without_products_of_bytes_or_onednn_say_the_same(monkeypatch, queries):
    codes = torch.randint(0, 2, (2, 1500, 64), generator=torch.Generator().manual_seed(1))
    query, weights = numbers(2, queries, 64).float(), numbers(2, queries, 1500).float()
    packed, exact = quantization.pack(codes, 1), codes.float()
    for place, name in ((packed_matmul, "multiplies_bytes"), (packed_matmul.onednn, "there")):
        assert_close(
            packed_matmul.dots(query, packed, 1), query @ exact.transpose(1, 2), rtol=1e-4, atol=1e-3
        )
        assert_close(packed_matmul.mix(weights, packed, 1, 64), weights @ exact, rtol=1e-4, atol=1e-3)
        monkeypatch.setattr(place, name, lambda: False)
    assert_close(packed_matmul.dots(query, packed, 1), query @ exact.transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_codes_are_written_in_pieces_where_they_are_many(monkeypatch):
    monkeypatch.setattr(packed_matmul, "MAX_CODES", 3 * 300 * 16)
    monkeypatch.setattr(packed_matmul, "MAX_FLOATS", 100 * 16)
    codes = torch.randint(0, 2, (7, 300, 16), generator=torch.Generator().manual_seed(1))
    packed, exact = quantization.pack(codes, 1), codes.double()
    for dtype in (torch.float64, torch.float32):
        query, weights = numbers(7, 2, 16).to(dtype), numbers(7, 2, 300).to(dtype)
        base = numbers(7, 2, 1).to(dtype)
        expected = (query.double() @ exact.transpose(1, 2) + base.double()).to(dtype)
        assert_close(packed_matmul.dots(query, packed, 1, base), expected, rtol=1e-5, atol=2e-4)
        expected = (weights.double() @ exact).to(dtype)
        assert_close(packed_matmul.mix(weights, packed, 1, 16), expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("channels", "nbits"), [(0, 2), (4, 2), (1, 8)])  # a group fills whole bytes
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_coded_block_is_its_dense_tokens(rotated, channels, nbits, groups):
    # Post-scaling: scales folded into the query and behind the sum give what dequantizing first gives.
    x = numbers(2, 3, groups, 10, 8)
    block = CodedBlock(quantization.quantize(x, nbits, channels=channels), rotated)
    dense = block.dense()
    plain = quantization.dequantize(block.codes).flatten(2, 3)
    assert_close(dense, plain @ quantization.rotation(8, x.dtype, x.device) if rotated else plain)
    assert dense.shape == (2, 3, 10 * groups, 8)
    weights = numbers(2, 3, 5, 10 * groups, seed=1)
    assert_close(block.mix(weights), weights @ dense)
    if not channels:
        query = numbers(2, 3, 5, 8, seed=2)
        assert_close(block.dots(query), query @ dense.transpose(-1, -2))
    rows = torch.tensor([1, 1, 0])
    assert_close(block.select(rows).dense(), dense[rows])
    assert block.select(rows).nbytes == block.nbytes * 3 // 2


def test_tokens_are_collected_from_their_slots_and_spread_again():
    x = numbers(2, 3, 5, 4)
    slots = torch.tensor([[4, 0, -1], [2, 1, 3]])
    found = collect(x, slots)
    assert torch.equal(found[0, :, 0], x[0, :, 4])
    assert not found[0, :, 2].any()
    back = spread(found, slots, 5)
    assert torch.equal(back[1, :, 1:4], x[1, :, 1:4])
    assert not back[0, :, 1:4].any()
    assert not back[1, :, 0].any()
    heads = torch.stack([slots, slots.flip(1), slots], 1)
    assert_close(spread(collect(x, heads), heads, 5)[0, 1, 4], x[0, 1, 4])


def test_slots_of_groups():
    # The second row's flags 1 1 0 1 1 in groups 0 0 . 1 1; the first row has one token of group 1.
    flags = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 0, 1, 1]]).bool()
    group = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    assert group_slots(flags, group).tolist() == [[[-1, -1], [2, -1]], [[0, 1], [3, 4]]]
    assert group_slots(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3)).shape == (2, 0, 0)


def test_rows_of_one_prompt_are_queries_of_one_row():
    layout = PromptLayout(None, torch.ones(3, 5))
    layout.begin(3, 5, torch.device("cpu"))
    x = numbers(3, 2, 4, 6)
    assert layout.groups.fold(x) is x
    layout.select(torch.tensor([2, 0, 2, 1, 2]))
    x = numbers(5, 2, 4, 6)
    folded = layout.groups.fold(x)
    assert folded.shape == (3, 2, 12, 6)  # the largest group has three rows
    assert_close(layout.groups.unfold(folded), x)
    # Prompt 1 is not read any more: two are left.
    assert layout.select(torch.tensor([0, 1])).tolist() == [0, 2]
    assert layout.groups.owner.tolist() == [1, 0]


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_a_model_that_learned_to_read_codes_says_the_same(base):
    import copy

    model = copy.deepcopy(llava())
    text = model.config.text_config
    text._attn_implementation = base
    # One row: transformers' eager attention makes no numbers of padded float64 queries.
    inputs, answer = batch(prompts(3)[2:]), answers(1)
    with torch.no_grad():
        before = model(**inputs).logits
        install(model.config)
        install(model.config)
        assert text._attn_implementation == f"mmrl_{base}"
        assert torch.equal(model(**inputs).logits, before)
    full = caching.read(model, inputs, DynamicCache(config=model.config), answer)
    said = caching.read(model, inputs, visual_quant(*masks(model, inputs), nbits=16), answer)
    # Eager attention takes its softmax in float32.
    assert_close(said, full, rtol=0, atol=1e-10 if base == "sdpa" else 1e-5)


def test_gradients_flow_as_before():
    model = llava()
    inputs = batch(prompts(2))
    install(model.config)
    (gradient,) = torch.autograd.grad(model(**inputs).logits.sum(), model.lm_head.weight)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


def test_attention_that_codes_do_not_go_with_is_named():
    import transformers as t

    config = t.LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="work with the attention 'sdpa or eager', not 'flex_attention'"):
        install(config)


@pytest.mark.parametrize("form", ["bool", "added", "none"])
def test_masks_of_every_form_are_understood(form):
    # Two rows of six slots, of which two are visual; the newest two tokens ask.
    real = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool() if form != "none" else torch.ones(2, 4).bool()
    visual = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]]).bool()
    import transformers as t

    config = t.LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    cache = visual_quant(config, visual, real, nbits=16)
    keys, values = numbers(2, 2, 6, 8), numbers(2, 2, 6, 8, seed=1)
    cache.update(keys[:, :, :4], values[:, :, :4], 0)
    held, same = cache.update(keys[:, :, 4:], values[:, :, 4:], 0)
    assert held is same
    query = numbers(2, 4, 2, 8, seed=2)
    causal = torch.ones(6, 6).tril()[4:].bool()
    seen = causal & torch.cat([real, torch.ones(2, 2).bool()], 1)[:, None, None]
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    mask = {"bool": seen, "added": added, "none": None}[form]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), attn_mask=seen, scale=0.3
    )
    assert_close(held.attend(query, mask, 0.3), expected.transpose(1, 2))


def test_low_precision_is_answered_in_kind():
    import transformers as t

    config = t.LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    cache = visual_quant(config, torch.ones(1, 64).bool(), None, nbits=2)
    keys = numbers(1, 2, 65, 8).bfloat16()
    cache.update(keys[:, :, :64], keys[:, :, :64], 0)
    held, _ = cache.update(keys[:, :, 64:], keys[:, :, 64:], 0)
    query = numbers(1, 4, 1, 8, seed=1).bfloat16()
    said = held.attend(query, None, 0.3)
    dense = [x.repeat_interleave(2, 1) for x in held.dense()]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *dense, scale=0.3)
    assert said.dtype == torch.bfloat16
    assert_close(said, expected.transpose(1, 2), rtol=0.03, atol=0.03)
    assert held.shared[0][1].block.codes.packed.dtype == torch.uint8


class Counted(TorchDispatchMode):
    """Counts what torch is called for."""

    num = 0

    def __torch_dispatch__(self, function, kinds, given=(), named=None):
        self.num += 1
        return function(*given, **(named or {}))


@pytest.mark.parametrize(("nbits", "rows", "most"), [(1, 1, 130), (1, 3, 160), (16, 1, 46)])
def test_a_decode_step_takes_few_calls(nbits, rows, most):
    # 4 layers of 2 key-value heads, 300 visual tokens behind two words. Calls are what a small step takes
    # its time for, and unlike seconds they do not depend on the machine's load.
    import transformers as t

    config = t.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
    visual = torch.ones(1, 302).bool()
    visual[:, :2] = False
    cache = visual_quant(config, visual, None, nbits=nbits)
    keys, query = numbers(rows, 2, 302, 16).float(), numbers(rows, 4, 1, 16).float()
    for layer in range(4):
        cache.update(keys[:1], keys[:1], layer)
    cache.batch_select_indices(torch.zeros(rows, dtype=torch.int64))
    for _ in range(2):
        with Counted() as counted:
            for layer in range(4):
                held, _ = cache.update(keys[:, :, :1], keys[:, :, :1], layer)
                held.attend(query, None, 0.25)
    assert counted.num / 4 <= most


def test_what_is_hidden_is_found_once_a_step_and_anew_where_rows_or_slots_moved():
    import transformers as t

    config = t.LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    visual = torch.tensor([[0, 0, 0, 1], [1, 1, 0, 0]]).bool()
    cache = visual_quant(config, visual, real, nbits=16)
    keys = numbers(2, 2, 4, 8)
    for layer in range(2):
        cache.update(keys, keys, layer)
    layout = cache.layers[0].layout

    def look(rows):
        found = []
        for layer in range(2):
            new = keys[:rows, :, :1] if rows <= 2 else keys[[0, 1, 0], :, :1]
            held, _ = cache.update(new, new, layer)
            found.append(layout.hidden(held.parts()[0], None, 1, held.length, (2, 2)))
        assert found[0] is found[1]
        return found[0]

    # Text of 1 and of 2 tokens, visual ones alike: the first row's second places are empty.
    assert look(2)[:, 0, 0].tolist() == [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    again = look(3)  # two rows of the second prompt are queries of one, with an empty row behind the first's
    assert again.shape == (2, 1, 4, 6)
    assert again[0, 0, 0].tolist() == [0, 1, 0, 1, 0, 0]
    assert not again[1].any()
    cache.batch_select_indices(torch.tensor([0]))
    assert look(1) is None


def test_reading_tensors_is_what_the_model_did():
    module = llava().get_decoder().layers[0].self_attn
    query, keys = numbers(1, 4, 3, 16), numbers(1, 2, 3, 16)
    said, _ = attend("sdpa", module, query, keys, keys, None, scaling=0.25, dropout=0.0)
    dense = keys.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, dense, dense, scale=0.25, is_causal=True
    )
    assert_close(said, expected.transpose(1, 2))


def test_blocks_of_exact_tokens():
    x, query = numbers(2, 3, 5, 4), numbers(2, 3, 2, 4)
    assert_close(ExactBlock(x).dots(query), query @ x.transpose(-1, -2))
    assert ExactBlock(x).nbytes == 2 * 3 * 5 * 4 * 8


INTERPRETED = """
import json, torch
from mmrl.kv_cache import quantization
from mmrl.kv_cache import triton_kernels as kernels
kernels.SPLIT = 256
worst = {}
for nbits in quantization.BITS:
    for blocks, queries, tokens, size in ((2, 3, 130, 8), (1, 17, 300, 40)):
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(blocks, queries, size, generator=generator)
        weights = torch.rand(blocks, queries, tokens, generator=generator)
        codes = torch.randint(0, 2**nbits, (blocks, tokens, size), generator=generator)
        packed = quantization.pack(codes, nbits)
        for name, said, expected in (
            ("dots", kernels.dots(query, packed, nbits), query @ codes.float().transpose(1, 2)),
            ("mix", kernels.mix(weights, packed, nbits, size), weights @ codes.float()),
        ):
            gap = float(((said - expected).abs().max() / expected.abs().max()))
            worst[name] = max(worst.get(name, 0.0), gap)
print(json.dumps(worst))
"""


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mmrl.kv_cache import triton_kernels as kernels
for size in (8, 128):
    for program, first in ((kernels.dots_program, "query"), (kernels.mix_program, "weights")):
        names = program.arg_names
        fixed = {"NBITS": 1, "SIZE": kernels.padded(size), "QUERIES": kernels.MIN_ROWS}
        fixed |= {name: getattr(kernels, name) for name in ("TOKENS", "SPLIT", "DOT") if name in names}
        types = {first: "*fp32", "packed": "*u8", "out": "*fp32"} | dict.fromkeys(fixed, "constexpr")
        signature = {name: types.get(name, "i32") for name in names}
        made = compile(ASTSource(program, signature, fixed), target=GPUTarget("cuda", 90, 32))
        assert "mma.sync" in made.asm["ptx"] and "fma.rn" not in made.asm["ptx"]  # on tensor cores
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_compile_for_tensor_cores():
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_give_the_same_in_the_interpreter():
    # In a process of its own, because Triton reads TRITON_INTERPRET when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worst = json.loads(done.stdout)
    assert set(worst) == {"dots", "mix"}
    assert max(worst.values()) < 1e-5
