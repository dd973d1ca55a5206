"""LayerCast, weights in 4 and 8 bits, and linear layers computed in part."""

from __future__ import annotations

import statistics
from functools import partial

import pytest
import torch
from torch import nn

from mmrl.compression.fp32_linear import UpcastLinear
from mmrl.compression.pruning.sliced_linear import feature_index, sliced_linear
from mmrl.compression.transforms.bnb_quantize import bnb_quantize
from mmrl.compression.transforms.layer_cast import layer_cast
from mmrl.compression.transforms.structured_pruning import structured_pruning
from mmrl.compression.transforms.visual_computation import drop_visual_layers, yopo25
from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.inference.saving import load_pruned, save_transformed
from mmrl.runtime.modules import twin
from mmrl.vision.models.loading import load_processor
from mmrl.vision.policies.tokens import Tokens
from tests.compression.pruned_models import folder, llava, llava_inputs, prompts, steps

# ---- parts of linear layers


def test_features_of_neighbours_are_slices():
    assert feature_index((2, 3, 4), 2) == slice(4, 10)
    assert feature_index((0, 2), 3).tolist() == [0, 1, 2, 6, 7, 8]
    assert feature_index((), 4) == slice(0, 0) and feature_index(None) is None


def _adapted(**options):
    from peft import LoraConfig, get_peft_model

    layer = nn.ModuleDict({"a": nn.Linear(6, 8)})
    get_peft_model(layer, LoraConfig(r=2, target_modules=["a"], **options))
    nn.init.normal_(layer["a"].lora_B["default"].weight)
    return layer["a"]


