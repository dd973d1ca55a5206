"""The demo of images as tokens: captions, images, rewards, the tokenizer, and all of it at a small size."""

from __future__ import annotations

import json

import pytest
import torch

from examples.picture_tokens import demo
from examples.picture_tokens.counted_shapes import (
    ASKED,
    SIDE,
    Asked,
    asked_of,
    cells_of,
    counted_shapes,
    draw_image,
    ink_amount,
    painted,
    plan,
    read_cells,
)
from examples.picture_tokens.tiny_painter import ShapeTokenizer, decode, draw, encode, k_means
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt

# Tells images of an untrained model apart.
MEAN = "{name: 'tests.diffusion.test_pool:brightness', label: judge}"
TWO = Asked(2, "red", "circle")


def prompt(text):
    return Prompt("p", (Message("user", (Part(text),)),))


def score(reward, asked, image, **options):
    (value,) = reward([prompt(asked.caption)], [Outcome(image=image)], **options)
    return value


def test_captions_are_read_and_one_count_of_every_kind_is_held_out():
    assert len({one.caption for one in ASKED}) == 48 and TWO.caption == "two red circles"
    assert all(asked_of(f"Plan, then draw {one.caption}") == one for one in ASKED)
    assert asked_of("a red circle") is None
    held_out = [one for one in ASKED if one.held_out]
    assert len({(one.colour, one.shape) for one in held_out}) == len(held_out) == 12
    assert {one.count for one in held_out} == {1, 2, 3, 4}
    assert plan(TWO, [0, 3]) == "red circle top left, bottom right"


def test_the_judge_reads_all_drawings_and_ink_is_blind_to_shapes():
    generator = Stream(0).fixed("test")
    for asked in ASKED:
        image = draw_image(asked, cells_of(asked, generator))
        assert read_cells(image) == [(asked.colour, asked.shape)] * asked.count
        assert score(counted_shapes, asked, image, part="all") == 1
        assert score(ink_amount, asked, image) == pytest.approx(1)
    three, blue = (
        draw_image(Asked(3, "red", "circle"), [0, 1, 2]),
        draw_image(Asked(2, "blue", "circle"), [0, 1]),
    )
    for image, right in ((three, [0, 1, 1, 2 / 3, 0]), (blue, [1, 0, 1, 2 / 3, 0])):
        parts = ("count", "colour", "shape", "mean", "all")
        assert [score(counted_shapes, TWO, image, part=part) for part in parts] == pytest.approx(right)
    assert score(ink_amount, TWO, three) == pytest.approx(1 / 2)  # half as much again
    blot = torch.full((3, SIDE, SIDE), 255, dtype=torch.uint8)
    blot[1:, :8, :7] = 0  # a bar of 56 pixels: as red as two circles of pi 3^2 = 28.3
    assert score(counted_shapes, TWO, blot) == 0 and score(ink_amount, TWO, blot) > 0.95
    empty = torch.full_like(blot, 255)
    assert score(counted_shapes, TWO, empty) == score(ink_amount, TWO, empty) == 0
    assert counted_shapes([prompt("a cat")], [Outcome(image=blot)]) == [None]


def test_about_the_asked_shares_are_wrong_and_planned():
    rows = painted(stream=Stream(0), count=300, wrong=0.4, planned=0.5)
    right = [counted_shapes([row], [row.answers[0]], part="all")[0] for row in rows]
    planned = [row for row in rows if row.answers[0].text]
    assert 0.5 < sum(right) / 300 < 0.7 and 120 < len(planned) < 180
    assert all(row.text.startswith("plan, then draw") for row in planned)
    assert not any(asked_of(row.text).held_out for row in rows)


def test_k_means_finds_clusters():
    points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [9.0, 0.0], [9.0, 2.0], [0.0, 9.0]])
    assert sorted(k_means(points, 3).tolist()) == [[0.0, 1.0], [0.0, 9.0], [9.0, 1.0]]


def test_the_tokenizer_is_trained_through_the_classes_of_the_library(tmp_path):
    from transformers import Emu3ForConditionalGeneration

    small = {"width": 16, "layers": 1, "codes": 16, "plain_steps": 2, "batch_size": 4}
    built = ShapeTokenizer(stream=Stream(0), steps=4, **small).build(tmp_path)
    assert 0 <= built["readable"] <= 1
    vq = Emu3ForConditionalGeneration.from_pretrained(tmp_path).model.vqmodel
    pixels = draw(2, Stream(0).fixed("test")) / 127.5 - 1
    with torch.no_grad():
        latents, codes = encode(vq, pixels), vq.quantize.embedding.weight
        nearest = torch.cdist(latents.flatten(0, 2), codes).argmin(1).view(2, 4, 4)
        theirs = torch.stack(vq.encode(pixels, [(SIDE, SIDE)] * 2).image_tokens)
        assert torch.equal(nearest, theirs)
        assert torch.allclose(decode(vq, codes[theirs]), vq.decode(theirs), atol=1e-6)


@pytest.mark.slow
def test_the_demo_runs_at_a_small_size(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "RUNS", ("dpo-judge",))
    one, sizes = "evaluation.num_generations=1", ("width=16", "layers=1", "steps=3", "plain_steps=1")
    small = {
        "model": [f"build.{size}" for size in (*sizes, "batch_size=4")],
        "cold_start": ["max_steps=1", "data.count=8", "rollout.num_prompts=4", one],
        "pool": [
            "build.num_generations=2",
            "build.limit=4",
            f"build.rewards=[{MEAN}]",
        ],
    }
    overrides = ["max_steps=1", "rollout.num_prompts=2", "rollout.num_generations=2", one]
    summary = demo.demo(tmp_path, overrides=overrides, changes=small)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    for run in demo.RUNS:
        metrics = summary[run]["metrics"]
        for where in ("in domain", "held out"):
            gain = metrics[f"right, {where}"] - summary["start"]["metrics"][f"right, {where}"]
            assert metrics[f"gain in right, {where}"] == pytest.approx(gain)
    assert "Drawing with tokens" in (tmp_path / "report.html").read_text()
