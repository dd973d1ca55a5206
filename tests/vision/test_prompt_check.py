"""Prompts that a model cannot read are bad rows, found without its weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image

from examples.video_grounding.spliced_videos import write_video
from mmrl.build import check_data
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.core.types import Message, Outcome, Part, Prompt, PromptError
from mmrl.data.media_root import MediaRoot
from mmrl.data.video import FrameSampling
from mmrl.vision.policies.tokens import Tokens
from tests.support.toys import plan


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    """A model folder of 600 positions without weights."""
    folder = tmp_path_factory.mktemp("model") / "qwen"
    shutil.copytree(checkpoint("qwen2_5_vl"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 600
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def asked(text, *media, answers=()):
    parts = (*(Part(media=medium) for medium in media), Part(text))
    return Prompt("p", (Message("user", parts),), answers=tuple(Outcome(text=answer) for answer in answers))


def picture(folder, size):
    Image.new("RGB", size).save(folder / "a.png")
    return MediaRoot(folder).image("a.png")


def test_what_can_be_read_is_let_through(model, tmp_path):
    check = Tokens.prompt_check({"model": str(model)})
    for prompt in (
        asked("What?", answers=["this"]),
        asked("a " * 250),
        asked("What?", picture(tmp_path, (44, 30))),
        asked("What?", picture(tmp_path, (3000, 30))),
    ):
        check(prompt)


@pytest.mark.parametrize(
    ("text", "answers", "size", "words"),
    [
        ("a " * 1200, [], None, "positions, and the model has 600"),
        ("What?", ["b " * 1200], None, "positions, and the model has 600"),
        ("What is <|image_pad|>?", [], None, "media placeholder"),
        ("What?", ["<|image_pad|>"], None, "media placeholder"),
        ("What?", [], (2000, 5), "aspect ratio"),
        ("What?", [], (5, 2000), "aspect ratio"),
    ],
)
def test_what_cannot_be_read_is_named(model, tmp_path, text, answers, size, words):
    check = Tokens.prompt_check({"model": str(model)})
    with pytest.raises(PromptError, match=words) as caught:
        check(asked(text, *([picture(tmp_path, size)] if size else []), answers=answers))
    assert caught.value.uid == "p"


def test_the_length_of_a_video_is_known_undecoded(model, tmp_path, monkeypatch):
    shades = torch.zeros(4, 3, 56, 56, dtype=torch.uint8)
    write_video(tmp_path / "v.mp4", shades, 4, times=[0, 200, 400, 600])
    root, check = MediaRoot(tmp_path), Tokens.prompt_check({"model": str(model)})
    long = root.video("v.mp4", FrameSampling(max_frames=8))
    with pytest.raises(PromptError, match="positions, and the model has 600"):
        check(asked("What?", long))
    monkeypatch.setattr(MediaRoot, "decoded", None)  # nothing is decoded where the bound is enough
    check(asked("What?", root.video("v.mp4", FrameSampling(max_frames=8, end=60))))


def test_such_rows_are_bad_rows_of_their_data_set(model, tmp_path, caplog):
    rows = tmp_path / "rows.jsonl"
    texts = ["one", "a " * 1200, "two"]
    rows.write_text("".join(json.dumps({"question": text, "answer": "x"}) + "\n" for text in texts))
    data = {"name": "vision.visual_qa", "path": str(rows)}
    policy = {"name": "vision.tokens", "model": str(model)}
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: cannot read the prompt 'rows#1'"):
        check_data(parse(plan(tmp_path / "out", data=data, policy=policy), Config))
    check_data(parse(plan(tmp_path / "out", data={**data, "bad_rows": "drop"}, policy=policy), Config))
    assert sum("dropped" in record.message for record in caplog.records) == 1