class Odd(nn.Linear):
    """An unknown kind of layer."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(6, 8),
        lambda: nn.Linear(6, 8, bias=False),
        _adapted,
        lambda: _adapted(use_dora=True),
        lambda: Odd(6, 8),
        lambda: UpcastLinear(nn.Linear(6, 8), torch.bfloat16, torch.float32),
    ],
    ids=["plain", "no bias", "lora", "dora", "odd", "upcast"],
)
@pytest.mark.parametrize("rows", [None, slice(2, 5), torch.tensor([7, 0, 3])], ids=str)
@pytest.mark.parametrize("columns", [None, slice(1, 4), torch.tensor([5, 2])], ids=str)
def test_a_narrowed_layer_gives_part_of_what_the_whole_gives(make, rows, columns):
    torch.manual_seed(0)
    linear, x = make(), torch.randn(2, 3, 6)
    kept = torch.zeros(6)
    kept[columns if columns is not None else slice(None)] = 1
    whole = linear(x * kept)
    wanted = whole if rows is None else whole[..., rows]
    given = x if columns is None else x[..., columns]
    assert torch.allclose(sliced_linear(linear, given, rows=rows, columns=columns), wanted, atol=1e-5)


# ---- LayerCast


@torch.no_grad()
def divergence(model, rows, *, length):
    """Compare greedy answers to rows in one batch and one by one (arXiv 2506.09501).

    Returns the "share" of answers that differ, the mean "first" token at which they do, and the mean
    "top1_gap" of the probability of the chosen token up to there.
    """
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    together = torch.stack(model.generate(**rows, **options).logits, 1).double().softmax(-1).max(-1)
    firsts, gaps = [], []
    for row in range(len(rows["input_ids"])):
        alone = model.generate(**{name: value[row : row + 1] for name, value in rows.items()}, **options)
        single = torch.stack(alone.logits, 1)[0].double().softmax(-1).max(-1)
        other = (single.indices != together.indices[row]).nonzero()[:, 0]
        end = int(other[0]) if len(other) else length
        firsts += [end] if len(other) else []
        gaps += (single.values - together.values[row])[: end + 1].abs().tolist()
    return {
        "share": len(firsts) / len(rows["input_ids"]),
        "first": statistics.mean(firsts) if firsts else float("nan"),
        "top1_gap": statistics.mean(gaps),
    }


def test_layer_cast_equals_float32_of_the_rounded_weights():
    model = llava(dtype=torch.float32)
    cast = layer_cast(model)
    inputs = llava_inputs(model)
    with torch.no_grad():
        out = cast(**inputs, use_cache=True)
        assert out.logits.dtype == torch.float32
        assert {layer.keys.dtype for layer in out.past_key_values.layers} == {torch.float32}
        for module in model.model.language_model.layers.modules():
            if type(module) is nn.Linear:
                module.weight.copy_(module.weight.bfloat16())
        assert torch.equal(model(**inputs).logits, out.logits)


def test_gradients_pass_through_the_cast_and_no_wide_weight_is_kept():
    torch.manual_seed(0)
    plain = nn.Linear(5, 7).double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    cast = UpcastLinear(plain, torch.bfloat16, torch.float64)
    kept = []
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        out = cast(x)
    assert kept == [torch.float64, torch.bfloat16]  # the input, and the weight as it is stored
    grads = torch.autograd.grad(out.square().sum(), [x, *cast.parameters()])
    wanted = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    assert torch.allclose(grads[0], wanted[0])
    for grad, right in zip(grads[1:], wanted[1:], strict=True):
        assert grad.dtype == torch.bfloat16 and torch.allclose(grad.double(), right, rtol=1e-2)


def test_answers_of_layer_cast_do_not_depend_on_the_batch():
    model = layer_cast(llava(dtype=torch.float32, hidden_size=64, intermediate_size=128))
    single = llava_inputs(model, rows=1)
    ids = single["input_ids"].repeat(12, 1)
    ids[:, 8:] = torch.randint(20, 200, (12, 8), generator=torch.Generator().manual_seed(5))
    pixels = single["pixel_values"].repeat(12, 1, 1, 1)
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    result = divergence(model, rows, length=16)
    assert result["share"] == 0 and result["top1_gap"] < 1e-4


def test_divergence_finds_the_first_token_that_differs():
    class Speaker:
        """Generates the number of rows in the batch at step 2, and 0 before."""

        def generate(self, input_ids, max_new_tokens, **options):
            steps = [
                torch.eye(5)[[len(input_ids) % 5 if t == 2 else 0] * len(input_ids)]
                for t in range(max_new_tokens)
            ]
            return type("Said", (), {"logits": steps})()

    result = divergence(Speaker(), {"input_ids": torch.zeros(3, 1)}, length=4)
    assert result == {"share": 1.0, "first": 2, "top1_gap": 0.0}


def test_an_adapter_learns_over_layer_cast_and_pruning():
    speaker = Tokens(model=str(folder("llava")), dtype="float32", transform=(layer_cast, yopo25), lora_rank=2)
    table = steps(speaker, prompts("llava"))
    speaker(table).logp.sum().backward()
    learned = {
        name for name, p in speaker.model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0
    }
    assert learned and all("lora_" in name for name in learned)


def test_layer_cast_refuses_inexact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        with pytest.raises(ValueError, match="set torch.backends.cuda.matmul.allow_tf32 = False"):
            layer_cast(llava(dtype=torch.float32))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# ---- low-bit weights


needs_bitsandbytes = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("bitsandbytes"), reason="bitsandbytes is an extra"
)


@needs_bitsandbytes
@pytest.mark.parametrize(("nbits", "low", "high"), [(4, 0.03, 0.2), (8, 0.0005, 0.03)])
def test_low_bit_weights_are_near_the_weights(nbits, low, high):
    model = llava(dtype=torch.float32, hidden_size=64, intermediate_size=128)
    few = bnb_quantize(model, nbits=nbits)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model.model.language_model.layers[0].mlp.up_proj(x)
        error = (few.model.language_model.layers[0].mlp.up_proj(x) - exact).norm() / exact.norm()
    assert low < error < high
    weight = few.model.language_model.layers[0].mlp.up_proj.weight
    assert weight.numel() * weight.element_size() == 64 * 128 * nbits // 8
    assert type(model.model.language_model.layers[0].mlp.up_proj) is nn.Linear


@needs_bitsandbytes
@pytest.mark.parametrize("nbits", [4, 8])
def test_an_adapter_learns_over_low_bit_weights_and_pruning(nbits):
    few = lambda model: bnb_quantize(model, nbits=nbits)
    speaker = Tokens(model=str(folder("llava")), dtype="float32", transform=(few, yopo25), lora_rank=2)
    kind = type(speaker.model.get_decoder().layers[0].mlp.up_proj)
    assert kind.__module__ == "peft.tuners.lora.bnb"
    table = steps(speaker, prompts("llava"))
    before = speaker(table).logp
    for _ in range(2):
        loss = -(speaker(table).logp * table.mask).sum()
        loss.backward()
        with torch.no_grad():
            for parameter in speaker.model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad.clamp(-1, 1)
                    parameter.grad = None
    assert (speaker(table).logp * table.mask).sum() > (before * table.mask).sum()


@needs_bitsandbytes
def test_an_adapter_learns_over_a_checkpoint_of_four_bits(tmp_path):
    from transformers import BitsAndBytesConfig

    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"])
    whole = folder("llava")
    type(llava()).from_pretrained(whole, quantization_config=four).save_pretrained(tmp_path)
    load_processor(str(whole)).save_pretrained(str(tmp_path))
    speaker = Tokens(model=str(tmp_path), dtype="float32", lora_rank=2)
    layer = speaker.model.get_decoder().layers[0].mlp.up_proj
    assert type(layer).__module__ == "peft.tuners.lora.bnb" and layer.weight.dtype == torch.uint8
    assert not layer.base_layer.support_avx512bf16_for_cpu
    table = steps(speaker, prompts("llava"))
    with torch.no_grad():
        speaker(table)  # the first call without gradients is when a processor would repack weights
    speaker(table).logp.sum().backward()
    learned = [p.grad.abs().sum() for name, p in speaker.model.named_parameters() if "lora_B" in name]
    assert learned and min(learned) > 0


@needs_bitsandbytes
@pytest.mark.parametrize(
    "options", [{"nbits": 4}, {"nbits": 4, "kind": "fp4", "double": False}, {"nbits": 8}]
)
def test_low_bit_weights_come_back_bit_for_bit(options, tmp_path):
    model = bnb_quantize(llava(dtype=torch.float32), **options)
    save_transformed(model, tmp_path)
    inputs = llava_inputs(model)
    with torch.no_grad():
        assert torch.equal(load_pruned(tmp_path)(**inputs).logits, model(**inputs).logits)


@needs_bitsandbytes
@pytest.mark.parametrize("nbits", [4, 8])
@pytest.mark.parametrize("called", [False, True])
def test_a_twin_of_a_low_bit_model_leaves_it_as_it_is_and_shares_its_codes(nbits, called):
    model = bnb_quantize(llava(dtype=torch.float32), nbits=nbits)
    inputs = llava_inputs(model)
    with torch.no_grad():
        expected = bnb_quantize(llava(dtype=torch.float32), nbits=nbits)(**inputs).logits
        if called:
            model(**inputs)
        other = twin(model)
        for either in (other, model, twin(model), other):  # the first call of each changes its layers
            assert torch.equal(either(**inputs).logits, expected)
    layers = [m.get_decoder().layers[0].mlp.up_proj for m in (model, other)]
    assert layers[0] is not layers[1] and layers[0].weight is layers[1].weight
    if nbits == 8:
        assert layers[0].state.CB.data_ptr() == layers[1].state.CB.data_ptr()


@needs_bitsandbytes
def test_numbers_of_bits_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="nbits"):
        Pieces(Stream()).check("transform", Piece("compression.bnb_quantize", {"nbits": 3}), "transform")
    with pytest.raises(ValueError, match="apply `bnb_quantize` before adapters and `layer_cast`"):
        bnb_quantize(layer_cast(llava(dtype=torch.float32)))


@pytest.mark.parametrize("change", [layer_cast, bnb_quantize, partial(structured_pruning, ffn_units=0.5)])
def test_what_is_done_to_weights_counts_behind_pruning_as_well(change):
    # The pruned model is bound to its modules; what is made of it must be bound to its own.
    model = llava(dtype=torch.bfloat16 if change is layer_cast else torch.float32)
    inputs = llava_inputs(model)
    late = partial(drop_visual_layers, after=1)
    with torch.no_grad():
        behind, before = change(late(model))(**inputs).logits, late(change(model))(**inputs).logits
        assert torch.equal(behind, before)
        assert not torch.equal(behind, late(model)(**inputs).logits)


def test_an_adapter_that_was_there_before_stays_as_it_is_over_low_bit_weights():
    speaker = Tokens(model=str(folder("llava")), dtype="float32", lora_rank=2)
    few = bnb_quantize(speaker.model, nbits=8)
    mine = dict(speaker.model.named_parameters())
    theirs = dict(few.named_parameters())
    adapters = [name for name in mine if "lora_" in name]
    assert adapters and all(theirs[name] is mine[name] for name in adapters)
    names = {type(m).__name__ for m in few.get_decoder().modules() if "8bit" in type(m).__name__}
    assert names == {"Linear8bitLt"}
