"""The demo of tools: its photographs and lessons, and all of it at a small size."""

from __future__ import annotations

import json
import shutil

import numpy
import pytest
import torch
from PIL import Image

from examples.video_grounding.demo import build
from examples.visual_tools import demo
from examples.visual_tools.photo_signs import PhotoSigns, name_of, search_call
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import parse_calls
from mmrl.core.types import Message
from mmrl.vision.datasets.conversations import conversations
from mmrl.vision.datasets.visual_qa import visual_qa
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.tools.call_formats import parser_of
from mmrl.vision.tools.functions import Tool
from mmrl.vision.tools.images import crop, zoom
from mmrl.vision.tools.pool import run_calls
from mmrl.vision.tools.replies import Limits
from mmrl.vision.tools.search import search

SHADES = {"red": (250, 20, 20), "blue": (20, 20, 250), "green": (10, 200, 10)}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Hearts that are discs, and two photographs that are noise."""
    folder = tmp_path_factory.mktemp("assets")
    (folder / "hearts").mkdir()
    (folder / "photographs").mkdir()
    rows, across = numpy.mgrid[:32, :32] - 15.5
    for colour, shade in SHADES.items():
        pixels = numpy.zeros((32, 32, 4), numpy.uint8)
        pixels[..., :3], pixels[..., 3] = shade, 255 * (numpy.hypot(rows, across) < 15)
        Image.fromarray(pixels).save(folder / "hearts" / f"{colour}_heart.png")
    noise = numpy.random.default_rng(0).integers(0, 256, (2, 60, 100, 3), numpy.uint8)
    for name, pixels in zip(("beach", "wood"), noise, strict=True):
        Image.fromarray(pixels).save(folder / "photographs" / f"{name}.png")
    return folder


def signs(assets, output, look, slip):
    made = PhotoSigns(
        stream=Stream(0), objects=str(assets / "hearts"), photographs=str(assets / "photographs"),
        num_train=12, num_test=6, labelled=8, look=look, slip=slip,
    )  # fmt: skip
    return made.build(output)


@pytest.fixture(scope="module")
def made(assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("signs")
    return folder, signs(assets, folder, look=1.0, slip=0.0)


def test_a_box_of_the_photograph_shows_the_heart(made):
    folder, counts = made
    assert counts == {
        "train": 4, "test": 6, "train_search": 4, "test_search": 6, "captions": 18,
        "direct": 8, "skills": 32, "search_skills": 80, "lessons": 16,
    }  # fmt: skip
    for row in lines(folder / "train.jsonl") + lines(folder / "direct.jsonl"):
        pixels = numpy.asarray(Image.open(folder / row["crop"])).astype(int)
        near = numpy.abs(pixels - SHADES[row["answer"]]).sum(-1) < 90
        assert pixels.shape == (32, 32, 3) and near.sum() > 60  # a disc of 13 pixels has 133
        others = [
            numpy.abs(pixels - shade).sum(-1) < 90 for name, shade in SHADES.items() if name != row["answer"]
        ]
        assert not numpy.any(others)
        left, upper = (160 * place + 64 for place in row["places"])
        whole = Image.open(folder / row["image"])
        assert whole.size == (640, 640)
        assert (numpy.asarray(whole.crop((left, upper, left + 32, upper + 32))) == pixels).all()


def test_captions_find_signs_by_name_and_lessons_are_about_other_photographs(made):
    folder, _ = made
    captions = str(folder / "captions.jsonl")
    asked = lines(folder / "train_search.jsonl") + lines(folder / "test_search.jsonl")
    for row in asked:
        assert row["name"] in row["question"]
        assert search(row["name"].lower(), path=captions, most=1) == row["caption"]
        assert row["answer"] in row["caption"].split()
        assert row["image"] == row["close" if row["seen"] else "far"]
        close, crop = (numpy.asarray(Image.open(folder / row[key])) for key in ("close", "crop"))
        assert (close[2:-2, 2:-2] == crop[2:-2, 2:-2]).all() and (close[:, :2] == (255, 0, 204)).all()
    assert [row["seen"] for row in asked[:4]] == [False, True, False, True]
    taught = {image for row in lines(folder / "lessons.jsonl") for image in row["images"]}
    assert taught.isdisjoint({row[key] for row in asked for key in ("image", "crop", "close", "far")})
    assert len({name_of(number) for number in range(3600)}) == 3600


def test_search_skills_answer_what_is_seen_at_once_too_and_ask_by_several_names(made):
    folder, _ = made
    photographs = {row["id"]: row for row in lines(folder / "direct.jsonl")}
    firsts, names, calls = {}, {}, []
    for row in lines(folder / "search_skills.jsonl"):
        at = " ".join(row["id"].split()[:2])
        photograph = photographs[at]
        name = row["prompt"][1]["content"].split()[-1].rstrip("?")
        seen = row["images"] == [photograph["close"]]
        assert seen or row["images"] == [photograph["far"]]
        if len(row["prompt"]) == 2:
            firsts.setdefault((at, name, seen), []).append(row["completion"])
            names.setdefault(at, set()).add(name)
        else:
            assert row["completion"] == photograph["answer"]
            assert row["prompt"][3]["content"] == photograph["caption"].replace(photograph["name"], name)
            calls.append(row["prompt"][2]["content"])
    for (at, name, seen), turns in firsts.items():
        assert turns == [search_call(name), *([photographs[at]["answer"]] if seen else [])]
        if name == photographs[at]["name"]:
            assert seen == (int(at.split()[1]) % 2 == 1)
    assert sum(seen for _, _, seen in firsts) == 16 == len(firsts) / 2
    # Names of other photographs, which held-out questions ask for, are not used up.
    others = {name_of(number) for number in range(12 + 6)}
    assert all(names[at] & others == {photographs[at]["name"]} for at in photographs)
    assert len(set(calls)) == 32


def test_lessons_look_where_the_sign_is_unless_they_slip(assets, made, tmp_path):
    folder, _ = made
    places = {row["id"]: row["places"] for row in lines(folder / "direct.jsonl")}
    firsts = [row for row in lines(folder / "lessons.jsonl") if row["id"].endswith("turn 0")]
    assert len(firsts) == 8
    for row in firsts:
        (call,) = parse_calls(row["completion"])
        left, upper, right, lower = call.arguments["box"]
        assert [left, upper] == [160 * place + 64 for place in places[" ".join(row["id"].split()[:2])]]
        assert (right - left, lower - upper) == (32, 32)
    signs(assets, tmp_path, look=0.0, slip=1.0)
    rows = lines(tmp_path / "lessons.jsonl")
    assert not any("tool_call" in row["completion"] for row in rows)
    slips = [row["prompt"][2]["content"] for row in rows if row["id"].endswith("turn 1")]
    boxes = [call.arguments["box"] for text in slips for call in parse_calls(text)]
    assert len(boxes) == 8 and len({tuple(box) for box in boxes}) > 3


def test_boxes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="a quarter of a cell"):
        PhotoSigns(stream=Stream(0), objects="", photographs="", box=64)


def test_lessons_have_the_tokens_of_conversations_with_tools(made, tmp_path):
    folder, _ = made
    build("examples/visual_tools/model.yaml", tmp_path, 0)
    policy = Tokens(model=str(tmp_path), dtype="float32")
    encoder, looked = policy.prompt_encoder, [Tool.of(crop), Tool.of(zoom)]
    lessons = {prompt.uid: prompt for prompt in conversations(path=str(folder / "lessons.jsonl"))}
    for asked in visual_qa(path=str(folder / "direct.jsonl"))[:3]:
        begin, whole = (lessons[f"{asked.uid} turn {turn}"] for turn in range(2))
        schemas = tuple(tool.schema for tool in looked)
        assert parser_of(encoder, schemas, parse_calls) is parse_calls  # as the template writes a call
        read = encoder.encode(asked, schemas)
        assert read.ids.tolist() == encoder.encode(begin).ids.tolist()
        ids = encoder.answer(begin.answers[0].text)
        assert len(ids) == 12  # of a box 7, the words around it 3, the tool's name and the end
        (call,) = parse_calls(encoder.text(ids))
        tool = next(tool for tool in looked if tool.name == call.name)
        answers = run_calls([(tool, tool.bind(call.arguments, asked.media))], Limits(100, 10**6))
        after = encoder.extend(read, ids, *encoder.replies([Message("tool", answers[0].parts)], schemas))
        expected = encoder.encode(whole)
        assert after.ids.tolist() == expected.ids.tolist()
        assert torch.equal(after.media["pixel_values"], expected.media["pixel_values"])
    begin, named = conversations(path=str(folder / "search_skills.jsonl"))[:2]
    call = search_call(begin.text.split()[-1].rstrip("?"))
    assert begin.answers[0].text == call and len(encoder.answer(call)) == 7
    after = encoder.extend(encoder.encode(begin), encoder.answer(call), *named.messages[-1:])
    assert after.ids.tolist() == encoder.encode(named).ids.tolist()


def test_differences_are_paired_and_told_for_every_seed():
    def found(right):
        return {"accuracy": torch.tensor(right), "calls": torch.ones(2), "visual tokens": torch.ones(2)}

    names = ("search_skills", "search", "search_otc")
    seeds = {
        0: (dict(zip(names, map(found, ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0])), strict=True)), {}),
        1: (dict(zip(names, map(found, ([0.0, 1.0], [1.0, 1.0], [0.0, 1.0])), strict=True)), {}),
    }
    runs, differences = demo.compared(seeds, "search")
    assert [runs[name].metrics["accuracy"] for name in ("start", "GRPO", "OTC-PO")] == [0.25, 0.75, 0.75]
    apart = differences["OTC-PO against GRPO"]["accuracy"]
    assert apart["by seed"] == [0.5, -0.5] and apart["mean"] == 0
    assert apart["interval"] == [-0.5, 0.5]


@pytest.mark.parametrize(("view", "changes"), [("with", []), ("without", demo.LARGER_VIEW)])
def test_a_view_has_the_visual_tokens_that_are_counted(made, tmp_path, view, changes):
    folder, _ = made
    build("examples/visual_tools/model.yaml", tmp_path, 0, changes)
    policy = Tokens(model=str(tmp_path), dtype="float32")
    encoder, image = policy.prompt_encoder, policy.model.config.image_token_id
    (asked, *_), (named, *_) = (
        visual_qa(path=str(folder / f"{name}.jsonl")) for name in ("test", "test_search")
    )
    schemas = (Tool.of(crop).schema, Tool.of(zoom).schema)
    read = encoder.encode(asked, schemas)
    visual = lambda ids: int((ids == image).sum())
    assert visual(read.ids) == demo.TOKENS[view]
    if view == "without":
        return
    assert visual(encoder.encode(named).ids) == demo.TOKENS[view]
    box = {"image": 0, "box": [64, 64, 96, 96]}
    for tool, arguments in ((Tool.of(crop), box), (Tool.of(zoom), {**box, "factor": 2.0})):
        (said,) = run_calls([(tool, tool.bind(arguments, asked.media))], Limits(100, 10**6))
        replies = encoder.replies([Message("tool", said.parts)], schemas)
        assert visual(encoder.extend(read, encoder.answer("red"), *replies).ids) == 2 * demo.TOKENS[view]


@pytest.mark.slow
def test_the_demo_runs_at_a_small_size(assets, tmp_path, monkeypatch):
    def built(config, output, *options):
        if config.endswith("objects.yaml"):  # they come from a package, which tests do not need
            shutil.copytree(assets / "hearts", output / "heart")
        else:
            build(config, output, *options)

    monkeypatch.setattr(demo, "build", built)
    small = ["max_steps=2", "rollout.num_prompts=8"]
    changes = {
        "signs": ["build.num_train=12", "build.num_test=6", "build.labelled=8"],
        **dict.fromkeys(("skills", "imitation", "direct", "search_skills"), small),
    }  # fmt: skip
    overrides = ["max_steps=2", "rollout.num_prompts=2", "rollout.num_generations=2"]
    photographs, output = assets / "photographs", tmp_path / "look"
    look = demo.demo(photographs, output, 0, 1, overrides, changes, parts=["look"])
    assert look["seeds"] == [0] and "search" not in look
    assert json.loads((output / "summary.json").read_text()) == look
    assert look["look"]["no tools, GRPO"]["metrics"]["visual tokens"] == 36
    assert 16 <= look["look"]["tools, GRPO"]["metrics"]["visual tokens"] <= 32
    assert "Look before you answer" in (output / "report.html").read_text()
    search = demo.demo(photographs, tmp_path / "search", 0, 2, overrides, changes, parts=["search"])
    assert search["seeds"] == [0, 1]
    assert set(search["search"]) == {"start", "GRPO", "OTC-PO", "differences"}
    apart = search["search"]["differences"]["OTC-PO against GRPO"]["accuracy"]
    assert len(apart["by seed"]) == 2
