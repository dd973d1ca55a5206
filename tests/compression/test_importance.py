"""Importance of heads, ffn_units and layers, and what transforms choose by it."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mmrl.compression.importance import (
    best_each,
    best_overall,
    first_units,
    layer_importance,
    make_plan,
    read_plan,
    write_plan,
)
from mmrl.compression.pruning.spec import pruning_of
from mmrl.compression.transforms.visual_computation import (
    drop_visual_heads,
    shortv,
    sparse_visual_ffn,
    yopo25,
)
from tests.compression.pruned_models import llava, llava_inputs


def test_even_attention_pays_by_the_number_of_columns():
    model = llava()
    for block in model.model.language_model.layers:
        torch.nn.init.zeros_(block.self_attn.q_proj.weight)
    inputs = llava_inputs(model, rows=1)
    plan = make_plan(model, [inputs], kinds=["heads"], queries="last")
    # The last of 16 tokens sees all evenly, 4 of them visual: 4 / 12.
    assert torch.allclose(torch.tensor(plan["heads"]), torch.full((3, 4), 1 / 3))
    # All queries: query i sees i columns evenly, of which min(4, max(0, i - 2)) are visual.
    seen = sum(min(4, max(0, i - 2)) / i for i in range(1, 17))
    both = make_plan(model, [inputs, inputs], kinds=["heads"])
    assert torch.allclose(torch.tensor(both["heads"]), torch.full((3, 4), seen / (16 - seen)))


def test_neurons_are_as_important_as_what_they_send_on():
    model = llava()
    inputs = llava_inputs(model)
    with torch.no_grad():
        for block in model.model.language_model.layers:
            block.mlp.down_proj.weight[:, 5] = 0
            block.mlp.up_proj.weight[7] = 0
    found = torch.tensor(make_plan(model, [inputs], kinds=["ffn_units"])["ffn_units"])
    assert found.shape == (3, 64)
    assert (found[:, [5, 7]] == 0).all() and (found > 0).sum() == 3 * 62


def test_a_layer_that_changes_nothing_is_of_no_importance():
    model = llava()
    inputs = llava_inputs(model)
    with torch.no_grad():
        last = model.model.language_model.layers[2]
        # What visual tokens become in the last layer is read by nobody.
        found = layer_importance(model, [inputs])
        assert found[2].abs() < 1e-12 and (found[:2] > 1e-9).all()
        view = shortv(model, layers=(0,))
        full, frozen = (m(**inputs).logits[:, -1].log_softmax(-1) for m in (model, view))
        assert found[0] == pytest.approx(float((full.exp() * (full - frozen)).sum(-1).mean()))
    assert last is model.model.language_model.layers[2]


def test_units_are_chosen_by_their_importance():
    scores = [[0.1, 0.9, 0.5, 0.2], [0.8, 0.7, 0.6, 0.3]]
    assert best_each(scores, 0.5) == ((1, 2), (0, 1))
    # Four of eight, over both layers: 0.9, 0.8, 0.7, 0.6.
    assert best_overall(scores, 0.5, 0) == ((1,), (0, 1, 2))
    # The first layer keeps all four, so nothing is left for the other.
    assert best_overall(scores, 0.5, 1) == ((0, 1, 2, 3), ())
    assert best_overall(scores, 0.75, 1) == ((0, 1, 2, 3), (0, 1))
    assert first_units(0.5, 2, 5) == ((0, 1), (0, 1))


def test_transforms_read_a_plan(tmp_path):
    model, path = llava(), tmp_path / "plan.json"
    plan = make_plan(model, [llava_inputs(model)])
    write_plan(plan, path)
    assert json.loads(path.read_text()).keys() == {"heads", "ffn_units", "layers"}
    heads = pruning_of(drop_visual_heads(model, plan=str(path), keep=0.5, whole=1)).heads
    assert len(heads[0]) == 4 and sum(len(line) for line in heads) == 6
    ffn_units = pruning_of(sparse_visual_ffn(model, plan=str(path), keep=0.25)).ffn_units
    assert all(len(line) == 16 for line in ffn_units) and ffn_units == best_each(plan["ffn_units"], 0.25)
    frozen = pruning_of(shortv(model, plan=str(path), freeze=0.34)).frozen
    assert frozen == {min(range(3), key=lambda layer: plan["layers"][layer])}
    assert pruning_of(yopo25(model, plan=str(path))).heads == best_overall(plan["heads"], 0.5, 2)


def test_wrong_plans_are_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"heads": []}')
    with pytest.raises(ValueError, match="has no importance of layers; it has heads"):
        read_plan(str(path), "layers")
    with pytest.raises(ValueError, match="a plan has no 'neuron'; it has heads, ffn_units, layers"):
        make_plan(llava(), [], kinds=["neuron"])
    with pytest.raises(ValueError, match="measured on the whole model"):
        make_plan(yopo25(llava()), [])
    assert math.isfinite(sum(make_plan(llava(), [llava_inputs(llava())], kinds=["layers"])["layers"]))
