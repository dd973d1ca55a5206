"""The editing demo: its images, its judge, its reward, its model, and all of it at a small size."""

from __future__ import annotations

import json
import re

import pytest
import torch

from examples.image_edits import demo
from examples.image_edits.rewards import edit_progress, edited_shapes, expected, read_scene
from examples.image_edits.shape_edits import BY_TEXT, EDITS, Edit, Placed, ShapeEdits, mask_image, scene_image
from examples.image_edits.tiny_editor import TinyEditor
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.diffusion.datasets.edits import edits
from mmrl.diffusion.loading import load_pipeline
from mmrl.diffusion.model_families.flux2_klein import Flux2Klein

SCENE = {"square": Placed("red", 0, 0), "bar": Placed("blue", 0, 1), "dot": Placed("green", 2, 2)}


def pixels(image):
    raw = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return raw.view(96, 96, 3).permute(2, 0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    output = tmp_path_factory.mktemp("edits")
    built = ShapeEdits(stream=Stream(0), num_pairs=60, num_train=6, num_test=6, wrong=0.5)
    assert built.build(output) == {"pairs": 60, "train": 6, "test": 6}
    return output


def test_edits_change_one_thing_and_some_cannot_be_made():
    assert len(EDITS) == 27  # 3 shapes: 4 colours, 4 directions, 1 removal
    assert Edit("recolour", "square", "blue").apply(SCENE) == SCENE | {"square": Placed("blue", 0, 0)}
    assert Edit("recolour", "square", "red").apply(SCENE) is None
    assert Edit("move", "square", "down").apply(SCENE) == SCENE | {"square": Placed("red", 1, 0)}
    assert Edit("move", "square", "left").apply(SCENE) is None  # out of the image
    assert Edit("move", "square", "right").apply(SCENE) is None  # onto the bar
    assert Edit("remove", "square", "").apply(SCENE).keys() == {"bar", "dot"}


def test_a_mask_is_white_in_the_cells_that_change():
    moved = Edit("move", "dot", "up").apply(SCENE)
    white = pixels(mask_image(SCENE, moved))[0] == 255
    assert white[32:96, 64:96].all() and white.sum() == 2 * 32 * 32


def test_recorded_edits_are_right_and_sources_are_not(folder):
    for prompt in edits(path=str(folder / "test.jsonl")):
        right, source = prompt.answers[0], Outcome(image=prompt.media[0].load().pixels[0])
        assert edited_shapes([prompt, prompt], [right, source]) == [1.0, 0.0]
        assert edit_progress([prompt, prompt], [right, source]) == [1.0, 0.0]


def test_the_judge_wants_all_shapes_their_places_and_an_empty_ground(folder):
    prompt = edits(path=str(folder / "test.jsonl"))[0]
    after = {shape: Placed(*placed) for shape, placed in prompt.columns["after"].items()}
    cells = {placed[1:] for placed in after.values()}
    free = next((row, column) for row in range(3) for column in range(3) if (row, column) not in cells)
    shape, placed = next(iter(after.items()))
    other_colour = "green" if placed.colour != "green" else "red"

    def judge(image):
        return edited_shapes([prompt], [Outcome(image=image)])

    assert judge(pixels(scene_image(after))) == [1.0]
    for wrong in (
        {name: each for name, each in after.items() if name != shape},
        after | {shape: Placed(placed.colour, *free)},
        after | {shape: placed._replace(colour=other_colour)},
    ):
        assert judge(pixels(scene_image(wrong))) == [0.0]
    stained = prompt.answers[0].image.clone()
    row, column = (32 * place for place in free)
    stained[:, row : row + 16, column : column + 16] = 0
    assert judge(stained) == [0.0]


def test_progress_is_the_share_of_the_change_that_is_done(folder):
    prompt = edits(path=str(folder / "train.jsonl"))[0]
    source, wanted = prompt.media[0].load().pixels[0].float(), prompt.answers[0].image.float()
    half = ((source + wanted) / 2).round().byte()
    away = (255 - wanted).byte()
    half, away = edit_progress([prompt, prompt], [Outcome(image=half), Outcome(image=away)])
    assert half == pytest.approx(0.5, abs=0.02) and -1 <= away < 0


def test_about_the_asked_share_of_the_pairs_is_wrong(folder):
    right = []
    for prompt in edits(path=str(folder / "pairs.jsonl")):
        before = read_scene(prompt.media[0].load().pixels[0])
        scene = {shape: Placed(colour, *cell) for cell, (colour, shape) in before.items()}
        after = BY_TEXT[prompt.text].apply(scene)
        assert after is not None
        right.append(expected(after) == read_scene(prompt.answers[0].image))
    assert 0.3 < sum(right) / len(right) < 0.7


def test_the_autoencoder_is_exact_and_words_are_their_embeddings(folder, tmp_path):
    """No image and no text is hard to read, so that all that the demo measures is the trained network."""
    TinyEditor(stream=Stream(0), rows=str(folder / "pairs.jsonl"), width=32).build(tmp_path)
    pipe, family = load_pipeline(str(tmp_path), dtype="float32"), Flux2Klein()
    image = pixels(scene_image(SCENE))
    with torch.no_grad():
        latents = family.compress(pipe, image[None] / 255)
        assert latents.shape == (1, 12, 3, 3)
        again = family.decode(pipe, latents)[0]
        one, other = (
            pipe.encode_prompt(text, max_sequence_length=6)[0][0]
            for text in ("make the square red", "make the square blue")
        )
    assert torch.allclose(again * 255, image.float(), atol=2)
    same = (one == other).all(1)  # all words but the colour
    assert same.sum() == 5 and not torch.allclose(one[~same], other[~same], atol=0.1)


def test_figures_are_means_over_prompts_and_seeds():
    asked = [Edit("move", "dot", "left"), Edit("remove", "dot", ""), Edit("recolour", "square", "red")]

    def table(*values):
        return dict.fromkeys((demo.JUDGE, *demo.REWARDS), torch.tensor(values, dtype=torch.float64))

    tables = {
        0: {"start": table(0.0, 1.0, 0.0), "AWM": table(1.0, 1.0, 0.0)},
        4: {"start": table(0.0, 0.0, 0.0), "AWM": table(1.0, 0.0, 1.0)},
    }
    shown = demo.compared(tables, asked)
    assert shown["start"].metrics["right"] == pytest.approx(1 / 6)
    assert shown["AWM"].metrics["right, seed 4"] == pytest.approx(2 / 3)
    assert shown["difference"].metrics == pytest.approx(
        {
            "right": 1 / 2, "right, recolour": 0.5, "right, move": 1.0, "right, remove": 0.0,
            "right, seed 0": 1 / 3, "right, seed 4": 2 / 3,
            "edit_progress": 1 / 2, "unmasked_identity": 1 / 2,
        }
    )  # fmt: skip
    low, high = shown["difference"].intervals["right"]
    assert 0 <= low <= 1 / 2 <= high <= 1


@pytest.mark.slow
def test_the_demo_runs_at_a_small_size(tmp_path):
    small = ["max_steps=1", "rollout.num_prompts=2"]
    changes = {
        "edits": ["build.num_pairs=12", "build.num_train=4", "build.num_test=8"],
        "model": ["build.width=32"],
        "matching": small,
    }
    summary = demo.demo(tmp_path, seeds=2, overrides=[*small, "rollout.num_generations=2"], changes=changes)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["seeds"] == [0, 1] and len(summary["processor seconds by seed"]) == 2
    metrics = {name: summary[name]["metrics"] for name in ("start", "AWM", "difference")}
    for what, change in metrics["difference"].items():
        assert change == pytest.approx(metrics["AWM"][what] - metrics["start"][what])
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=\s*['\"]?\s*(?:https?:|//|file:)|url\((?!#)", page)
    assert page.count("<img ") == 8 * 3  # a source and a result of both models
