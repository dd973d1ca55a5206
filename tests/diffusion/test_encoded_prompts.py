"""Encoded prompts on disk: equal to fresh ones, shared, and without encoders once they are there."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.config.loading import ConfigError
from mmrl.diffusion import loading
from mmrl.diffusion.encoded_prompts import DamagedFile, EncodedPrompts, check_usable
from mmrl.diffusion.model_family import Request
from mmrl.diffusion.policies.flow import Flow
from mmrl.runtime.content_hash import of_weights
from tests.diffusion.flows import asked, denoise, flow, picture

TEXTS = ("a cat", "two dogs")


def images(policy):
    rows = denoise(policy, guidance_scale=4.0, solver="diffusion.flow_sde").rollout(asked(*TEXTS))
    return torch.stack([row.outcomes[-1].image for row in rows]), torch.stack([r.steps.path for r in rows])


def cached(model, folder, **options):
    return flow(model, encoded_prompts=str(folder), max_sequence_length=16, **options)


@pytest.fixture
def reads(monkeypatch):
    """Names of the parts that are read late."""
    names, load = [], loading.load_part

    def read(model, part, **options):
        names.append(part)
        return load(model, part, **options)

    monkeypatch.setattr(loading, "load_part", read)
    return names


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_images_are_equal_and_the_second_run_reads_no_encoder(checkpoint, tmp_path, reads, dtype):
    model = checkpoint("sd3")
    wanted = images(flow(model, max_sequence_length=16, dtype=dtype))
    for parts in (["text_encoder", "text_encoder_2"], []):
        policy = cached(model, tmp_path, dtype=dtype)
        assert all(map(torch.equal, images(policy), wanted))
        assert sorted(reads) == parts
        reads.clear()
    assert len([*tmp_path.rglob("*.safetensors")]) == 3  # two texts and the empty one
    assert all(file.suffix == ".safetensors" for file in tmp_path.rglob("*") if file.is_file())


def test_every_setting_of_the_encoders_has_its_own_file(checkpoint, tmp_path):
    model = checkpoint("flux2_klein")
    made = lambda **options: flow(
        model, **{"encoded_prompts": str(tmp_path), "max_sequence_length": 120, **options}
    )
    request = Request("a cat", (picture(1, 64),), (1, 32, 32))
    others = [
        Request("a dog", request.images, request.size),
        Request("a cat", (picture(2, 64),), request.size),
        Request("a cat", request.images, (1, 64, 64)),
    ]
    policy = made()
    for one in (request, *others, request):
        policy.condition(one)
    policy.condition(request, negative=True)
    made(vae_tiling=True).condition(request)
    made(max_sequence_length=121).condition(request)
    assert len([*tmp_path.rglob("*.safetensors")]) == 1 + len(others) + 3
    assert len([*tmp_path.iterdir()]) == 1
    made(dtype="float32").condition(request)
    assert len([*tmp_path.iterdir()]) == 2


def test_other_encoders_have_another_folder_and_another_network_has_not(checkpoint, tmp_path):
    model = shutil.copytree(checkpoint("sd3"), tmp_path / "model")
    place = lambda: cached(model, tmp_path / "cache").encoded.folder
    before = place()

    def change(part):
        (file,) = (model / part).glob("*.safetensors")
        weights = load_file(file)
        weights[max(weights)].view(-1)[-1] += 1
        save_file(weights, file, {"format": "pt"})

    change("transformer")
    assert place() == before
    change("text_encoder_2")
    assert (after := place()) != before
    file = model / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 76}))
    assert place() not in (before, after)


def test_a_damaged_file_is_named(checkpoint, tmp_path):
    cached(checkpoint("sd3"), tmp_path).condition(Request("a cat"))
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=f"cannot read the encoded prompt '{file}'.*delete the file"):
        cached(checkpoint("sd3"), tmp_path).condition(Request("a cat"))
    with pytest.raises(DamagedFile, match="^cannot read the encoded prompt"):  # no fault of the row
        denoise(cached(checkpoint("sd3"), tmp_path), solver="diffusion.flow_sde").rollout(asked("a cat"))
    file.unlink()
    cached(checkpoint("sd3"), tmp_path).condition(Request("a cat"))


def test_a_failed_write_leaves_nothing(tmp_path):
    encoded = EncodedPrompts(str(tmp_path), [])
    with pytest.raises(AttributeError):
        encoded.get(["a"], lambda: {"states": "no tensor"})
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_the_hash_of_a_policy_does_not_depend_on_what_was_read(checkpoint, tmp_path):
    policies = [cached(checkpoint("sd3"), tmp_path) for _ in range(2)]
    assert of_weights(policies[0]) == of_weights(policies[1]) != of_weights(flow(checkpoint("sd3")))


def test_a_whole_pipeline_is_saved_with_its_encoders(checkpoint, tmp_path):
    cached(checkpoint("sd3"), tmp_path / "cache").save(tmp_path / "model")
    assert images(flow(tmp_path / "model"))[0].equal(images(flow(checkpoint("sd3")))[0])


def test_wrong_folders_are_refused_before_weights_are_read(checkpoint, tmp_path):
    (tmp_path / "file").touch()
    options = {"model": str(checkpoint("sd3")), "encoded_prompts": str(tmp_path / "file")}
    with pytest.raises(ConfigError, match="`encoded_prompts` is .*, a file"):
        Flow.check_folders(options)
    with pytest.raises(ConfigError, match="needs a `model` that is a folder"):
        check_usable(str(tmp_path), "python:pipe")
