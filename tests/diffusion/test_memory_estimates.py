"""What image and video pipelines take of memory, without their weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.diagnostics.memory_estimates import (
    estimate_memory,
    estimate_with,
    peak,
    reward_models,
    smallest_card,
)
from mmrl.diffusion.memory_estimates import _velocity, conditioning_of, learning_bytes
from mmrl.diffusion.model_family import Request
from mmrl.runtime.low_bit import scales_of
from mmrl.runtime.modules import loading_onto
from tests.diffusion import tiny
from tests.diffusion.flows import data

ENGINE = {"name": "diffusion.denoise", "num_inference_steps": 3, "height": 32, "width": 32}
PLAIN = {
    "policy": {"name": "diffusion.flow", "model": "x"},
    "data": "tests.diffusion.flows:data",
    "rollout": {"engine": [ENGINE], "num_prompts": 2, "num_generations": 2},
    "rewards": ["tests.support.real_worker:longer"],
    "advantage": ["total", "group_normalize"],
    "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
    "references": {"ref": "frozen"},
    "output_dir": "nowhere",
}


def config_of(model, engine=None, learn=None, **options):
    changes = {
        "policy": {"name": "diffusion.flow", "model": str(model), **options},
        "learn": learn or {},
        "rollout": {**PLAIN["rollout"], "engine": [{**ENGINE, **(engine or {})}]},
    }
    return parse({**PLAIN, **changes}, Config)


def policy_of(config, *, empty=False):
    with loading_onto(None, empty=empty):
        return Pieces(Stream(0)).make("policy", config.policy)


@pytest.mark.parametrize("family", sorted(tiny.MAKERS))
def test_weights_of_pipelines_need_not_be_there(family, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(family), tmp_path / "model")
    given = ({"dtype": "bfloat16", "lora_rank": 2}, {"dtype": "float32"}, {"dtype": "float16"})
    configs = [config_of(folder, **options) for options in given[: 3 if family == "sd3" else 1]]
    wanted = [estimate_with(config, policy_of(config), []) for config in configs]
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    # The scale of an embedding, a buffer that no file has, is in 16 or 32 bits.
    assert [dict(estimate_with(config, policy_of(config, empty=True), [])) for config in configs] == [
        pytest.approx(dict(sizes), rel=1e-3) for sizes in wanted
    ]
    assert all({"weights", "optimizer", "encoders and decoder", "paths"} <= sizes.keys() for sizes in wanted)


PASSES = {"rollouts/passes", "decoding/pixels", "learning/activations"}
LOW = {"dtype": "bfloat16", "lora_rank": 2}
FOUR = LOW | {"transform": [{"name": "compression.bnb_quantize", "nbits": 4}], "gradient_checkpointing": True}


LENGTH = {"max_sequence_length": 16}
ONE = {"engine": {"batch_size": 1}, "learn": {"micro_batch_steps": 1}}  # passes of one row alone
MORE = {
    "qwen_image": {"max_sequence_length": 160},
    "wan": {"max_sequence_length": 64, "gradient_checkpointing": True},
    "flux2_klein": {"max_sequence_length": 120},
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("sd3", LOW | LENGTH | {"vae_tiling": True, "vae_slicing": True}),
        ("flux", FOUR | LENGTH),
        *(pytest.param(name, LOW | more, marks=pytest.mark.slow) for name, more in MORE.items()),
    ],
)
def test_passes_of_a_pipeline_without_weights_are_those_of_one_with_weights(checkpoint, family, options):
    config = config_of(checkpoint(family), **(ONE if family != "sd3" else {}), **options)
    wanted = estimate_with(config, policy_of(config), data())
    found = estimate_memory(config)
    assert wanted.keys() >= PASSES
    assert dict(found) == pytest.approx(dict(wanted), rel=0.05)


@pytest.mark.parametrize("rank", [0, 2])
def test_activations_are_what_torch_saves(checkpoint, rank):
    config = config_of(checkpoint("sd3"), dtype="float32", lora_rank=rank, **LENGTH)
    policy = policy_of(config)
    conditioning = conditioning_of(policy, Request("a cat"), 1.0)
    kept, own = {}, {p.untyped_storage().data_ptr() for p in policy.module.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        velocity = _velocity(policy, conditioning, (4, 4, 4), 8)
    saved = sum(size for size, _ in kept.values())
    del velocity
    counted = learning_bytes(policy, conditioning, (4, 4, 4), 8)
    assert saved < counted < 1.3 * saved
    assert all(p.grad is None for p in policy.module.parameters())


@pytest.mark.slow
def test_what_each_option_saves(checkpoint):
    folder = checkpoint("sd3")
    size = {"height": 64, "width": 64}
    # Options that save different things go together.
    few = {"gradient_checkpointing": True, "vae_tiling": True, "vae_slicing": True}
    few["offload"] = ["text_encoders", "vae"]
    plain, saving, small = (
        # With weights, whose passes are faster and, as above, those of a pipeline without them.
        dict(estimate_with(config, policy_of(config), data()))
        for options, learn in (({}, {}), (few, {}), ({}, {"micro_batch_steps": 1}))
        for config in [config_of(folder, engine=size, learn=learn, **LOW, **LENGTH, **options)]
    )
    assert saving["learning/activations"] < 0.8 * plain["learning/activations"]
    assert saving["decoding/pixels"] < 0.5 * plain["decoding/pixels"]
    assert small["learning/activations"] < 0.2 * plain["learning/activations"]
    away = saving["encoding/text encoders"] + saving["decoding/autoencoder"]
    assert away == plain["encoders and decoder"] and "encoders and decoder" not in saving
    assert peak(saving | {name: plain[name] for name in PASSES}) < peak(plain)


@pytest.mark.parametrize("nbits", [4, 8])
@pytest.mark.usefixtures("no_passes")
def test_codes_and_scales_of_low_bits_are_counted(checkpoint, nbits):
    transform = [{"name": "compression.bnb_quantize", "nbits": nbits}]
    config = config_of(checkpoint("sd3"), dtype="bfloat16", lora_rank=2, transform=transform)
    module = policy_of(config).module
    tensors = {id(t): t.nbytes for t in (*module.parameters(), *module.buffers(), *scales_of(module))}
    assert estimate_memory(config)["weights"] == sum(tensors.values())
    whole = estimate_memory(config_of(checkpoint("sd3"), dtype="bfloat16", lora_rank=2))["weights"]
    linear = [m for m in module.modules() if type(m).__module__ == "bitsandbytes.nn.modules"]
    saved = sum(m.in_features * m.out_features for m in linear) * (2 - nbits / 8)
    scales = sum(t.nbytes for t in scales_of(module))
    assert whole - sum(tensors.values()) == saved - scales


@pytest.mark.usefixtures("no_passes")
def test_encoders_do_not_count_once_all_prompts_are_encoded(checkpoint, tmp_path):
    config = config_of(checkpoint("sd3"), encoded_prompts=str(tmp_path), **LOW, **LENGTH)
    assert "encoding/text encoders" in estimate_memory(config)
    assert not [*tmp_path.rglob("*.safetensors")]  # an estimate writes nothing
    policy = policy_of(config)
    for prompt in data():
        policy.condition(Request(prompt.text))
    found = estimate_memory(config)
    assert "encoding/text encoders" not in found and "encoders and decoder" in found


def test_cards_have_a_tenth_to_spare():
    assert [smallest_card(share * 24 * 2**30) for share in (0.5, 0.89, 0.91)] == [16, 24, 40]
    assert smallest_card(1e9) == 8 and smallest_card(2e11) == 0


@pytest.mark.usefixtures("no_passes")
def test_paths_by_hand(checkpoint):
    config = config_of(checkpoint("sd3_pixel"), dtype="float32")
    ends = 2 * 2 * (3 * 32 * 32) * 4  # 2 prompts with 2 images of 3 x 32 x 32 in 4 bytes
    assert estimate_memory(config)["paths"] == ends
    (engine,) = config.rollout.engine
    recorded = replace(engine, options={**engine.options, "solver": "diffusion.flow_sde"})
    config = replace(config, rollout=replace(config.rollout, engine=(recorded,)))
    assert estimate_memory(config)["paths"] == ends * (1 + 3)  # the start, and what each of 3 steps ends with


def test_models_of_rewards_are_counted_without_their_weights(checkpoint, tmp_path):
    from transformers import AutoModel, AutoModelForImageTextToText

    from tests.vision import tiny as models

    folder = models.make("qwen2_5_vl", tmp_path / "judge")
    size = lambda kind: sum(p.numel() for p in kind.from_pretrained(folder).parameters())
    body, whole = size(AutoModel), size(AutoModelForImageTextToText)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    judge = {"name": "vision.tokens", "model": str(folder), "frozen": True, "dtype": "float32"}
    server = {"name": "chat_completions", "url": "http://x/v1", "model": "m"}
    for reward, wanted in (
        ({"name": "diffusion.edit_reward", "model": str(folder)}, 2 * body),
        ({"name": "diffusion.edit_reward", "model": str(folder), "dtype": "float32"}, 4 * body),
        (
            {"name": "diffusion.edit_score", "engine": {"name": "vision.generate"}, "policy": judge},
            4 * whole,
        ),
        ({"name": "judge", "engine": {"name": "vision.generate"}, "policy": judge}, 4 * whole),
        ({"name": "judge", "engine": server}, 0),
        ({"name": "diffusion.edit_reward", "model": "x", "workers": {"num": 1}}, 0),
    ):
        config = parse({**PLAIN, "rewards": [reward]}, Config)
        assert sum(reward_models(config, cast(Any, None), []).values()) == pytest.approx(wanted, rel=1e-3), (
            reward
        )
