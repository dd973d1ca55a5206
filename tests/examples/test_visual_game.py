"""The demo of self-play: its data, its lessons, and all of it at a small size."""

from __future__ import annotations

import json

import numpy
import pytest
import torch
from PIL import Image

from examples.visual_game import demo
from examples.visual_game.changed_scenes import ChangedScenes
from examples.visual_game.spy_lessons import ShortSpy, SpyLessons, about_colour, no_pixels, vote
from mmrl.core.rng import Stream
from mmrl.core.types import Media, Message, Part, Prompt
from mmrl.vision.datasets.image_pairs import image_pairs
from mmrl.vision.games.spy import INVALID

SHADES = {"red": (250, 20, 20), "blue": (20, 20, 250)}
LOOKS = [(shape, colour) for shape in ("circle", "rectangle", "triangle") for colour in SHADES]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write a data set of easy-VQA's form: one colour per image, and questions that reveal all of it."""
    folder = tmp_path_factory.mktemp("easy_vqa")
    for split, count in (("train", 48), ("test", 12)):
        (folder / split / "images").mkdir(parents=True)
        asked = []
        for number in range(count):
            shape, colour = LOOKS[number % len(LOOKS)]
            pixels = numpy.full((64, 64, 3), 255, numpy.uint8)
            pixels[16:48, 16:48] = SHADES[colour]
            Image.fromarray(pixels).save(folder / split / "images" / f"{number}.png")
            asked += [
                ["what shape is present?", shape, number],
                [f"what color is the {shape}?", colour, number],
            ]
        (folder / split / "questions.json").write_text(json.dumps(asked))
    return folder


def lessons(source, output, **options):
    built = SpyLessons(stream=Stream(0), source=str(source), labelled=24, games=10, slip=0.0, **options)
    return built.build(output)


def looks_of(path):
    return LOOKS[int(path.rpartition("/")[2].removesuffix(".png")) % len(LOOKS)]


def test_pairs_differ_in_colour_and_lessons_are_about_other_images(source, tmp_path):
    counts = lessons(source, tmp_path)
    # a question about the colour of each image; three clues and two votes of each game
    assert counts == {"train_pairs": 24, "lessons": 24 + 50, "test_pairs": 12, "test": 12}
    for split in ("train", "test"):
        for row in lines(tmp_path / f"{split}_pairs.jsonl"):
            (shape, colour), (other_shape, other_colour) = looks_of(row["original"]), looks_of(row["changed"])
            assert shape == other_shape and colour != other_colour
    played = {row[key] for row in lines(tmp_path / "train_pairs.jsonl") for key in ("original", "changed")}
    assert played.isdisjoint(row["image"] for row in lines(tmp_path / "lessons.jsonl"))
    assert len(image_pairs(path=str(tmp_path / "test_pairs.jsonl"))) == 12
    lessons(source, tmp_path / "again")
    assert lines(tmp_path / "again" / "lessons.jsonl") == lines(tmp_path / "lessons.jsonl")


def test_questions_are_asked_that_the_colour_answers():
    asked = [
        ("what color is the circle?", "red"),
        ("is there a red shape?", "no"),
        ("is there not a teal shape?", "no"),
    ]
    assert all(about_colour(*pair) for pair in asked)
    others = [
        ("what shape is present?", "circle"),
        ("is there a red circle?", "yes"),
        ("is there a circle?", "no"),
    ]
    assert not any(about_colour(*pair) for pair in others)


def test_lessons_are_turns_of_the_game_by_players_who_see(source, tmp_path):
    lessons(source, tmp_path, guess=0.0, bluff=1.0)
    games = [row for row in lines(tmp_path / "lessons.jsonl") if row["id"].startswith("game")]
    first = [row for row in games if row["id"].startswith("game 0 ")]
    assert [row["question"].split()[-1] for row in first] == ["clue?"] * 3 + ["decide?"] * 2
    for row in games:
        _, colour = looks_of(row["image"])
        role, *clues, _ = row["question"].split()
        if role == "spy":
            assert row["answer"] in (clues or [colour])
        if role == "civilian":
            assert row["answer"] == colour
        if role == "voter":
            assert row["answer"] in ([clue for clue in clues if clue != colour] or clues)


def test_players_of_lessons_make_mistakes(source, tmp_path):
    lessons(source, tmp_path, guess=1.0, bluff=0.0)
    games = [row for row in lines(tmp_path / "lessons.jsonl") if row["id"].startswith("game")]
    spies = [row for row in games if row["question"].startswith("spy")]
    assert len(spies) == 10 and all(row["answer"] == looks_of(row["image"])[1] for row in spies)
    voters = [row for row in games if row["question"].startswith("voter")]
    # All three were honest, so that two of three clues are the colour: those who guess name it.
    assert any(row["answer"] == looks_of(row["image"])[1] for row in voters)


