"""Pipelines: whole weights, schedulers of flow matching, and LoRA that is on them already."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmrl.build import check_data, usable_rows
from mmrl.config import objects
from mmrl.config.binding import Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.registry import find
from mmrl.config.schema import Config, Piece, Rollout, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Part, Prompt, PromptError
from mmrl.diffusion import loading
from mmrl.diffusion.model_family import Request
from mmrl.diffusion.prompt_check import FlowPromptCheck
from tests.diffusion import tiny
from tests.diffusion.flows import denoise, flow
from tests.support.toys import plan

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


def test_what_folders_lack_is_known_without_weights(folder, checkpoint, tmp_path):
    check = find("policy", "diffusion.flow").target.check_folders
    check({"model": str(folder), "negative_prompt": "ugly"})
    with pytest.raises(ConfigError, match="reads no negative prompt"):
        check({"model": str(checkpoint("flux")), "negative_prompt": "ugly"})
    with pytest.raises(ConfigError, match="there is no adapter"):
        check({"model": str(folder), "adapter": str(tmp_path)})
    spoil(folder, "vae", "header")
    with pytest.raises(ConfigError, match="vae' lack"):
        check({"model": str(folder)})


SIZES = {
    "sd3": {(32, 48): True, (36, 32): False, (32, 136): False},  # of at most 16 positions of 8 pixels
    "flux": {(32, 48): True, (40, 32): False},
    "sana": {(64, 96): True, (48, 64): False},
}


@pytest.mark.parametrize("name", SIZES)
def test_recorded_images_of_sizes_that_a_family_cannot_take_are_named(checkpoint, tmp_path, caplog, name):
    rows = []
    for i, (height, width) in enumerate(SIZES[name]):
        Image.new("RGB", (width, height)).save(tmp_path / f"{i}.png")
        rows.append({"id": f"row {i}", "prompt": "a cat", "image": f"{i}.png"})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = Piece("diffusion.images", {"path": str(tmp_path / "rows.jsonl"), "root": str(tmp_path)})
    config = Config(
        policy=Piece("diffusion.flow", {"model": str(checkpoint(name))}),
        data=data,
        rewards=(Piece("precomputed", {"key": "score"}),),
        rollout=Rollout(num_prompts=1, num_generations=1, engine=(Piece("offline"),)),
        advantage=(),
        objective=Piece("supervised"),
        output_dir=str(tmp_path / "out"),
    )
    prompts = Pieces(Stream()).prompts(data, "data")
    wrong = [f"row {i}" for i, taken in enumerate(SIZES[name].values()) if not taken]
    said = f"(?s){len(wrong)} row.*cannot be used.*bad_rows: drop.*prompt '{wrong[0]}'"
    with pytest.raises(ConfigError, match=said) as told:
        usable_rows(config, [*prompts])
    assert all(uid in str(told.value) for uid in wrong)
    dropping = replace(config, data=Piece(data.name, {**data.options, "bad_rows": "drop"}))
    assert [prompt.uid for prompt in usable_rows(dropping, prompts)] == ["row 0"]
    other = replace(config, rollout=replace(config.rollout, engine=(Piece("diffusion.denoise"),)))
    assert len(usable_rows(other, prompts)) == len(prompts)  # nobody reads the images
    policy = flow(checkpoint(name), "diffusion.matching", dtype="float32", max_sequence_length=16)
    for prompt in prompts[1:]:
        with pytest.raises(ValueError, match=f"answer of prompt '{prompt.uid}' cannot be learned from"):
            policy.encode(prompt, prompt.answers[0])


def test_checks_of_a_run_share_a_pipeline_until_its_folder_changes(folder):
    first = FlowPromptCheck(str(folder)).pipe
    assert FlowPromptCheck(str(folder), 64).pipe is first
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index, indent=1))
    again = FlowPromptCheck(str(folder)).pipe
    assert again is not first and again.config == first.config


@pytest.mark.parametrize("name", ["sd3", "qwen_image"])
def test_prompts_that_are_too_long_are_bad_rows_known_without_weights(checkpoint, tmp_path, caplog, name):
    """The check lets through what the policy encodes, and names what it refuses."""
    policy = {"name": "diffusion.flow", "model": str(checkpoint(name)), "max_sequence_length": 256}
    (tmp_path / "rows.txt").write_text("a red fox\n" + "a red fox " * 400 + "\na blue fox\n")
    data = {"name": "diffusion.prompts", "path": str(tmp_path / "rows.txt")}
    reads = flow(checkpoint(name), max_sequence_length=256)
    check = find("policy", "diffusion.flow").target.prompt_check(policy)
    ask = lambda text: Prompt("p", (Message("user", (Part(text),)),))
    for text in ("a red fox", "a red fox " * 400):
        try:
            reads.condition(Request(text))
        except ValueError:
            with pytest.raises(PromptError, match="'p'"):
                check(ask(text))
        else:
            check(ask(text))
    with pytest.raises(ConfigError, match=r"rows.txt:2: cannot read the prompt"):
        check_data(parse(plan(tmp_path / "out", data=data, policy=policy), Config))
    check_data(parse(plan(tmp_path / "out", data={**data, "bad_rows": "drop"}, policy=policy), Config))
    assert sum("dropped" in record.message for record in caplog.records) == 1
