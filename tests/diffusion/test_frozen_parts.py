"""Frozen parts come and go with their use, and autoencoders work on tiles where they can."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmrl.diffusion.frozen_parts import FrozenParts, set_vae_options
from tests.diffusion.flows import asked, denoise, flow

CPU, OTHER = torch.device("cpu"), torch.device("meta")  # a part that is moved to `meta` has lost its data


def parts(*names):
    return SimpleNamespace(components={name: nn.Linear(2, size) for size, name in enumerate(names, 1)})


def places(pipe):
    return {name: part.weight.device.type for name, part in pipe.components.items()}


def test_parts_stay_where_they_were_used():
    pipe = parts("transformer", "vae", "text_encoder", "text_encoder_2")
    FrozenParts(pipe, {"transformer"}, ()).on(OTHER, "text_encoders")
    there = {"text_encoder": "meta", "text_encoder_2": "meta"}
    assert places(pipe) == {"transformer": "cpu", "vae": "cpu", **there}


def test_offloaded_parts_move_once_for_all_uses_until_a_network_needs_room(monkeypatch):
    pipe, moves = parts("transformer", "vae", "text_encoder"), []
    frozen = FrozenParts(pipe, {"transformer"}, ("vae",))
    monkeypatch.setattr(frozen, "_move", lambda group, device: moves.append((group, device.type)))
    for _ in range(3):
        frozen.on(OTHER, "vae")
    frozen.make_room()
    frozen.make_room()
    frozen.on(OTHER, "text_encoders")
    frozen.make_room()
    assert moves == [("vae", "meta"), ("vae", "cpu"), ("text_encoders", "meta")]
    frozen.on(OTHER, "vae")
    frozen.on(CPU, "vae")  # the network was moved
    assert moves[3:] == [("vae", "meta"), ("vae", "cpu")]


def test_a_batch_of_prompts_costs_one_move_of_the_encoders(checkpoint, monkeypatch):
    policy, moves = flow(checkpoint("sd3"), offload=["text_encoders", "vae"], max_sequence_length=16), []
    move = policy.frozen._move
    monkeypatch.setattr(policy.frozen, "_move", lambda *given: (moves.append(given[0]), move(*given)))
    engine = denoise(policy, guidance_scale=4.0, solver="diffusion.flow_sde")
    engine.rollout(asked("a cat", "a dog", "a boat", num=2))
    # Four texts (one is the empty one) are encoded, then the network needs room, then images are decoded.
    assert moves == ["text_encoders", "text_encoders", "vae"]


def test_sizes_of_groups():
    frozen = FrozenParts(parts("transformer", "vae", "text_encoder", "image_encoder"), {"transformer"}, ())
    # A layer of n outputs has 3 n numbers of 4 bytes.
    assert (frozen.nbytes("vae"), frozen.nbytes("text_encoders")) == (24, 36 + 48)


def test_an_autoencoder_that_cannot_is_named(checkpoint):
    with pytest.raises(ValueError, match="`vae_tiling` is on, but the autoencoder 'Linear'"):
        set_vae_options(nn.Linear(1, 1), tiling=True, slicing=False)
    policy = flow(checkpoint("sd3"), vae_tiling=True, vae_slicing=True, max_sequence_length=16)
    assert policy.pipe.vae.use_tiling and policy.pipe.vae.use_slicing


def test_a_policy_that_offloads_makes_the_same_images(checkpoint):
    images = []
    for offload in ((), ("text_encoders", "vae")):
        policy = flow(checkpoint("sd3"), offload=offload, max_sequence_length=16)
        engine = denoise(policy, solver="diffusion.flow_sde")
        images.append([row.outcomes[-1].image for row in engine.rollout(asked("a cat"))])
    assert torch.equal(*[torch.stack(several) for several in images])


def test_lora_goes_where_targets_say(checkpoint):
    policy = flow(checkpoint("sd3"), lora_rank=2, targets=["attn.to_q"], max_sequence_length=16)
    adapted = [name for name, value in policy.network.named_parameters() if value.requires_grad]
    assert adapted and all("attn.to_q" in name for name in adapted)
    with pytest.raises(ValueError, match="nowhere"):
        flow(checkpoint("sd3"), lora_rank=2, targets=["nowhere"], max_sequence_length=16)