def test_a_vote_is_for_the_first_player_who_gave_the_clue():
    game = ShortSpy()
    images = (Part(media=Media("image", name, no_pixels)) for name in ("a", "b"))
    state = game.begin(Prompt("", (Message("user", tuple(images)),)), torch.Generator())
    for player, clue in (("1", "red"), ("2", "blue"), ("3", "blue")):
        state = game.act(state, player, clue)
    first, second = game.acting(state)
    assert game.observe(state, first)[0].parts[1].text == "voter red blue blue decide?"
    state = game.act(game.act(state, first, " blue "), second, "green")
    assert [vote for _, vote, _ in state.votes] == [2, INVALID] and game.acting(state) == ()


def test_scenes_differ_where_they_say(tmp_path):
    rows, across = numpy.mgrid[:32, :32] - 15.5
    soft = numpy.clip(16 - numpy.hypot(rows, across), 0, 1) * 255
    (tmp_path / "objects").mkdir()
    (tmp_path / "backgrounds").mkdir()
    for number in range(7):
        pixels = numpy.zeros((32, 32, 4), numpy.uint8)
        pixels[..., :3], pixels[..., 3] = (30 * number, 200 - 20 * number, 90), soft
        Image.fromarray(pixels).save(tmp_path / "objects" / f"{number}.png")
    Image.new("RGB", (90, 60), (120, 120, 120)).save(tmp_path / "backgrounds" / "grey.png")
    made = ChangedScenes(
        stream=Stream(0), objects=str(tmp_path / "objects"), backgrounds=str(tmp_path / "backgrounds"),
        num_train=6, num_test=1, side=64, fewest=3, most=4, smallest=0.25, largest=0.3, changes=2,
    )  # fmt: skip
    assert made.build(tmp_path / "out") == {"train": 6, "test": 1}
    for row in lines(tmp_path / "out" / "train.jsonl"):
        one, other = (
            numpy.asarray(Image.open(tmp_path / "out" / row[name])).astype(int)
            for name in ("original", "changed")
        )
        differs = [a != b for a, b in zip(row["original_objects"], row["changed_objects"], strict=True)]
        assert [at for at, there in enumerate(differs) if there] == row["places"] and len(row["places"]) == 2
        apart = numpy.abs(one - other).sum(-1) > 0
        inside = numpy.zeros_like(apart)
        for at in row["places"]:
            left, top, right, bottom = row["boxes"][at]
            assert apart[top:bottom, left:right].any()
            inside[top:bottom, left:right] = True
        assert not apart[~inside].any()
    assert len(image_pairs(path=str(tmp_path / "out" / "test.jsonl"))) == 1
    with pytest.raises(ValueError, match="4 objects cannot be replaced in scenes of 3"):
        ChangedScenes(stream=Stream(0), objects="", backgrounds="", fewest=3, most=4, changes=4)


def test_a_vote_names_a_clue_that_does_not_fit():
    clues, generator = [(1, "red"), (2, "blue"), (3, "green")], torch.Generator()
    votes = [{vote(clues, seen, generator) for _ in range(40)} for seen in ("red", "black")]
    assert votes == [{"blue", "green"}, {"red", "blue", "green"}]
    assert {vote(clues[:1], "red", generator) for _ in range(5)} == {"red"}


def test_the_win_rate_is_the_mean_over_both_sides():
    found = {
        "start: civilians won": torch.tensor([1.0, 0.0]), "start: spy won": torch.tensor([0.0, 1.0]),
        "self-play: civilians won": torch.tensor([1.0, 1.0]), "self-play: spy won": torch.tensor([0.0, 1.0]),
        "start: accuracy": torch.tensor([0.0, 1.0, 1.0]), "self-play: accuracy": torch.ones(3),
    }  # fmt: skip
    shown = demo.compared({0: found})
    assert shown["start"].metrics == pytest.approx(
        {"win rate": 0.5, "civilians won": 0.5, "spy won": 0.5, "accuracy": 2 / 3}
    )
    assert shown["difference"].metrics == pytest.approx(
        {"win rate": 0.25, "civilians won": 0.5, "spy won": 0.0, "accuracy": 1 / 3}
    )
    low, high = shown["difference"].intervals["win rate"]
    assert 0 <= low <= 0.25 <= high <= 0.5


@pytest.mark.slow
def test_the_demo_runs_at_a_small_size(source, tmp_path):
    changes = {
        "data": [f"build.source={source}", "build.labelled=24", "build.games=10"],
        "evaluate": ["evaluation.data.limit=6"],
        "imitation": ["max_steps=2", "rollout.num_prompts=8"],
        "play": ["evaluation.data.limit=4"],
    }
    overrides = ["max_steps=2", "rollout.num_prompts=2"]
    summary = demo.demo(tmp_path, seeds=2, overrides=overrides, changes=changes)
    assert summary["seeds"] == [0, 1] and len(summary["difference by seed"]["accuracy"]) == 2
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    for name in ("start", "self-play"):
        metrics = summary[name]["metrics"]
        assert metrics["win rate"] == pytest.approx((metrics["civilians won"] + metrics["spy won"]) / 2)
        assert all(0 <= value <= 1 for value in metrics.values())
    assert "Who is the spy" in (tmp_path / "report.html").read_text()
