"""Pruned visual computation equals the plain model at zero strength, else a masked simulation."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from mmrl.compression.pruning.spec import pruning_of
from mmrl.compression.transforms.drop_tokens import div_prune, fastv, pyramid_drop, tome, vision_zip
from mmrl.compression.transforms.visual_computation import (
    drop_visual_heads,
    drop_visual_layers,
    local_visual_attention,
    shortv,
    sparse_visual_ffn,
    yopo12,
    yopo25,
)
from mmrl.config.binding import Pieces
from mmrl.config.registry import find
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.vision.decoding.packed import read_packed
from mmrl.vision.decoding.token_steps import read_cached
from mmrl.vision.policies.tokens import Tokens
from tests.compression.pruned_models import (
    FAMILIES,
    folder,
    inside,
    llava,
    llava_inputs,
    policy,
    prompts,
    simulate,
    steps,
)  # fmt: skip

ZERO = {
    "local_visual_attention": {"radius": 99},
    "drop_visual_heads": {"keep": 1.0},
    "sparse_visual_ffn": {"keep": 1.0},
    "drop_visual_layers": {"after": 2},
    "shortv": {"layers": ()},
    "fastv": {"after": 1, "keep": 1.0},
    "pyramid_drop": {"keep": (1.0,)},
    "vision_zip": {"dominant": 999, "contextual": 0},
    "div_prune": {"keep": 1.0},
    "tome": {"keep": 1.0},
}
STRONG = (
    {"radius": 0},
    {"radius": 1},
    {"radius": 1, "causal": False},
    {"heads": ((0, 1), (1, 2), ())},
    {"heads": ((0, 3), (0, 1, 2, 3), (2,))},
    {"ffn_units": ((0, 1, 2, 3), (5, 9, 60), tuple(range(30)))},
    {"after": 1},
    {"after": 2},
    {"frozen": (0, 2)},
    {
        "radius": 0,
        "heads": ((0, 1), (3,), (0,)),
        "ffn_units": (tuple(range(9)),) * 3,
        "after": 2,
        "frozen": (1,),
    },
)


def prune_as(model, radius=None, causal=True, heads=None, ffn_units=None, after=None, frozen=None):
    """Apply transforms with the options of the simulation."""
    if radius is not None:
        model = local_visual_attention(model, radius=radius, causal=causal)
    if heads is not None:
        model = drop_visual_heads(model, heads=heads)
    if ffn_units is not None:
        model = sparse_visual_ffn(model, ffn_units=ffn_units)
    if frozen is not None:
        model = shortv(model, layers=frozen)
    return model if after is None else drop_visual_layers(model, after=after)


def text_only(inputs, model):
    """Drop the rows of visual tokens and padding from a comparison."""
    return inputs["attention_mask"].bool() & (inputs["input_ids"] != model.config.image_token_id)


# ---- zero strength


@pytest.mark.parametrize("name", ZERO)
def test_a_transform_at_zero_strength_changes_no_logit(name):
    speaker = policy("llava")
    model = find("transform", f"compression.{name}").target(speaker.model, **ZERO[name])
    table = steps(speaker, prompts("llava")[:2])
    with torch.no_grad():
        for read in (read_cached, read_packed):
            if read is read_packed and name in ("fastv", "pyramid_drop"):
                continue
            gap = read(model.base_model, table.steps) - read(speaker.core, table.steps)
            assert gap[inside(table)].abs().max() < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_logits_at_zero_strength(family):
    speaker = policy(family)
    table = steps(speaker, prompts(family))
    model = drop_visual_layers(
        drop_visual_heads(sparse_visual_ffn(speaker.model, keep=1.0), keep=1.0), after=2
    )
    with torch.no_grad():
        gap = read_cached(model.base_model, table.steps) - read_cached(speaker.core, table.steps)
    assert gap[inside(table)].abs().max() < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_cached_as_it_reads_packed(family):
    speaker = policy(family)
    table = steps(speaker, prompts(family))
    model = yopo25(speaker.model)
    with torch.no_grad():
        cached, packed = (read(model.base_model, table.steps) for read in (read_cached, read_packed))
        full = read_cached(speaker.core, table.steps)
    assert (cached - packed)[inside(table)].abs().max() < 1e-10
    assert (cached - full)[inside(table)].abs().max() > 1e-3
    # The answers to the prompt without media are those of the whole model.
    alone = steps(speaker, prompts(family)[1:2])
    with torch.no_grad():
        gap = read_cached(model.base_model, alone.steps) - read_cached(speaker.core, alone.steps)
    assert gap[inside(alone)].abs().max() < 1e-10


# ---- against the simulation


@pytest.mark.parametrize("options", STRONG, ids=str)
def test_pruned_logits_equal_the_masked_simulation(options):
    model = llava()
    inputs = llava_inputs(model)
    with torch.no_grad():
        gap = prune_as(model, **options)(**inputs).logits - simulate(model, inputs, **options)
    assert gap[text_only(inputs, model)].abs().max() < 1e-9


def test_blocks_of_a_larger_patch_grid_equal_the_window_mask():
    # 7 by 7 patches: two blocks, of which the second is not full.
    model = llava(side=7, num_hidden_layers=2)
    ids = torch.randint(20, 200, (2, 60), generator=torch.Generator().manual_seed(3))
    ids[0, 3:52], ids[1, 8:57] = 250, 250
    pixels = torch.randn(2, 3, 98, 98, dtype=torch.float64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    for radius, causal in ((1, True), (2, False), (9, True)):
        with torch.no_grad():
            out = local_visual_attention(model, radius=radius, causal=causal)(**inputs).logits
            gap = out - simulate(model, inputs, radius=radius, causal=causal, side=7)
        assert gap.abs().max() < 1e-9


@pytest.mark.parametrize("options", STRONG[:1] + STRONG[4:7] + STRONG[9:], ids=str)
def test_gradients_equal_those_of_the_simulation(options):
    model = llava()
    inputs = llava_inputs(model)
    chosen = text_only(inputs, model)
    weight = torch.randn(
        int(chosen.sum()), 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    grads = []
    for run in (
        lambda: prune_as(model, **options)(**inputs).logits,
        lambda: simulate(model, inputs, **options),
    ):
        model.zero_grad()
        (run()[chosen] * weight).sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, grad in grads[1].items():
        # Root mean square normalisation is done in float32 by transformers, forwards and backwards.
        assert torch.allclose(grads[0].get(name, torch.zeros_like(grad)), grad, rtol=1e-4, atol=1e-4), name


def test_dropped_heads_get_no_gradient_from_visual_rows():
    model = llava()
    view = drop_visual_heads(model, heads=((0, 1),) * 3)  # the second group of two query heads is dropped
    inputs = llava_inputs(model, rows=1)
    view(**inputs).logits[:, 2:6].pow(2).sum().backward()  # the loss reads visual rows only
    grad = model.model.language_model.layers[2].self_attn.q_proj.weight.grad
    assert grad[:16].abs().max() > 0
    assert grad[16:].abs().max() == 0


# ---- generation


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_a_cache_equals_generation_without(beams):
    model = prune_as(llava(), **STRONG[9])
    inputs = llava_inputs(model)
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams}
    with torch.no_grad():
        cached, plain = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beams", [1, 2])
def test_every_family_generates_through_transformers(family, beams):
    speaker = policy(family)
    model, parts = (
        yopo25(speaker.model),
        ["image", "video"][: 2 if family in ("qwen2_5_vl", "qwen2_vl") else 1],
    )
    content = [*({"type": kind} for kind in parts), {"type": "text", "text": "what is it"}]
    text = speaker.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    gen = torch.Generator().manual_seed(0)
    media = {"images": [torch.randint(0, 255, (3, 56, 56), dtype=torch.uint8, generator=gen)]}
    if "video" in parts:
        media["videos"] = [torch.randint(0, 255, (4, 3, 56, 56), dtype=torch.uint8, generator=gen)]
        media["videos_kwargs"] = {"do_sample_frames": False}
    inputs = speaker.processor(text=[text], return_tensors="pt", **media)
    inputs = {n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in inputs.items()}
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams}
    with torch.no_grad():
        cached, plain = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("make", [fastv, tome, div_prune, vision_zip], ids=lambda f: f.__name__)
def test_token_pruners_generate_what_reading_in_one_go_gives(make):
    options = {"dominant": 2, "contextual": 1} if make is vision_zip else {"keep": 0.5}
    model = make(llava(), **options)
    inputs = llava_inputs(model, after=1)
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        ids = out.sequences
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 4, dtype=torch.int64)], 1)
        head = model(**{**inputs, "input_ids": ids[:, :11], "attention_mask": mask[:, :11]}, use_cache=True)
        rest = model(input_ids=ids[:, 11:], attention_mask=mask, past_key_values=head.past_key_values).logits
    # `generate` notes logits in float32.
    assert (torch.stack(out.logits[1:], 1) - rest[:, :-1]).abs().max() < 1e-4


def test_a_batch_of_ragged_rows_equals_single_rows():
    speaker, asked = policy("qwen2_5_vl"), prompts("qwen2_5_vl")
    model = drop_visual_layers(
        tome(local_visual_attention(speaker.model, radius=1), keep=0.6, before=1), after=1
    )
    model = drop_visual_heads(model, keep=0.5)
    table = steps(speaker, asked, answers=("one two",))
    with torch.no_grad():
        together = read_cached(model.base_model, table.steps)
        for row, prompt in enumerate(asked):
            alone = steps(speaker, [prompt], answers=("one two",))
            single = read_cached(model.base_model, alone.steps)
            assert (single[0] - together[row, : single.shape[1]]).abs().max() < 1e-9


def test_a_conversation_goes_on_with_another_image():
    model = prune_as(llava(), radius=1, heads=((0, 1),) * 3, after=2)
    inputs = llava_inputs(model, rows=1)
    ids, pixels = inputs["input_ids"], inputs["pixel_values"]
    more = torch.cat([torch.tensor([[30, 31]]), ids[:, 2:8]], 1)
    whole = {"input_ids": torch.cat([ids, more], 1), "pixel_values": torch.cat([pixels, pixels.flip(-1)])}
    with torch.no_grad():
        cache = model(input_ids=ids, pixel_values=pixels, use_cache=True).past_key_values
        later = model(input_ids=more, pixel_values=pixels.flip(-1), past_key_values=cache).logits
        once = model(**whole).logits[:, ids.shape[1] :]
    assert (later - once)[:, [0, 1, 6, 7]].abs().max() < 1e-9


def test_late_layers_cache_text_only_and_every_change_of_the_cache_reaches_the_column_index():
    model = drop_visual_layers(llava(), after=1)
    inputs = llava_inputs(model)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        # 16 columns; the rows hold 12 and 10 tokens of text, padded to 12 after the reduction.
        assert [layer.keys.shape[2] for layer in cache.layers[:3]] == [16, 12, 12]
        token = torch.tensor([[40], [41], [40]])
        which = torch.tensor([1, 0, 1])
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.int64)], 1)
        straight = model(
            input_ids=token[:2].flip(0), attention_mask=mask, past_key_values=copy.deepcopy(cache)
        ).logits
        cache.batch_select_indices(which)
        moved = model(input_ids=token, attention_mask=mask[which], past_key_values=cache).logits
        assert (moved[1] - straight[0]).abs().max() < 1e-9
        cache.crop(-1)
        again = model(input_ids=token, attention_mask=mask[which], past_key_values=cache).logits
    assert (moved - again).abs().max() < 1e-12


# ---- views


def test_a_view_shares_every_weight_and_leaves_the_model_alone():
    model = llava()
    inputs = llava_inputs(model)
    with torch.no_grad():
        before = model(**inputs).logits
        view = yopo12(model)
        assert (view(**inputs).logits - before).abs().max() > 1e-3
        assert torch.equal(model(**inputs).logits, before)
    mine, theirs = dict(model.named_parameters()), dict(view.named_parameters())
    assert mine.keys() == theirs.keys() and all(mine[name] is theirs[name] for name in mine)
    assert pruning_of(model).radius is None and pruning_of(view).radius == 2


def test_a_deep_copy_of_a_view_computes_with_its_own_weights():
    view = drop_visual_layers(llava(), after=1)
    twin = copy.deepcopy(view)
    inputs = llava_inputs(view)
    with torch.no_grad():
        before = view(**inputs).logits
        assert torch.equal(twin(**inputs).logits, before)
        for parameter in twin.parameters():
            parameter.mul_(0.5)
        assert torch.equal(view(**inputs).logits, before)
        assert not torch.equal(twin(**inputs).logits, before)


def test_an_adapter_on_a_pruned_policy_learns_and_is_recomputed_alike():
    table, logits, grads = None, [], []
    for again in (False, True):
        speaker = Tokens(
            model=str(folder("llava")),
            dtype="float64",
            transform=(yopo25,),
            lora_rank=2,
            gradient_checkpointing=again,
        )
        table = table or steps(speaker, prompts("llava"))
        with torch.no_grad():
            for name, parameter in sorted(speaker.model.named_parameters()):
                if "lora_B" in name:
                    parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
                if "lora_A" in name:
                    parameter.copy_(torch.linspace(-0.2, 0.1, parameter.numel()).view_as(parameter))
        out = speaker(table)
        (out.logp * table.mask).sum().backward()
        logits.append((out.logp * table.mask).detach())
        grads.append({n: p.grad for n, p in speaker.model.named_parameters() if p.grad is not None})
    assert (logits[0] - logits[1]).abs().max() < 1e-6  # adapters are float32
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 20
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], rtol=1e-3, atol=1e-4), name


# ---- bad input


def test_a_transform_applied_twice_is_refused():
    view = drop_visual_layers(llava(), after=2)
    with pytest.raises(
        ValueError, match=r"'drop_visual_layers' was applied to this model already, with \{'after': 2\}"
    ):
        drop_visual_layers(view, after=1)


def test_a_family_without_an_adapter_is_refused_by_name():
    model = policy("qwen3_vl").model
    with pytest.raises(ValueError, match="no adapter for models of type 'qwen3_vl'.*llava, llava_onevision"):
        yopo25(model)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (drop_visual_layers, {"after": 4}, "in front of layer 4 of a model with 3 layers"),
        (drop_visual_heads, {"heads": ((0,), (7,), (0,))}, "layer 1 has 4 heads, so there is no 7"),
        (sparse_visual_ffn, {"ffn_units": ((0,),)}, "ffn_units are named for 1 layers, but the model has 3"),
        (shortv, {"layers": (0, 7)}, "the model has 3 layers, so there is no layer 7"),
        (shortv, {}, "`shortv` needs a `plan` with the importance of layers, or the `layers` to freeze"),
        (shortv, {"plan": "/nowhere.json"}, "cannot read the plan '/nowhere.json'"),
        (pyramid_drop, {"keep": (0.5,), "layers": (1, 2)}, "1 shares for 2 layers"),
        (tome, {"before": 9}, "tokens cannot leave in front of layer 9 of a model with 3 layers"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(make, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(llava(), **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("drop_visual_heads", {"keep": 1.5}, ".keep' must be at least 0 and at most 1, not 1.5"),
        ("local_visual_attention", {"radius": -1}, ".radius' must be at least 0, not -1"),
        ("fastv", {"after": 0}, ".after' must be at least 1, not 0"),
        ("drop_visual_layers", {"after": 0}, ".after' must be at least 1, not 0"),
    ],
)
def test_options_out_of_range_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Pieces(Stream()).check("transform", Piece(f"compression.{name}", options), "policy.transform")


def test_calls_that_a_pruned_model_cannot_serve_are_refused():
    model = fastv(llava(), after=1)
    inputs = llava_inputs(model)
    with pytest.raises(ValueError, match="a pruned model has no `output_attentions`"):
        model(**inputs, output_attentions=True)
    with pytest.raises(
        ValueError, match="the attention mask has 3 columns, but the cache holds 0 tokens and 16"
    ):
        model(**{**inputs, "attention_mask": inputs["attention_mask"][:, :3]})
    with pytest.raises(ValueError, match="needs `input_ids`"):
        model(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="called through the whole model, not alone"):
        model.model.language_model(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64))
    table = steps(policy("llava"), prompts("llava"))
    with pytest.raises(ValueError, match="Set `gradient_checkpointing: false`"):
        read_packed(fastv(policy("llava").model, after=1).base_model, table.steps)
    with pytest.raises(ValueError, match="has no class token to rank patches by"):
        vision_zip(policy("internvl").model)
