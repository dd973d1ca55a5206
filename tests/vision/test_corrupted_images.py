"""Corrupted prompts: crops, noise and missing media, and the engines that answer them."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Message, Part, Prompt
from mmrl.vision.decoding.decoding import CachedReader
from mmrl.vision.engines.derived_answers import DropoutNtp
from mmrl.vision.engines.generate import Generate
from mmrl.vision.media.prompts import add_frame_noise, add_noise, map_frames, random_crop, without_media
from tests.vision import mixed as asked
from tests.vision import tiny
from tests.vision.test_contrastive_decoding import FAMILY, pictures, plainly, said


@pytest.fixture
def policy(exact):
    return exact(FAMILY)


# ---- dropout NTP


def test_dropout_ntp_continues_half_of_the_answers_without_the_image(policy):
    stream = Stream(0)
    engine = DropoutNtp(Generate(policy, stream=stream, max_completion_length=8))
    prompts = [prompt for prompt in pictures() for _ in range(2)]
    rows = engine.rollout(prompts)
    whole, tails = rows[:2], rows[2:]
    assert said(whole) == said(asked.generate(policy, pictures()))
    for row, tail in zip(whole, tails, strict=True):
        half = row.length // 2
        assert tail.prompt.uid == row.prompt.uid
        assert tail.steps.ids[:half].tolist() == row.steps.ids[:half].tolist()
        assert not tail.notes["logp"][:half].any() and (tail.notes["logp"][half:] < 0).all()
        blind = plainly(policy, without_media(row.prompt), tail.steps.ids).log_softmax(-1)
        wanted = blind.gather(1, tail.steps.ids[:, None])[half:, 0]
        torch.testing.assert_close(tail.notes["logp"][half:], wanted, rtol=0, atol=2e-5)
        assert (
            row.outcomes[-1].recorded["contrast_alpha"],
            tail.outcomes[-1].recorded["contrast_alpha"],
        ) == (0.0, 1.0)
        assert row.on_policy and not tail.on_policy


def test_rows_that_began_alike_leave_the_batch_one_by_one(policy, monkeypatch):
    monkeypatch.setattr(policy.prompt_encoder, "end", [policy.prompt_encoder.end[0], *range(0, 256, 8)])
    prompts = [prompt for prompt in pictures() for _ in range(12)]

    def tails(size):
        inner = Generate(policy, stream=Stream(0), max_completion_length=12, batch_size=size)
        return said(DropoutNtp(inner, share=0.8).rollout(prompts))

    assert tails(0) == tails(1)


# ---- corrupted images


def test_a_crop_is_a_small_part_enlarged(generator):
    # an image whose red says how far right a pixel stands, its green how far down
    right = torch.arange(100)[None].expand(80, 100) * 2
    down = torch.arange(80)[:, None].expand(80, 100) * 2
    pixels = torch.stack([right, down, torch.zeros_like(down)])[None].to(torch.uint8)
    for _ in range(10):
        cut = random_crop(Frames(pixels, torch.zeros(1)), generator, (0.01, 0.2)).pixels
        assert cut.shape == pixels.shape and cut.dtype == torch.uint8
        wide, tall = ((cut[0, c].amax() - cut[0, c].amin()).item() / 2 for c in (0, 1))
        assert 0 < wide * tall / 8000 < 0.2


def test_the_noise_of_vcd_keeps_the_share_that_its_schedule_says(generator):
    # at the first step almost all is kept; at step 500 sqrt of the product of 501 factors
    values = torch.ones(20000)
    assert abs(add_noise(values, generator, 0).mean() - 1) < 1e-3
    rate = torch.sigmoid(torch.linspace(-6, 6, 1000)) * (0.005 - 1e-5) + 1e-5
    kept = math.exp(float(torch.log1p(-rate[:501].double()).sum()))
    half = add_noise(values, generator, 500)
    assert abs(half.mean() - math.sqrt(kept)) < 0.02 and abs(half.var() - (1 - kept)) < 0.02
    frames = Frames(torch.full((1, 3, 50, 50), 200, dtype=torch.uint8), torch.zeros(1))
    grainy = add_frame_noise(frames, generator, 500).pixels.float()
    assert grainy.std() > 20 and abs(grainy.mean() - 127.5 - 72.5 * math.sqrt(kept)) < 10


def test_a_blind_prompt_has_words_alone(policy):
    prompt = without_media(tiny.ask("a", tiny.picture(), "what"))
    assert not prompt.media and prompt.text == "what"
    assert not set(policy.prompt_encoder.encode(prompt).ids.tolist()) & set(
        policy.prompt_encoder.placeholders
    )
    mute = Prompt(
        "b", (Message("user", tuple(part for part in tiny.ask("b", tiny.picture()).messages[0].parts)),)
    )
    assert without_media(mute).messages[0].parts == (Part(""),)
    assert (
        CachedReader(policy, [policy.prompt_encoder.encode(without_media(mute))]).read(None).isfinite().all()
    )


def test_spoiling_leaves_the_prompt_as_it_was():
    prompt = tiny.ask("a", tiny.picture(), "what")
    black = map_frames(prompt, lambda frames: Frames(frames.pixels * 0, frames.times))
    assert not black.media[0].load().pixels.any() and prompt.media[0].load().pixels.any()
    assert (black.uid, black.text) == (prompt.uid, prompt.text)
