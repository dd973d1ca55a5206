"""Wan 2.2 A14B: rows go through the network of their time, and both or one are trained."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from mmrl.config.loading import ConfigError
from mmrl.diffusion import adapters
from mmrl.diffusion.model_families.wan import Wan
from mmrl.diffusion.model_families.wan_image_to_video import WanImageToVideo
from mmrl.diffusion.model_family import Request
from mmrl.diffusion.policies.flow import Flow
from mmrl.diffusion.staged_network import StagedNetwork
from tests.diffusion import tiny
from tests.diffusion.families.common import (
    NUM_STEPS,
    Family,
    FamilyTests,
    family_for,
    noise,
    ours,
    prompt_of,
    velocity,
)
from tests.diffusion.families.test_wan import ASKED, IMAGES, ROUNDING, call
from tests.diffusion.flows import denoise, flow

SIZE = (5, 32, 32)
A14B = Family("wan_a14b", call, 64, ((), ()), (SIZE, (5, 32, 48)), ASKED, rounding=ROUNDING)


class TestTextToVideo(FamilyTests):
    case = A14B


class TestImageToVideo(FamilyTests):
    case = Family("wan_a14b_i2v", call, 64, IMAGES, (SIZE, (5, 32, 48)), ASKED, rounding=ROUNDING)

    @pytest.fixture(autouse=True)
    def without_clip(self, monkeypatch):
        """peft skips the targets that read CLIP's tokens; the checks look for every target."""
        monkeypatch.setattr(WanImageToVideo, "targets", Wan.targets)


def policy_of(checkpoint, likelihood="diffusion.transition", **options):
    return flow(checkpoint("wan_a14b"), likelihood, max_sequence_length=64, **options)


def rollout(policy, guidance=3.0, **options):
    """Sample two videos in four steps: two of them by the network of high noise."""
    engine = denoise(
        policy,
        num_frames=5,
        num_inference_steps=4,
        solver="diffusion.flow_sde",
        guidance_scale=guidance,
        **options,
    )
    assert engine.times[1] > 0.7 > engine.times[2] > 0
    return engine.rollout([prompt_of(Request(text)) for text in ("a cat", "a dog")])


@torch.no_grad()
def changed(policy):
    """Change the trained weights, as training would."""
    generator = torch.Generator().manual_seed(5)
    for parameter in policy.module.parameters():
        if parameter.requires_grad:
            parameter += torch.randn(parameter.shape, generator=generator).to(parameter) / 8
    return policy


def test_a_time_at_the_boundary_is_of_the_network_of_high_noise():
    staged = StagedNetwork({}, {})
    staged.lowest = [0.9, 0.0]
    times = torch.tensor([1.0, 0.9, 0.8999, 0.0])
    assert staged.stages(times).tolist() == [0, 0, 1, 1]
    assert staged.stages(times.double()).tolist() == [0, 0, 1, 1]  # float32 rounds 0.9 down
    staged.lowest = [0.9, 0.5, 0.0]
    assert staged.stages(torch.tensor([0.95, 0.7, 0.2])).tolist() == [0, 1, 2]


