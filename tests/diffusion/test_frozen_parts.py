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
    frozen = FrozenParts(pipe, {"transformer"}, ())
    with frozen.on(OTHER, "text_encoders"):
        assert places(pipe) == {
            "transformer": "cpu",
            "vae": "cpu",
            "text_encoder": "meta",
            "text_encoder_2": "meta",
        }
    assert places(pipe)["text_encoder"] == "meta"


def test_offloaded_parts_return_also_after_an_error(monkeypatch):
    pipe, moves = parts("transformer", "vae", "text_encoder"), []
    frozen = FrozenParts(pipe, {"transformer"}, ("vae",))
    monkeypatch.setattr(frozen, "_move", lambda group, device: moves.append((group, device.type)))
    with pytest.raises(RuntimeError), frozen.on(OTHER, "text_encoders", "vae"):
        raise RuntimeError("out of memory")
    assert moves == [("text_encoders", "meta"), ("vae", "meta"), ("vae", "cpu")]


def test_bytes_on_the_device():
    pipe = parts("transformer", "vae", "text_encoder", "image_encoder")
    # A layer of n outputs has 3 n numbers of 4 bytes: vae 24, text encoder 36, image encoder 48.
    wanted = {(): 108, ("vae",): 84 + 24, ("text_encoders",): 24 + 84, ("vae", "text_encoders"): 84}
    for offload, size in wanted.items():
        assert FrozenParts(pipe, {"transformer"}, offload).device_bytes() == size, offload


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
