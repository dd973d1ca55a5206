"""Saving and loading: the same logits, bit for bit, from an ordinary folder and a small JSON file."""

from __future__ import annotations

import json

import pytest
import torch

from mmrl.compression.pruning.spec import pruning_of
from mmrl.compression.transforms.drop_tokens import fastv, pyramid_drop, tome, vision_zip
from mmrl.compression.transforms.layer_cast import layer_cast
from mmrl.compression.transforms.structured_pruning import structured_pruning
from mmrl.compression.transforms.visual_computation import shortv, yopo12, yopo25
from mmrl.inference.saving import load_pruned, save_transformed
from mmrl.inference.sources import TRANSFORMS, WEIGHTS
from mmrl.runtime.modules import applied_transforms
from tests.compression.pruned_models import llava, llava_inputs

CASES = {
    "yopo25": yopo25,
    "yopo12 over layer_cast": lambda m: yopo12(layer_cast(m)),
    "yopo12 over structured_pruning": lambda m: yopo12(structured_pruning(m, ffn_units=0.5, heads=0.5)),
    "fastv and shortv": lambda m: shortv(fastv(m, after=2), layers=(1,)),
    "pyramid_drop": lambda m: pyramid_drop(m, keep=(0.5,)),
    "vision_zip": lambda m: vision_zip(m, dominant=2, contextual=1),
    "tome": tome,
}


@pytest.mark.parametrize("name", CASES)
def test_a_transformed_model_comes_back_bit_for_bit(name, tmp_path):
    model = CASES[name](llava(dtype=torch.float32))
    inputs = llava_inputs(model)
    save_transformed(model, tmp_path)
    again = load_pruned(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    again_done, done = applied_transforms(again), applied_transforms(model)
    assert json.loads(json.dumps(again_done)) == json.loads(json.dumps(done))
    assert pruning_of(again).heads == pruning_of(model).heads


def test_a_pruned_folder_cannot_be_loaded_as_the_whole_model(tmp_path):
    import transformers

    model = llava(dtype=torch.float32)
    save_transformed(yopo25(model), tmp_path)
    with pytest.raises(ValueError, match="mmrl_pruned: load this folder with mmrl.load_pruned"):
        transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="no file named model.safetensors"):
        transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["base_model_type"] == "llava" and "drop_visual_layers" in config["transforms"]
    assert "mmrl.load_pruned" in config["load_with"]
    assert (tmp_path / TRANSFORMS).stat().st_size < 5000


def test_the_whole_model_is_in_the_folder_of_the_weights(tmp_path):
    import transformers

    model = llava(dtype=torch.float32)
    save_transformed(yopo25(model), tmp_path)
    plain = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / WEIGHTS).eval()
    inputs = llava_inputs(model)
    with torch.no_grad():
        assert torch.equal(plain(**inputs).logits, model(**inputs).logits)


def test_a_folder_without_the_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="which `mmrl export` writes"):
        load_pruned(tmp_path)


# ---- weights cut out


def test_cut_neurons_equal_neurons_that_are_zero():
    model = llava()
    small = structured_pruning(model, ffn_units=0.25)
    assert (
        small.config.text_config.intermediate_size == 16 and model.config.text_config.intermediate_size == 64
    )
    with torch.no_grad():
        inputs = llava_inputs(model)
        out = small(**inputs).logits
        for block in model.model.language_model.layers:
            block.mlp.down_proj.weight[:, 16:] = 0
        assert (model(**inputs).logits - out).abs().max() < 1e-10


def test_cut_heads_equal_heads_that_add_nothing_and_the_cache_is_smaller():
    model = llava()
    small = structured_pruning(model, heads=0.5)
    inputs = llava_inputs(model)
    with torch.no_grad():
        out = small(**inputs, use_cache=True)
        # One group of two query heads of four is left: the first 16 inputs of the output projection.
        for block in model.model.language_model.layers:
            block.self_attn.o_proj.weight[:, 16:] = 0
        assert (model(**inputs).logits - out.logits).abs().max() < 1e-10
    assert out.past_key_values.layers[0].keys.shape[1] == 1
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


def test_a_cut_model_is_an_ordinary_folder(tmp_path):
    import transformers

    model = structured_pruning(llava(dtype=torch.float32), ffn_units=0.5, heads=0.5)
    save_transformed(model, tmp_path)
    plain = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    inputs = llava_inputs(model)
    with torch.no_grad():
        assert torch.equal(plain(**inputs).logits, model(**inputs).logits)


def test_cutting_is_refused_where_it_would_confuse(tmp_path):
    with pytest.raises(ValueError, match="apply `structured_pruning` before `drop_visual_heads`"):
        structured_pruning(yopo25(llava()), ffn_units=0.5)
    with pytest.raises(ValueError, match="0 inner units and 2 groups of heads would be left"):
        structured_pruning(llava(), ffn_units=0.0)
    with pytest.raises(ValueError, match="needs plain linear layers, not .*UpcastLinear"):
        structured_pruning(layer_cast(llava(dtype=torch.float32)), ffn_units=0.5)
