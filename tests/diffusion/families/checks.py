"""Checks of a model family against its own pipeline of diffusers."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
import torch
from torch.testing import assert_close

from mmrl.core.types import Frames, Media, Message, Part, Prompt, PromptError
from mmrl.diffusion import adapters
from mmrl.diffusion.model_family import family_of, reading_words
from mmrl.diffusion.policies.flow import Flow, FlowNetwork
from tests.diffusion import tiny
from tests.diffusion.flows import denoise, flow
from tests.diffusion.test_lora import adapted, trained, with_network

MATCHING = {"name": "diffusion.matching", "draws": 2, "time_type": "uniform"}


def family_for(pipe):
    return family_of(type(pipe).__name__)


def noise(pipe, size, rows=2):
    """Draw latents for results of (frames, height, width)."""
    frames, height, width = size
    shape = family_for(pipe).latent_shape(pipe, height, width, frames)
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(3))


def stacked(family, conditions, negatives=()):
    """Batch conditions and those of negative prompts together, as a policy does."""
    rows = len(conditions)
    both = family.stack([*conditions, *negatives])
    texts = {name: value[:rows] for name, value in both.items()}
    return texts, {name: value[rows:] for name, value in both.items()} if negatives else None


@torch.no_grad()
def follow(pipe, requests, latents, guidance=1.0, *, limit, negative="", num_steps=3):
    """Follow the flow with Euler steps, as a policy does, and decode."""
    family = family_for(pipe)
    flow_network = FlowNetwork(pipe.transformer, family, torch.float32)
    conditions, negatives = family.encode(pipe, requests, limit), []
    if family.passes(guidance) > 1:
        away = [replace(request, text=negative) for request in requests]
        negatives = [family.encode_negative(pipe, one, limit) for one in away]
    texts, empty = stacked(family, conditions, negatives)
    times = family.sigmas(pipe, num_steps, tuple(latents.shape[1:]))
    for here, there in zip(times, times[1:], strict=False):
        velocity = flow_network(latents, here.expand(len(latents)), texts, empty, guidance)
        latents = latents + (there - here) * velocity
    return family.decode(pipe, latents).clamp(0, 1)


def check_euler(pipe, theirs, requests, *, limit, asked, atol=2e-5, rows=2):
    """Compare results with the pipeline's: `theirs(request, latents, guidance, negative)` makes one row."""
    latents = noise(pipe, requests[0].size, rows=len(requests))
    for guidance, negative in asked:
        made = follow(pipe, requests, latents, guidance, limit=limit, negative=negative)
        wanted = torch.cat(
            [
                theirs(request, row[None], guidance, negative)
                for request, row in zip(requests, latents, strict=True)
            ]
        )
        assert made.shape == wanted.shape
        assert wanted.std() > 0.03
        assert_close(made, wanted, atol=atol, rtol=0)


def check_effects(pipe, requests, *, limit):
    """Check that text, guidance and negative prompt change the result."""
    latents = noise(pipe, requests[0].size, rows=1).repeat_interleave(2, dim=0)
    plain = follow(pipe, requests, latents, limit=limit)
    led = follow(pipe, requests, latents, 4.0, limit=limit)
    away = follow(pipe, requests, latents, 4.0, limit=limit, negative="an ugly one")
    assert (plain[0] - plain[1]).abs().max() > 1e-3
    assert (plain - led).abs().max() > 1e-3
    assert (away - led).abs().max() > 1e-4


@torch.no_grad()
def check_batch(pipe, requests, *, limit, atol=1e-5):
    """Compare a batch of conditions with every condition alone."""
    family = family_for(pipe)
    latents = noise(pipe, requests[0].size, rows=len(requests))
    conditions = family.encode(pipe, requests, limit)
    assert all(value.device.type == "cpu" for condition in conditions for value in condition.values())
    sigma = torch.linspace(0.9, 0.3, len(requests))
    scale = torch.full_like(sigma, 2.0)
    both = family.velocity(pipe.transformer, latents, sigma, family.stack(conditions), scale)
    for i, condition in enumerate(conditions):
        row = slice(i, i + 1)
        inputs = latents[row], sigma[row], family.stack([condition]), scale[row]
        assert_close(family.velocity(pipe.transformer, *inputs)[0], both[i], atol=atol, rtol=0)
        (alone,) = family.encode(pipe, [requests[i]], limit)
        for name, value in condition.items():
            assert_close(value, alone[name], atol=atol, rtol=0)


def check_adapter(pipe, folder, tmp_path, make, load=lambda plain, path: plain.load_lora_weights(str(path))):
    """Compare an adapter with itself after plain diffusers has read it; `make(pipe)` makes a result."""
    network = trained(adapted(pipe))
    before, wanted = make(pipe), make(with_network(pipe, network))
    assert (wanted - before).abs().max() > 1e-3
    adapters.save_lora(network, tmp_path)
    plain = tiny.load(folder)
    load(plain, tmp_path)
    assert_close(make(plain), wanted, atol=2e-6, rtol=0)


