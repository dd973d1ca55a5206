"""Operations, bytes and seconds, counted and by formula."""

from __future__ import annotations

import pytest
import torch

from benchmarks.prefill_costs import Prefill, count_operations, time_calls
from mmrl.compression.fidelity import cache_bytes
from mmrl.compression.fp32_linear import UpcastLinear
from mmrl.compression.pruning.local_attention import block_keys
from mmrl.compression.pruning.spec import ModelShape, PruningSpec, TokenReduction, pruning_of, shape_of
from mmrl.compression.transforms.drop_tokens import tome
from mmrl.compression.transforms.layer_cast import layer_cast
from mmrl.compression.transforms.visual_computation import (
    drop_visual_heads,
    drop_visual_layers,
    local_visual_attention,
    shortv,
    sparse_visual_ffn,
    yopo12,
    yopo25,
)
from tests.compression.pruned_models import llava

SEVEN = ModelShape(layers=32, heads=32, kv_heads=32, head_dim=128, width=4096, inner=11008)
THIRTEEN = ModelShape(layers=40, heads=40, kv_heads=40, head_dim=128, width=5120, inner=13824)
PICTURE = Prefill(text=64, before=35, rasters=((24, 24),))


@pytest.mark.parametrize(("shape", "wanted"), [(SEVEN, 7.63), (THIRTEEN, 14.89)])
def test_the_formula_gives_the_figures_of_the_paper(shape, wanted):
    # arXiv 2410.06169, main table: LLaVA-1.5, 576 visual tokens, in 1e12 operations.
    assert PICTURE.visual_operations(shape, PruningSpec()) / 1e12 == pytest.approx(wanted, abs=5e-3)


def test_a_window_of_five_sees_22_6_neighbours():
    # Along 24 cells a window of 5 holds 5 * 24 - 2 * (2 + 1) = 114 pairs: (114 / 24)^2 = 22.5625.
    assert PICTURE.mean_keys(PruningSpec(radius=2), 576) == pytest.approx(22.5625)
    assert PICTURE.mean_keys(PruningSpec(), 576) == 576


@pytest.mark.parametrize(("share", "wanted"), [(2, 0.2446), (4, 0.1223)])
def test_presets_leave_a_quarter_and_an_eighth(share, wanted):
    # Half of the layers; of projections 32.4 %, of ffn_units 65.3 %, divided by `share`; hardly any
    # attention.
    left = PruningSpec(
        radius=2,
        heads=(tuple(range(32 // share)),) * 32,
        ffn_units=(tuple(range(11008 // share)),) * 32,
        reductions=(TokenReduction(16),),
    )
    ratio = PICTURE.visual_operations(SEVEN, left) / PICTURE.visual_operations(SEVEN, PruningSpec())
    assert ratio == pytest.approx(wanted, abs=2e-3)


def test_blocks_of_a_window_hold_few_keys():
    # 24 rows in blocks of 4 (96 queries); two rows above: 6 rows of keys. Later neighbours add two below.
    assert block_keys(24, 24, 2, True) == (6, 96, 144)
    assert block_keys(24, 24, 2, False) == (6, 96, 192)
    assert block_keys(2, 2, 9, True) == (1, 4, 6)


CASES = {
    "full": lambda m: m,
    "window": lambda m: local_visual_attention(m, radius=1),
    "wide window": lambda m: local_visual_attention(m, radius=2, causal=False),
    "heads": lambda m: drop_visual_heads(m, heads=((0, 1), (1, 2), ())),
    "ffn_units": lambda m: sparse_visual_ffn(m, keep=0.25),
    "layers": lambda m: drop_visual_layers(m, after=2),
    "frozen": lambda m: shortv(drop_visual_heads(m, keep=0.5), layers=(0, 2)),
    "yopo25": yopo25,
    "yopo12": yopo12,
    "merged": lambda m: tome(m, keep=0.5, before=1),
    "merged and window": lambda m: tome(local_visual_attention(m, radius=1), keep=0.5, before=1),
}


def picture(text=10):
    """One row: a image of 7 by 7 patches behind three words."""
    ids = torch.randint(20, 200, (1, 49 + text), generator=torch.Generator().manual_seed(0))
    ids[:, 3:52] = 250
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 98, 98)}


@pytest.mark.parametrize("name", CASES)
def test_the_formula_equals_what_hooks_count(name):
    model = CASES[name](llava(side=7, dtype=torch.float32))
    theory = Prefill(10, 3, ((7, 7),), kept=(24,))
    counted = count_operations(model, picture())
    # Merging 49 tokens into 24 compares 25 with 24, and of the 25 that are left 13 with 12, each 32 wide.
    choosing = 2 * 32 * (25 * 24 + 13 * 12) if "merged" in name else 0
    assert counted["language"] - choosing == theory.operations(shape_of(model), pruning_of(model))
    assert counted["head"] == 2 * 32 * 256 * 59
    if name == "yopo12":
        assert count_operations(CASES["full"](llava(side=7)), picture())["language"] > 2 * counted["language"]


@pytest.mark.parametrize("name", ["full", "layers", "yopo12", "merged"])
def test_the_cache_holds_the_bytes_of_the_formula(name):
    model = CASES[name](llava(side=7, dtype=torch.float32))
    with torch.no_grad():
        cache = model(**picture(), use_cache=True).past_key_values
    theory = Prefill(10, 3, ((7, 7),), kept=(24,))
    held = sum(t.numel() * 4 for layer in cache.layers[:3] for t in (layer.keys, layer.values))
    assert held == theory.cache_bytes(shape_of(model), pruning_of(model), 4)
    assert cache_bytes(cache) >= held


def test_calls_are_timed_in_turns_and_the_first_turn_is_left_out():
    order = []
    found = time_calls({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2)
    assert order == ["a", "b"] * 3
    assert all(one.median >= 0 and one.spread >= 0 for one in found.values())


def weight_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of the parameters and buffers of a model, shared storages once."""
    storages = (tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_tied_and_shared_weights_are_counted_once():
    model = llava(dtype=torch.float32)
    assert weight_bytes(yopo12(model)) == weight_bytes(model)
    assert weight_bytes(torch.nn.ModuleList([model, yopo12(model)])) == weight_bytes(model)


def test_layer_cast_holds_the_bytes_of_its_formula():
    model = llava(dtype=torch.float32)
    cast = layer_cast(model)
    # Of every layer 32 * (32 + 16 + 16 + 32) weights of attention and 3 * 32 * 64 of ffn_units, three layers.
    linear = 3 * (32 * 96 + 3 * 32 * 64)
    assert weight_bytes(model) - weight_bytes(cast) == 2 * linear
    # The peak adds the largest of them in float32, for a moment.
    assert max(m.weight.numel() for m in cast.modules() if type(m) is UpcastLinear) == 32 * 64
