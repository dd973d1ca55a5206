"""`mmrl generate`: prompts of the command line, of rows and of the standard input."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from mmrl import load_engine
from mmrl.config.loading import ConfigError
from mmrl.core.types import Sound
from mmrl.data.sound import as_wav
from mmrl.inference.session import Session
from tests.cli.conftest import IMAGES, QUICK

ASKED = [{"role": "user", "content": "what fox"}]


@pytest.fixture(scope="module")
def session(model):
    return load_engine(model, QUICK)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_prompt_is_answered_as_by_the_engine(mmrl, model, session, image):
    code, lines, _ = mmrl("generate", model, *QUICK, "--prompt", "what fox", "--image", image)
    assert (code, lines) == (0, session.answer("what fox", images=[image]).splitlines())


def test_lines_of_the_input_are_answered_one_by_one(mmrl, model, session):
    code, lines, err = mmrl("generate", model, *QUICK, stdin="the quick fox\n\nbrown 0123\n")
    wanted = "\n".join(session.answer(["the quick fox", "brown 0123"])).splitlines()
    assert (code, lines, err.count("answering")) == (0, wanted, 0)


def test_rows_keep_their_columns(mmrl, model, session, image, tmp_path):
    asked = [
        {"question": "what fox", "image": "media/a.png", "id": "x", "answer": "red"},
        {"prompt": "two <image><image>", "images": ["media/a.png", {"path": "media/a.png", "bytes": None}]},
        {"messages": [{"role": "user", "content": "the quick"}], "level": 3},
    ]
    rows, output = write(tmp_path / "rows.jsonl", *asked), tmp_path / "answers.jsonl"
    code, lines, err = mmrl(
        "generate", model, *QUICK, "--input", rows, "--output", output, "--batch-size", "2"
    )
    assert (code, lines) == (0, []) and f"{output}: 3 rows" in err
    written = read(output)
    answers = [row.pop("completion") for row in written]
    assert written == asked
    media = [[image], [image] * 2, None]
    wanted = session.answer(["what fox", "two <image><image>", "the quick"], images=media)
    assert answers == wanted


def test_rows_are_printed_without_an_output(mmrl, model, tmp_path):
    rows = write(tmp_path / "rows.jsonl", {"prompt": "é", "n": 1})
    code, lines, _ = mmrl("generate", model, *QUICK, "--input", rows)
    (row,) = map(json.loads, lines)
    assert code == 0 and list(row) == ["prompt", "n", "completion"] and "é" in lines[0]


def test_flags_reach_the_engine(mmrl, model):
    def said(*flags):
        return mmrl("generate", model, "policy.dtype=float64", "--prompt", "the fox", *flags)[1]

    few = ("--max-completion-length", "8")
    assert said(*few, "--temperature", "0", "--seed", "1") == said(*few, "--temperature", "0", "--seed", "2")
    assert said(*few, "--seed", "1") == said(*few, "--seed", "1") != said(*few, "--seed", "2")


def test_a_flow_model_writes_an_image_folder(mmrl, flow_model, tmp_path):
    output = tmp_path / "images"
    rows = write(tmp_path / "rows.jsonl", {"prompt": "a red cube", "n": 1}, {"caption": "a ball"})
    code, _, err = mmrl("generate", flow_model, *IMAGES, "--input", rows, "--output", output)
    assert code == 0 and f"{output}: 2 images" in err
    assert [Image.open(output / f"0000{i}.png").size for i in range(2)] == [(32, 32)] * 2
    assert read(output / "metadata.jsonl") == [
        {"file_name": "00000.png", "prompt": "a red cube", "n": 1},
        {"file_name": "00001.png", "caption": "a ball"},
    ]


def test_images_without_an_output_take_free_names(mmrl, flow_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = mmrl("generate", flow_model, *IMAGES, "--prompt", "a red cube")
    second = mmrl("generate", flow_model, *IMAGES, stdin="a ball\n")
    assert (first[:2], second[:2]) == ((0, ["images/00000.png"]), (0, ["images/00001.png"]))
    assert Image.open("images/00001.png").size == (32, 32)


def test_a_column_that_nothing_reads_is_named(mmrl, model, tmp_path):
    rows = write(tmp_path / "rows.jsonl", {"question": "x", "system": "Be brief."})
    code, _, err = mmrl("generate", model, *QUICK, "--input", rows)
    assert code == 2 and "nothing reads the column `system`" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "x", "--input", "{rows}"), "--prompt and --input both say what is asked; give one"),
        (("--image", "{image}"), "--image and --video and --audio belong to a --prompt"),
        (("--prompt", "x", "--image", "no.png"), "there is no file 'no.png' (--image)"),
        (("--prompt", "x", "--image", "{rows}"), "wanted an image as PNG"),
        (("--prompt", "x", "--video", "{rows}"), "wanted a video as mov"),
        (("--prompt", "x", "--root", "."), "--root is the folder of the media of --input"),
        (("--input", "no.jsonl"), "there is no file or folder 'no.jsonl' (--input)"),
        (("--input", "{rows}", "--output", "{rows}"), "is the --input; name another --output"),
        (("--prompt", "x", "--output", "{rows}"), "exists; name another --output, or give --overwrite"),
        (("--prompt", "x", "--batch-size", "0"), "--batch-size must be at least 1, not 0"),
        (("--prompt", "x", "--temperature", "-1"), "temperature' must be at least 0, not -1.0"),
        (("rollout.engine.0.tempratur=1", "--prompt", "x"), "did you mean 'temperature'?"),
    ],
)
def test_mistakes_are_found_before_weights_are_loaded(
    mmrl, model, image, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setattr("mmrl.build._load_policy", lambda *given: pytest.fail("weights were loaded"))
    rows = write(tmp_path / "rows.jsonl", {"prompt": "x"})
    filled = [word.format(rows=rows, image=image) for word in arguments]
    code, lines, err = mmrl("generate", model, *filled)
    assert (code, lines, len(err.splitlines())) == (2, [], 1)
    assert message in err


def test_an_output_that_does_not_fit_the_model_is_found_before_weights_are_loaded(
    mmrl, model, flow_model, monkeypatch
):
    monkeypatch.setattr("mmrl.build._load_policy", lambda *given: pytest.fail("weights were loaded"))
    code, lines, err = mmrl("generate", flow_model, *IMAGES, "--prompt", "x", "--output", "x.jsonl")
    assert (code, lines) == (2, []) and "name a folder for them as --output, not a file of rows" in err
    code, lines, err = mmrl("generate", model, *QUICK, "--prompt", "x", "--output", "answers")
    assert (code, lines) == (2, []) and "answers in words; name a file such as answers.jsonl" in err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "image": "no.png"}, "there is no file 'no.png' in"),
        ({"prompt": "x", "image": "../rows.jsonl"}, "leaves its root"),
        ({"text": "x"}, "wanted one of prompt, messages, question, caption, got the columns text"),
        ({"prompt": "x", "completion": "y"}, "the row has a `completion`, where its answer would go"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "x"}]}, "got an answer at their end"),
    ],
)
def test_rows_that_cannot_be_asked_are_named(mmrl, model, tmp_path, row, message):
    rows, output = write(tmp_path / "rows.jsonl", {"prompt": "fine"}, row), tmp_path / "answers.jsonl"
    code, lines, err = mmrl("generate", model, *QUICK, "--input", rows, "--output", output)
    assert (code, lines) == (2, []) and not output.exists()
    assert "1 row of" in err and "rows.jsonl:2: " in err and message in err


def test_a_prompt_that_the_model_cannot_read_is_one_line(mmrl, model, tmp_path):
    sound = tmp_path / "a.wav"
    sound.write_bytes(as_wav(Sound(torch.zeros(16000), 16000)))
    code, lines, err = mmrl("generate", model, *QUICK, "--prompt", "what fox", "--audio", sound)
    assert (code, lines) == (2, []) and err.startswith("error: prompt 'p0' shows an audio, but")


def test_a_failure_leaves_no_file_and_replaces_none(mmrl, model, flow_model, tmp_path, monkeypatch):
    def fails(self, prompts):
        if any(prompt.text == "stop" for prompt in prompts):
            raise ConfigError("it stopped")
        return one_each(self, prompts)

    one_each = Session.one_each
    monkeypatch.setattr(Session, "one_each", fails)
    rows = write(tmp_path / "rows.jsonl", {"prompt": "fox"}, {"prompt": "stop"})
    answers, images = tmp_path / "new" / "answers.jsonl", tmp_path / "images"
    for known, options, output in ((model, QUICK, answers), (flow_model, IMAGES, images)):
        given = ("generate", known, *options, "--input", rows, "--batch-size", 1, "--output")
        code, _, err = mmrl(*given, output)
        assert code == 2 and err.splitlines()[-1] == "error: it stopped"
        assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    kept = write(tmp_path / "kept.jsonl", {"prompt": "x", "completion": "y"})
    given = ("generate", model, *QUICK, "--input", rows, "--batch-size", 1, "--overwrite", "--output")
    assert mmrl(*given, kept)[0] == 2
    assert read(kept) == [{"prompt": "x", "completion": "y"}]


def test_a_folder_without_a_run_or_a_model_is_one_line(mmrl, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("nothing")
    code, lines, err = mmrl("generate", tmp_path / "notes", "--prompt", "x")
    assert (code, lines, len(err.splitlines())) == (2, [], 1)
    assert "holds neither a run (config.yaml and a checkpoint) nor a model (config.json, model_index" in err
