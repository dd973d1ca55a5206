"""Pruned models with quantised, static and token-dropping caches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers

from mmrl.compression.transforms.drop_tokens import fastv, pyramid_drop
from mmrl.compression.transforms.visual_computation import (
    drop_visual_heads,
    drop_visual_layers,
    local_visual_attention,
    sparse_visual_ffn,
    yopo25,
)
from mmrl.config.registry import find
from tests.compression.pruned_models import llava, llava_inputs

CACHED = {
    "local_visual_attention": local_visual_attention,
    "sparse_visual_ffn": sparse_visual_ffn,
    "drop_visual_heads": drop_visual_heads,
    "drop_visual_layers": partial(drop_visual_layers, after=1),
    "fastv": partial(fastv, after=1, keep=0.5),
    "pyramid_drop": partial(pyramid_drop, keep=(0.5, 0.25)),
    "yopo25": yopo25,
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_pruning_and_a_quantised_cache_go_together(name, fused):
    # At 16 bits the cache changes nothing.
    model = CACHED[name](llava(side=3))
    inputs = image_inputs(model)
    logits = []
    for cache in (None, cache_of(model, inputs, nbits=16, fused=fused), cache_of(model, inputs, nbits=1)):
        logits.append(answer(model, inputs, cache))
    assert (logits[0] - logits[1]).abs().max() < 1e-12
    # Text that was left alone would not have noticed.
    assert (logits[0] - logits[2]).abs().max() > 1e-3


def image_inputs(model):
    """Two rows with images of 3 by 3 patches at different places, the second padded on the left."""
    inputs = llava_inputs(model)
    image, rows = model.config.image_token_id, []
    for ids in inputs["input_ids"]:
        at = (ids == image).nonzero()[0, 0]
        rows.append(torch.cat([ids[:at], torch.full((9,), image), ids[at + 4 :]]))
    mask = torch.cat([inputs["attention_mask"][:, :3], torch.ones(2, len(rows[0]) - 3, dtype=torch.int64)], 1)
    pixels = torch.randn(2, 3, 42, 42, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"input_ids": torch.stack(rows), "attention_mask": mask, "pixel_values": pixels}


def cache_of(model, inputs, **options):
    """Make a quantised cache for prompts without their last token, which every answer begins with."""
    visual = inputs["input_ids"][:, :-1] == model.config.image_token_id
    make = find("cache", "compression.visual_quant").target
    return make(model.config, visual, inputs["attention_mask"][:, :-1].bool(), **options)


@torch.no_grad()
def answer(model, inputs, cache):
    """Read prompts once, then three rows that answer them, one token and two: logits (3, 3, V)."""
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1], "pixel_values": inputs["pixel_values"]}
    model(**first, past_key_values=cache)
    which = torch.tensor([1, 0, 1])
    cache.batch_select_indices(which)
    token = torch.cat(
        [ids[which, -1:], torch.tensor([[20], [30], [40]]), torch.tensor([[21], [31], [41]])], 1
    )
    logits = []
    for start, stop in ((0, 1), (1, 3)):
        seen = torch.cat([mask[which, :-1], torch.ones(3, stop, dtype=torch.int64)], 1)
        step = {"input_ids": token[:, start:stop], "attention_mask": seen}
        logits.append(model(**step, past_key_values=cache).logits)
    return torch.cat(logits, 1)


def test_a_quantised_cache_has_fewer_tokens_in_later_layers():
    model = drop_visual_layers(llava(side=3), after=1)
    inputs = image_inputs(model)
    cache = cache_of(model, inputs, nbits=2)
    answer(model, inputs, cache)
    # Prompts of 20 tokens, of which 9 are removed, and 3 tokens of the answer.
    assert [layer.length for layer in cache.layers[:3]] == [23, 14, 14]


def test_caches_that_cannot_follow_are_refused():
    model = drop_visual_layers(llava(), after=1)
    inputs = llava_inputs(model)
    fixed = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="late layers cache fewer tokens than early ones, which StaticLayer"):
        model(**inputs, past_key_values=fixed)
    visual, mask = inputs["input_ids"] == 250, inputs["attention_mask"].bool()
    chosen = find("cache", "compression.vl_cache").target(model.config, visual, mask)
    message = "`vl_cache`. does not fit a model whose visual tokens"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(**inputs, past_key_values=chosen)
