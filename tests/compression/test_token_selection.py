"""Selection and merging of visual tokens."""

from __future__ import annotations

import pytest
import torch

from mmrl.compression.transforms.drop_tokens import (
    bipartite_soft_matching,
    fastv,
    max_min_diversity,
    pyramid_drop,
    tome,
    top_mask,
    vision_zip_image,
)
from mmrl.compression.transforms.visual_computation import shortv
from mmrl.runtime.modules import applied_transforms
from tests.compression.pruned_models import llava, llava_inputs, simulate


def test_the_best_of_every_row_stay_and_padding_never_does():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.5], [0.9, 0.8, 0.1, 0.2]])
    is_token = torch.tensor([[True, True, True, True], [False, False, True, True]])
    # The first row keeps 0.9 and the first of two 0.5; the second row has padding in its best places.
    assert top_mask(scores, is_token, torch.tensor([2, 1])).tolist() == [
        [False, True, True, False],
        [False, False, False, True],
    ]


def test_tokens_that_differ_most_are_chosen_one_after_the_other():
    # Directions at 0, 10, 90 and 180 degrees. Nearest neighbours are 10, 10, 80 and 90 degrees away, so the
    # last is chosen first; 0 is farthest from it (180), then 90 (90 from both).
    angle = torch.tensor([0.0, 10.0, 90.0, 180.0]).deg2rad()
    states = torch.stack([angle.cos(), angle.sin()], 1) * torch.tensor([[1.0], [5.0], [2.0], [3.0]])
    assert max_min_diversity(states, 3).tolist() == [3, 0, 2]
    assert max_min_diversity(states, 4).tolist() == [0, 1, 2, 3]
    assert max_min_diversity(states, 0).tolist() == []


def test_merging_takes_means_of_what_is_alike_weighed_by_size():
    states = torch.tensor([[2.0, 0.0], [4.0, 0.0], [0.0, 3.0], [0.0, 9.0]])
    # Pairs (0, 1) and (2, 3) are alike, cosine 1: 3 tokens are left after one merge, 2 after both.
    places, means = bipartite_soft_matching(states, 2)
    assert places.tolist() == [1, 3]
    assert means.tolist() == [[3.0, 0.0], [0.0, 6.0]]
    # Down to one, with weights 2 and 2: the mean of all four.
    places, means = bipartite_soft_matching(states, 1)
    assert len(places) == 1 and torch.allclose(means, torch.tensor([[1.5, 3.0]]))
    assert bipartite_soft_matching(states, 4)[1] is states


@pytest.mark.parametrize("number", [1, 3, 5])
def test_merging_keeps_the_sum_of_what_is_merged(number):
    states = torch.randn(
        9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    places, means = bipartite_soft_matching(states, number)
    assert len(places) == number
    means.sum().backward()
    # Every mean gives its tokens weights that sum to 1.
    assert torch.allclose(states.grad[:, 0].sum(), torch.tensor(float(number), dtype=torch.float64))


def test_zipping_keeps_what_the_tower_looks_at_and_adds_the_rest_to_targets():
    states = torch.arange(6.0)[:, None]
    seen = torch.tensor([0.0, 0.9, 0.1, 0.2, 0.0, 0.3])
    keys = torch.nn.functional.normalize(
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [1.0, 1.0]]), dim=-1
    )
    stay, changed = vision_zip_image(states, seen, keys, 1, 2)
    # 1 is dominant; of the rest 0, 2, 3, 4, 5 every second is a target: 0 and 3. Keys: 2 is like 0, 4 is
    # like 3, and 5 is as like to both, so goes to the first. 0 takes the mean of 2 and 5: 3.5; 3 takes 4: 7.
    assert stay.tolist() == [True, True, False, True, False, False]
    assert changed[stay][:, 0].tolist() == [3.5, 1.0, 7.0]


def test_stages_are_of_equal_length():
    view = pyramid_drop(llava(num_hidden_layers=32), keep=(0.5, 0.25, 0.125))
    assert applied_transforms(view)[0]["layers"] == (8, 16, 24)


def _seen(model, inputs, layer):
    """Attention that the last token pays to visual tokens in a layer, from the maps of an eager model."""
    model.set_attn_implementation("eager")
    maps = model(**inputs, output_attentions=True).attentions[layer]
    model.set_attn_implementation("sdpa")
    return maps.mean(1)[:, -1]


@pytest.mark.parametrize("make", [fastv, pyramid_drop])
def test_ranked_tokens_are_those_of_the_attention_map(make):
    model = llava(num_hidden_layers=3)
    inputs = llava_inputs(model)
    inputs["attention_mask"] = torch.ones_like(
        inputs["attention_mask"]
    )  # eager maps of padded rows are no numbers
    visual = inputs["input_ids"] == 250
    with torch.no_grad():
        # FastV looks at the layer before the cut; PyramidDrop at the layer after it.
        seen = _seen(model, inputs, 0 if make is fastv else 1)
        view = (
            fastv(model, after=1, keep=0.5)
            if make is fastv
            else pyramid_drop(model, keep=(0.5,), layers=(1,))
        )
        cache = view(**inputs, use_cache=True).past_key_values
        slots = cache.layers[4].keys[
            :, 0, :, 0
        ]  # the column index of the second stage, after three layers and the first
        for row in range(2):
            order = seen[row].masked_fill(~visual[row], -1).argsort(descending=True)
            wanted = sorted(order[:2].tolist())
            assert [slot for slot in slots[row].tolist() if slot >= 0 and visual[row, slot]] == wanted


def test_a_token_pruner_with_a_window_equals_the_window_on_what_is_left():
    """A raster with holes falls back to a mask; nothing leaves at a share of 1, so both give the same."""
    from mmrl.compression.transforms.visual_computation import local_visual_attention

    model = llava()
    inputs = llava_inputs(model)
    with torch.no_grad():
        plain = local_visual_attention(model, radius=0)
        gap = tome(plain, keep=1.0, before=1)(**inputs).logits - plain(**inputs).logits
        assert gap.abs().max() < 1e-10
        cut = tome(plain, keep=0.5, before=1)(**inputs).logits
    assert torch.isfinite(cut).all() and (cut - plain(**inputs).logits).abs().max() > 1e-3


def test_two_token_pruners_before_the_same_layer_choose_one_after_the_other():
    model = llava()
    inputs = llava_inputs(model)
    with torch.no_grad():
        view = fastv(tome(model, keep=1.0, before=1), after=1, keep=0.5)
        assert torch.equal(view(**inputs).logits, fastv(model, after=1, keep=0.5)(**inputs).logits)
        cache = fastv(tome(model, keep=0.5, before=1), after=1, keep=0.5)(**inputs, use_cache=True)
        # Of 4 visual tokens 2 are merged and 1 of 2 is kept, beside the text, 12 of 16 columns.
        assert cache.past_key_values.layers[2].keys.shape[2] == 13


def test_frozen_layers_leave_visual_states_as_they_are():
    model = llava()
    inputs = llava_inputs(model, rows=1)
    with torch.no_grad():
        out = shortv(model, layers=(0, 1, 2)).model(**inputs).last_hidden_state[0, 2:6]
        given = model.model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output[0]
        assert torch.allclose(out, model.model.language_model.norm(given))
        gap = shortv(model, layers=(0, 1, 2))(**inputs).logits - simulate(model, inputs, frozen=(0, 1, 2))
    assert gap.abs().max() < 1e-9
