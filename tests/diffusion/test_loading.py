"""Pipelines: whole weights, schedulers of flow matching, and LoRA that is on them already."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.config import objects
from mmrl.diffusion import loading
from tests.diffusion import tiny
from tests.diffusion.flows import denoise, flow

PARTS = {"transformer": "SD3Transformer2DModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}


@pytest.fixture
def folder(checkpoint, tmp_path):
    shutil.copytree(checkpoint("sd3"), tmp_path / "sd3")
    return tmp_path / "sd3"


def spoil(folder, part, kind):
    """Take weights out of the file of a part."""
    (file,) = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    kept = {
        "a layer": {key: value for key, value in weights.items() if ".1." not in key},
        "all": {"foreign": torch.zeros(1)},
        "header": {},
    }
    if kind in kept:
        save_file(kept[kind], file, {"format": "pt"})
    else:
        file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("part", PARTS)
def test_a_pipeline_that_lacks_weights_is_refused_by_name(folder, tmp_path, part):
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    loading.check_weights(str(folder))
    for kind in ("a layer", "all", "header", "cut"):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        spoil(folder, part, kind)
        said = "cannot load" if kind == "cut" else f"{part}' lack .* weights of {PARTS[part]}"
        for read in (loading.check_weights, lambda name: loading.load_pipeline(name, dtype="float32")):
            with pytest.raises(ValueError, match=said):
                read(str(folder))
        if part == "transformer":  # what `init_from` and a resumed run read
            with pytest.raises(ValueError, match=said):
                loading.load_network(tiny.load(whole).transformer, folder)


OF_OTHERS = {
    "DDIMScheduler": {},
    "DPMSolverMultistepScheduler": {"use_karras_sigmas": True},
    "UniPCMultistepScheduler": {"use_flow_sigmas": True},  # it predicts noise
    "FlowMatchHeunDiscreteScheduler": {},
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_schedulers_that_are_none_of_flow_matching_are_refused_before_weights(folder, name):
    (folder / "transformer/diffusion_pytorch_model.safetensors").unlink()
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", name]}))
    settings = {"_class_name": name, **OF_OTHERS[name]}
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"its scheduler is '{name}'"):
        flow(folder)


def test_an_object_with_such_a_scheduler_is_refused(pipeline):
    from diffusers import DDIMScheduler

    pipe = copy.copy(pipeline("sana"))
    pipe.scheduler = DDIMScheduler()
    with pytest.raises(ValueError, match="its scheduler is 'DDIMScheduler'"):
        flow(objects.put("ddim", pipe))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_pipeline_that_carries_lora_is_refused_until_it_is_fused(checkpoint, tmp_path, rank):
    pipe = tiny.load(checkpoint("sd3"))
    name = objects.put("carrying", pipe)
    assert flow(name, dtype="float32", lora_rank=2).adapted
    for _ in range(2):
        with pytest.raises(ValueError, match="transformer carries the LoRA adapter 'default'.*fuse_lora"):
            flow(name, dtype="float32", lora_rank=rank)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    flow(name, dtype="float32", lora_rank=rank).save(tmp_path)
    assert any(tmp_path.iterdir())


def test_a_second_policy_goes_on_from_the_weights_of_the_first(checkpoint):
    name = objects.put("twice", tiny.load(checkpoint("sd3")))
    first = flow(name, dtype="float32")
    assert flow(name, dtype="float32").network is first.network


def test_a_negative_prompt_without_effect_is_refused_or_named(checkpoint):
    with pytest.raises(ValueError, match="reads no negative prompt"):
        flow(checkpoint("flux"), negative_prompt="ugly", max_sequence_length=16)
    policy = flow(checkpoint("sd3"), negative_prompt="ugly")
    for scale in (0.0, 1.0):
        with pytest.warns(UserWarning, match="switches guidance off, so the `negative_prompt` 'ugly'"):
            denoise(policy, guidance_scale=scale, solver="diffusion.cps")