def prompt_of(request):
    """Make a prompt of the images and the text of a request."""
    shown = [Frames(image[None], torch.zeros(1)) for image in request.images]
    parts = [Part(media=Media("image", f"image {i}", lambda one=one: one)) for i, one in enumerate(shown)]
    return Prompt(uid=request.text, messages=(Message("user", (*parts, Part(request.text))),))


def prompts(*requests):
    """Make two prompts of every request."""
    return [prompt_of(request) for request in requests for _ in range(2)]


def check_policy(folder, requests, *, limit, guidance=4.0):
    """Let an adapter sample and learn one step, with both likelihoods."""
    frames, height, width = requests[0].size
    size = {"num_frames": frames, "height": height, "width": width, "guidance_scale": guidance}
    options = {"max_sequence_length": limit, "lora_rank": 2}
    policy = flow(folder, "diffusion.transition", **options)
    engine = denoise(policy, solver="diffusion.flow_sde", num_inference_steps=3, **size)
    rows = engine.rollout(prompts(*requests))
    batch = policy.collate(rows)
    said = policy(batch)
    assert_close(said.logp.float(), batch.notes["logp"], atol=2e-6, rtol=0)
    assert_close(said.logp, sampled(policy, batch, rows), atol=1e-8, rtol=0)
    check_learns(policy, batch)
    policy = flow(folder, MATCHING, **options)
    rows = denoise(policy, num_inference_steps=2, **size).rollout(prompts(*requests[:1]))
    batch = policy.collate(rows)
    assert policy(batch).logp.isfinite().all()
    check_learns(policy, batch)


@torch.no_grad()
def sampled(policy, batch, rows):
    """Compute log-probabilities as an engine does: all rows at one step, then the next."""
    logps = []
    for at in rows[0].steps.at.tolist():
        here, there = (rows[0].steps.times[i].expand(len(rows)) for i in (at, at + 1))
        now, following = (torch.stack([row.steps.path[i] for row in rows]) for i in (at, at + 1))
        velocity = policy.velocity(now, here, batch.steps.conditioning)
        step = rows[0].steps.solver(now, velocity, here, there, rows[0].steps.times[1])
        logps.append(step.logp(following))
    return torch.stack(logps, 1)


def check_learns(policy, batch):
    """Check that every part of the adapter gets a gradient, and that a step along it changes the policy."""
    before = policy(batch).logp
    before.sum().backward()
    fresh = {name: value for name, value in policy.network.named_parameters() if "lora_B" in name}
    assert len(fresh) > 4
    for name, value in fresh.items():
        assert value.grad is not None and value.grad.abs().max() > 0, name
    with torch.no_grad():
        for value in fresh.values():
            value += 0.1 * value.grad / value.grad.norm()
        assert (policy(batch).logp - before).abs().max() > 1e-6


def check_refusals(pipe, folder, request, *, limit, long="cat " * 400):
    """Check that texts too long and wrong numbers of images are refused, without weights."""
    family = family_for(pipe)
    with pytest.raises(ValueError, match=r"tokens long, and the encoder .* takes"):
        family.encode(pipe, [request, replace(request, text=long)], limit)
    check = Flow.prompt_check({"model": str(folder), "max_sequence_length": limit})
    check(prompts(request)[0])
    with pytest.raises(PromptError, match="tokens long"):
        check(prompts(replace(request, text=long))[0])
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    fewest, most = family.images
    for wrong in {fewest - 1, most + 1} - {-1}:
        with pytest.raises(PromptError, match=f"the prompt has {wrong} images"):
            check(prompts(replace(request, images=(image,) * wrong))[0])


def check_control_words(pipe, request, *, limit, monkeypatch):
    """Check that words of a text make no control token of any text encoder."""
    tokenizers = {key: part for key, part in pipe.components.items() if hasattr(part, "added_tokens_decoder")}
    special = {number for part in tokenizers.values() for number in part.all_special_ids}
    read = []  # the tokens that text encoders were given
    for tower in (part for key, part in pipe.components.items() if key.startswith("text_encoder") and part):
        forward = tower.forward

        def noted(*ids, forward=forward, **options):
            read.append((ids[0] if ids else options["input_ids"])[0].tolist())
            return forward(*ids, **options)

        monkeypatch.setattr(tower, "forward", noted)

    def control(text):
        read.clear()
        with torch.no_grad(), reading_words(pipe, text) as words:
            family_for(pipe).encode(pipe, [replace(request, text=words)], limit)
        assert {key: pipe.components[key] for key in tokenizers} == tokenizers  # as they were
        # Padding is one token many times.
        return [sum(token in special for token, _ in groupby(ids)) for ids in read]

    for word in sorted({word for part in tokenizers.values() for word in part.all_special_tokens}):
        plain = f"a{'x' * len(word)}b"  # as long, so that both are padded or none
        assert control(f"a{word}b") == control(plain), word
