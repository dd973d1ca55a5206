"""Averaged weights: by hand, in several files, and what does not average."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.builders.merge_weights import MergeWeights
from mmrl.config.loading import ConfigError


def model(folder, *files, **others):
    """Write a model folder: weights by file, and small files beside them."""
    for name, tensors in zip(("model-1.safetensors", "unet/model-2.safetensors"), files, strict=False):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / name, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(others))
    return str(folder)


def merge(tmp_path, *models, weights=(0.8, 0.2)):
    return MergeWeights(models=models, weights=weights).build(tmp_path / "out")


def test_tensors_are_averaged_in_float32_and_written_as_the_first_model_has_them(tmp_path):
    long = model(tmp_path / "a", {"w": torch.full((2, 2), 1.0).bfloat16(), "n": torch.tensor([3])}, kind="a")
    short = model(tmp_path / "b", {"w": torch.full((2, 2), 0.5), "n": torch.tensor([3])}, kind="b")
    assert merge(tmp_path, long, short) == {"models": 2, "tensors": 2}
    found = load_file(tmp_path / "out/model-1.safetensors")
    assert found["w"].dtype == torch.bfloat16 and found["n"].tolist() == [3]
    torch.testing.assert_close(found["w"], torch.full((2, 2), 0.9).bfloat16())
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"kind": "a"}


def test_all_weigh_the_same_by_default_and_extrapolation_is_allowed(tmp_path):
    models = [model(tmp_path / str(i), {"w": torch.tensor([float(i)])}) for i in (1, 2, 6)]
    merge(tmp_path, *models, weights=())
    assert load_file(tmp_path / "out/model-1.safetensors")["w"].tolist() == [3]
    MergeWeights(models=(models[0], models[1]), weights=(2.0, -1.0)).build(tmp_path / "far")
    assert load_file(tmp_path / "far/model-1.safetensors")["w"].tolist() == [0]


def test_shards_may_differ_and_parts_of_a_pipeline_stay_apart(tmp_path):
    one = model(tmp_path / "a", {"w": torch.ones(1), "v": torch.zeros(1)}, {"w": torch.full((1,), 5.0)})
    other = tmp_path / "b"
    model(other, {"w": torch.zeros(1)}, {"w": torch.full((1,), 10.0)})
    save_file({"v": torch.ones(1)}, other / "model-0.safetensors")
    (other / "old.bin").write_bytes(b"no")
    (tmp_path / "a/pickle.bin").write_bytes(b"no")
    assert merge(tmp_path, one, str(other), weights=(0.5, 0.5))["tensors"] == 3
    found = load_file(tmp_path / "out/model-1.safetensors")
    assert {name: tensor.item() for name, tensor in found.items()} == {"w": 0.5, "v": 0.5}
    assert load_file(tmp_path / "out/unet/model-2.safetensors")["w"].item() == 7.5
    assert not list((tmp_path / "out").rglob("*.bin"))


def test_what_does_not_average_is_named(tmp_path):
    one = model(tmp_path / "a", {"w": torch.ones(2), "n": torch.tensor([1])})
    for name, tensors, message in [
        ("b", {"w": torch.ones(2)}, "has no tensor 'n', which another"),
        ("c", {"w": torch.ones(3), "n": torch.tensor([1])}, r"shape \(2,\) in .* and \(3,\)"),
        ("d", {"w": torch.ones(2), "n": torch.tensor([2])}, "whole numbers that differ"),
    ]:
        with pytest.raises(ValueError, match=message):
            merge(tmp_path, one, model(tmp_path / name, tensors))
        assert not (tmp_path / "out").exists()


def test_bad_options_are_errors_of_the_configuration(tmp_path):
    one = model(tmp_path / "a", {"w": torch.ones(1)})
    for models, weights, message in [
        ((one,), (), "two or more"),
        ((one, one), (0.8, 0.8), "2 numbers that add up to 1"),
        ((one, one), (1.0,), "2 numbers"),
    ]:
        with pytest.raises(ConfigError, match=message):
            MergeWeights(models=models, weights=weights)
    with pytest.raises(ConfigError, match="there is no model folder"):
        merge(tmp_path, one, "nowhere")
    (tmp_path / "a/adapter_config.json").touch()
    with pytest.raises(ConfigError, match="holds an adapter"):
        merge(tmp_path, one, one)
    other = model(tmp_path / "b", {"w": torch.ones(1)})
    low = tmp_path / "low" / "transformer_2"  # the adapter of a second network
    low.mkdir(parents=True)
    (low / "pytorch_lora_weights.safetensors").touch()
    with pytest.raises(ConfigError, match=r"holds an adapter \(transformer_2/pytorch_lora_weights"):
        merge(tmp_path, other, low.parent)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        MergeWeights(models=(other, other)).build(tmp_path / "b")
