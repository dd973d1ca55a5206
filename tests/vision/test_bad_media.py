"""Bad images, masks and videos are one line of `mmrl check` and `mmrl train`, with exit code 2."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from mmrl.cli import main
from mmrl.core.types import PromptError
from tests.data.test_video import encode
from tests.support.toys import plan
from tests.vision import tiny

EDITS = {"name": "diffusion.edits"}
FIRST = {"name": "diffusion.first_frames", "num_frames": 9, "height": 16, "width": 16}
BAD = {
    "an edit without its image": (EDITS, {"prompt": "red"}, "rows.jsonl:2: wanted an image in 'edit_image'"),
    "a mask of another size": (
        EDITS,
        {"image": "a.png", "mask": "small.png", "prompt": "red"},
        "rows.jsonl:2: the mask is 4 x 4 pixels, and its image 8 x 8",
    ),
    "a recorded video that is too short": (
        FIRST,
        {"image": "a.png", "prompt": "it moves", "video": "short.mp4"},
        "short.mp4' has 4 frames, but 9 are wanted (num_frames)",
    ),
    "a recorded video without a codec": (
        FIRST,
        {"image": "a.png", "prompt": "it moves", "video": "strange.mp4"},
        "strange.mp4' holds a video in a codec that this build of ffmpeg does not know",
    ),
}


@pytest.fixture
def home(tmp_path):
    """A folder with images, a short video, and one whose header names an unknown codec."""
    for name, side in (("a.png", 8), ("small.png", 4)):
        Image.new("RGB", (side, side), "white").save(tmp_path / name)
    data = encode(tmp_path / "short.mp4", 4).read_bytes()
    assert data.count(b"avc1") > 1  # the brand of the file, then the format of its track
    (tmp_path / "strange.mp4").write_bytes(data.replace(b"avc1", b"zzz9").replace(b"zzz9", b"avc1", 1))
    return tmp_path


def run_of(home, data, *rows, **changes):
    """Write a run and its rows."""
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = plan(home / "out", **{"data": {**data, "path": str(home / "rows.jsonl")}, **changes})
    (home / "run.yaml").write_text(json.dumps(given))
    return str(home / "run.yaml")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_one_line_of_the_check(home, capsys, name):
    data, row, words = BAD[name]
    path = run_of(home, data, {"image": "a.png", "prompt": "blue"}, row)
    assert main(["check", path]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("wrong ") and words in line


def test_dropped_rows_are_counted(home, capsys, caplog):
    bad, good = {"prompt": "red"}, {"image": "a.png", "prompt": "blue"}
    path = run_of(home, {**EDITS, "bad_rows": "drop"}, good, bad, {**good, "prompt": "green"}, bad)
    assert main(["check", path, "--data"]) == 0
    assert caplog.messages.count(f"{home / 'rows.jsonl'}: 2 of 4 rows are left out") >= 1


@pytest.mark.parametrize("name", [name for name in BAD if "recorded" not in name])
def test_a_bad_row_ends_a_run_before_its_model_is_loaded(home, capsys, name):
    data, row, words = BAD[name]
    assert main(["train", run_of(home, data, {"image": "a.png", "prompt": "blue"}, row)]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("video", "words"),
    [
        ("strange.mp4", "strange.mp4' holds a video in a codec that this build of ffmpeg does not know"),
        ("nothing.mp4", "there is no file 'nothing.mp4'"),
    ],
)
def test_a_video_that_cannot_be_read_is_one_line(home, checkpoint, capsys, video, words):
    row = {"prompt": "<video>When?", "video": video, "solution": "1"}
    data = {"name": "vision.conversations"}
    policy = {"name": "vision.tokens", "model": str(checkpoint("qwen3_vl"))}
    engine = {"engine": ["vision.generate"], "num_prompts": 1}
    path = run_of(home, data, row, policy=policy, rollout=engine, rewards=["vision.short_answer"])
    assert main(["check", path, "--data"]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("wrong ") and words in line
    assert main(["train", path]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_video_is_too_short_for_some_models_only(exact):
    for family in ("qwen3_vl", "qwen2_5_vl"):  # the second reads a single frame twice
        encoder, asked = exact(family).prompt_encoder, tiny.ask("v", tiny.clip(1), "when")
        if family == "qwen2_5_vl":
            assert len(encoder.encode(asked).ids)
            continue
        with pytest.raises(
            PromptError, match="prompt 'v': t:1 .*; a video of one frame is too short for some"
        ):
            encoder.encode(asked)