@torch.no_grad()
def test_rows_on_both_sides_of_the_boundary_are_those_of_each_network(pipeline):
    pipe = pipeline("wan_a14b")
    family = family_for(pipe)
    conditions = family.encode(pipe, [Request(text, (), SIZE) for text in ("a", "bb", "c", "dd")], 64)
    latents, sigma = noise(pipe, SIZE, rows=4), torch.tensor([0.2, 0.9, 0.7, 0.5])
    together = velocity(pipe, latents, sigma, conditions, 3.0, conditions[::-1])
    for i, network in enumerate((pipe.transformer_2, pipe.transformer, pipe.transformer, pipe.transformer_2)):
        one = slice(i, i + 1)
        led, away = (
            family.velocity(network, latents[one], sigma[one], family.stack([condition]), torch.ones(1))
            for condition in (conditions[i], conditions[::-1][i])
        )
        assert_close(together[one], family.guide(led, away, 3.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scales", [(4.0, 3.0), (2.0, 6.0)])
@torch.no_grad()
def test_each_network_has_its_guidance_scale_as_in_the_pipeline(pipeline, scales):
    pipe, latents = pipeline("wan_a14b"), noise(pipeline("wan_a14b"), SIZE)
    family, request = family_for(pipe), Request("a cat", (), SIZE)
    wanted = pipe(
        prompt="a cat", negative_prompt="a dog", latents=latents, guidance_scale=scales[0],
        guidance_scale_2=scales[1], num_inference_steps=4, num_frames=5, height=32, width=32,
        max_sequence_length=64, output_type="pt", return_dict=False,
    )[0]  # fmt: skip
    conditions, negatives = family.encode(pipe, [request], 64), family.encode(pipe, [Request("a dog")], 64)
    times = family.sigmas(pipe, 4, tuple(latents.shape[1:]))
    for now, following in zip(times, times[1:], strict=False):
        led = velocity(pipe, latents, now[None], conditions, scales, negatives)
        latents = latents + (following - now) * led
    assert_close(family.decode(pipe, latents).clamp(0, 1), wanted, atol=1e-4, rtol=0)


def test_rows_remember_both_scales(checkpoint):
    policy = policy_of(checkpoint)
    rows = rollout(policy, guidance_scale_2=2.0)
    assert all(row.steps.guidance == (3.0, 2.0) for row in rows)
    batch = policy.collate(rows)
    assert_close(policy(batch).logp.float(), batch.notes["logp"], atol=1e-5, rtol=1e-6)
    plain = rollout(policy)
    assert not torch.equal(plain[0].steps.path[-1], rows[0].steps.path[-1])


def test_a_second_scale_needs_a_second_network(checkpoint):
    with pytest.raises(ConfigError, match="`guidance_scale_2` .* is for a second network"):
        denoise(flow(checkpoint("wan"), "diffusion.matching"), num_frames=5, guidance_scale_2=3.0)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("networks", "trained"),
    [("both", {"transformer", "transformer_2"}), ("high", {"transformer"}), ("low", {"transformer_2"})],
)
def test_the_chosen_networks_learn_and_take_part_in_every_batch(checkpoint, networks, trained, rank):
    policy = policy_of(checkpoint, networks=networks, lora_rank=rank, gradient_checkpointing=True)
    learning = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
    assert {name.split(".")[2] for name in learning} == trained == set(policy.trained)
    batch = policy.collate(rollout(policy))
    for step in (0, 2):  # of high noise, and of low noise
        policy.module.zero_grad()
        policy(batch.select(torch.arange(2), torch.tensor([step]))).logp.sum().backward()
        assert all(p.grad is not None for p in learning.values())  # as data parallelism wants it
        moved = {name.split(".")[2] for name, p in learning.items() if p.grad.any()}
        assert moved == {("transformer", "transformer_2")[step // 2]} & trained


@pytest.mark.parametrize("networks", ["both", "low"])
def test_saved_adapters_make_the_same_video_in_a_plain_pipeline(checkpoint, pipeline, tmp_path, networks):
    policy = changed(policy_of(checkpoint, networks=networks, lora_rank=2, dtype="float32"))
    policy.save(tmp_path / "saved")
    files = {str(path.relative_to(tmp_path / "saved")) for path in (tmp_path / "saved").rglob("*.*")}
    low, high = f"transformer_2/{adapters.FILE}", adapters.FILE
    assert files == ({low, high} if networks == "both" else {low})
    request, latents = Request("a cat", (), SIZE), noise(policy.pipe, SIZE)
    made = ours(A14B, policy.pipe, request, latents, 4.0)
    assert (made - ours(A14B, pipeline("wan_a14b"), request, latents, 4.0)).abs().max() > 1e-3
    plain = tiny.load(checkpoint("wan_a14b"))
    if networks == "both":
        plain.load_lora_weights(str(tmp_path / "saved"))
    plain.load_lora_weights(str(tmp_path / "saved" / "transformer_2"), load_into_transformer_2=True)
    wanted = call(plain, request, latents, 4.0, NUM_STEPS, "")
    assert_close(made, wanted, atol=2e-5, rtol=0)
    for options in ({}, {"adapter": str(tmp_path / "saved")}):
        again = policy_of(checkpoint, networks=networks, lora_rank=2, dtype="float32", **options)
        Flow.check_folders({"model": str(checkpoint("wan_a14b")), "networks": networks, **options})
        if not options:
            again.load(tmp_path / "saved")
        assert_close(ours(A14B, again.pipe, request, latents, 4.0), made, atol=0, rtol=0)
    policy.merge()
    assert_close(ours(A14B, policy.pipe, request, latents, 4.0), made, atol=1e-4, rtol=0)


def test_whole_networks_are_saved_and_loaded_bit_for_bit(checkpoint, tmp_path):
    policy = changed(policy_of(checkpoint, dtype="float32"))
    policy.save(tmp_path / "saved")
    Flow.check_folders({"model": str(checkpoint("wan_a14b"))}, str(tmp_path / "saved"))
    again = policy_of(checkpoint, networks="low", dtype="float32")
    again.load(tmp_path / "saved")
    found, wanted = again.module.state_dict(), policy.module.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    for name in ("transformer", "transformer_2"):
        saved = load_file(tmp_path / "saved" / name / "diffusion_pytorch_model.safetensors")
        assert torch.equal(saved["proj_out.weight"], getattr(policy.pipe, name).proj_out.weight)


def test_an_adapter_of_a_network_that_is_not_trained_is_refused(checkpoint, tmp_path):
    policy_of(checkpoint, lora_rank=2, dtype="float32").save(tmp_path)
    with pytest.raises(ConfigError, match="an adapter of the network 'transformer', which is not trained"):
        policy_of(checkpoint, networks="low", lora_rank=2, adapter=str(tmp_path))
    (tmp_path / "transformer_2" / adapters.FILE).unlink()
    options = {"model": str(checkpoint("wan_a14b")), "lora_rank": 2, "adapter": str(tmp_path)}
    with pytest.raises(ConfigError, match="there is no adapter in .*transformer_2"):
        Flow.check_folders(options)


@pytest.mark.parametrize(("networks", "never", "fine"), [("high", (2, 3), (0, 2)), ("low", (0, 2), (1, 3))])
def test_stochastic_steps_of_a_frozen_network_alone_are_refused(checkpoint, networks, never, fine):
    policy = policy_of(checkpoint, networks=networks, lora_rank=2)
    given = {"num_frames": 5, "num_inference_steps": 4, "solver": "diffusion.flow_sde"}
    name = {"high": "transformer", "low": "transformer_2"}[networks]
    with pytest.raises(ConfigError, match=f"one of the trained network '{name}'.*networks: both"):
        denoise(policy, stochastic=never, **given)
    denoise(policy, stochastic=fine, **given)


@pytest.mark.parametrize("networks", ["high", "low"])
def test_a_pipeline_of_one_network_has_none_to_choose(checkpoint, networks):
    options = {"model": str(checkpoint("wan")), "networks": networks}
    with pytest.raises(ConfigError, match=f"`networks: {networks}` chooses .* this model has one network"):
        Flow.check_folders(options)
    with pytest.raises(ConfigError, match="leave `networks` out"):
        flow(checkpoint("wan"), networks=networks)
