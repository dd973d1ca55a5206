"""Rows of verl, ms-swift and LLaMA-Factory and ours, into each other."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from mmrl.cli import main
from mmrl.data.dataset_io import RowError, valid_rows, write_rows
from mmrl.vision.benchmarks.conversions import describe_llama_factory, read_row, toolkit_of, write_row
from mmrl.vision.builders.converted import Converted

OURS = {"question": "What is it?", "answer": "a dog", "images": ["a.png"], "system": "Be brief."}
PAIR = {"question": "What is it?", "chosen": "a dog", "rejected": "a cat", "images": ["a.png"]}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "<image>What is it?"}


def says(text):
    return {"role": "assistant", "content": text}


def test_a_row_of_verl():
    row = {
        "data_source": "geo3k",
        "prompt": [{"role": "user", "content": "<image>\nWhat is it?"}],
        "images": [{"bytes": b"x", "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 0},
    }
    ours = read_row(row, "verl")
    assert (ours["question"], ours["answer"], ours["images"]) == ("What is it?", "3", row["images"])
    back = write_row(ours, "verl")
    assert back == {**row, "prompt": [USER]}


def test_a_row_of_ms_swift():
    row = {"messages": [SYSTEM, USER, says("a dog")], "images": ["a.png"], "rejected_response": "a cat"}
    ours = read_row(row, "ms_swift")
    assert ours == {**PAIR, "system": "Be brief."}
    assert write_row(ours, "ms_swift") == row
    answered = write_row(OURS, "ms_swift")
    assert answered == {"messages": [SYSTEM, USER, says("a dog")], "images": ["a.png"], "solution": "a dog"}


def test_older_rows_of_ms_swift():
    row = {"query": "and now?", "response": "a cat", "history": [["what?", "a dog"]], "system": "Be brief."}
    ours = read_row(row, "ms_swift")
    turns = [{"role": "user", "content": "what?"}, says("a dog"), {"role": "user", "content": "and now?"}]
    assert ours == {"system": "Be brief.", "messages": turns, "answer": "a cat"}
    rejected = {
        "messages": [USER, says("a dog")],
        "rejected_messages": [USER, says("a cat")],
        "images": ["a.png"],
    }
    assert read_row(rejected, "ms_swift") == PAIR


def test_rows_of_llama_factory():
    shared = {
        "conversations": [{"from": "human", "value": "<image>What is it?"}],
        "chosen": {"from": "gpt", "value": "a dog"},
        "rejected": {"from": "gpt", "value": "a cat"},
        "images": ["a.png"],
    }
    assert read_row(shared, "llama_factory") == PAIR
    assert write_row(PAIR, "llama_factory") == {
        "messages": [USER], "images": ["a.png"], "chosen": says("a dog"), "rejected": says("a cat")
    }  # fmt: skip
    alpaca = {"instruction": "What is", "input": "it?", "output": "a dog", "kto_tag": False}
    assert read_row(alpaca, "llama_factory") == {
        "question": "What is\nit?",
        "completion": "a dog",
        "label": False,
    }
    assert write_row(read_row(alpaca, "llama_factory"), "llama_factory")["kto_tag"] is False


def test_llama_factory_is_told_of_the_columns():
    told = describe_llama_factory(["chosen", "images", "messages", "rejected"], "train.json")
    assert told["ranking"] and told["file_name"] == "train.json" and told["formatting"] == "sharegpt"
    assert set(told["columns"]) == {"chosen", "images", "messages", "rejected"}
    assert "ranking" not in describe_llama_factory(["messages"], "train.json")


@pytest.mark.parametrize("name", ["verl", "ms_swift", "llama_factory"])
@pytest.mark.parametrize(
    "ours",
    [
        OURS,
        {"question": "first <image>, then <image>?", "answer": "x", "images": ["a.png", "b.png"]},
        {"question": "and a clip?", "answer": "y", "videos": ["c.mp4"], "images": ["a.png"]},
        {
            "messages": [USER, says("a dog"), {"role": "user", "content": "sure?"}],
            "answer": "z",
            "images": ["a"],
        },
    ],
)
def test_there_and_back(name, ours):
    back = read_row(write_row(ours, name), name)
    assert {key: back[key] for key in ours} == ours


def test_marks_inside_a_text_stay_there():
    asked = lambda text: {"messages": [{"role": "user", "content": text}], "images": ["a.png"]}
    assert read_row(asked("is <image> it?"), "ms_swift")["question"] == "is <image> it?"
    assert read_row(asked("<image>is it <image>?"), "ms_swift")["question"] == "<image>is it <image>?"


@pytest.mark.parametrize("name", ["ms_swift", "llama_factory"])
def test_pairs_there_and_back(name):
    assert read_row(write_row(PAIR, name), name) == PAIR


def test_pairs_as_trl_has_them_are_written():
    told = {
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    }
    row = {**told, "chosen": [says("a dog")], "rejected": [says("a cat")], "images": ["a.png"]}
    assert write_row(row, "ms_swift") == {
        "messages": [USER, says("a dog")], "images": ["a.png"], "rejected_response": "a cat"
    }  # fmt: skip


def test_parts_of_messages_give_their_media_in_place():
    parts = [
        {"type": "text", "text": "is "},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "it?"},
    ]
    ours = read_row({"messages": [{"role": "user", "content": parts}]}, "ms_swift")
    assert ours == {"question": "is <image>it?", "images": ["a.png"]}


@pytest.mark.parametrize(
    ("convert", "toolkit", "row", "message"),
    [
        (read_row, "verl", {"prompt": "text"}, "wanted a list of messages"),
        (read_row, "ms_swift", {}, "wanted a list of messages"),
        (
            read_row,
            "ms_swift",
            {"messages": [{"role": "critic", "content": ""}]},
            "a message of the role 'critic'",
        ),
        (read_row, "ms_swift", {"messages": [{"role": "user", "content": 3}]}, "wanted a text or parts"),
        (
            read_row,
            "ms_swift",
            {"messages": [{"role": "user", "content": [{"type": "depth"}]}]},
            "wanted a text or parts .*depth",
        ),
        (read_row, "ms_swift", {"messages": [SYSTEM]}, "ask nothing"),
        (read_row, "llama_factory", {"text": "document"}, "conversations or messages or instruction"),
        (write_row, "verl", {"question": "what?"}, "verl checks answers"),
        (write_row, "llama_factory", {"question": "what?"}, "learns from answers"),
        (write_row, "ms_swift", {"answer": "x"}, "no `question`"),
    ],
)
def test_rows_that_cannot_be_converted_say_why(convert, toolkit, row, message):
    with pytest.raises(RowError, match=message):
        convert(row, toolkit)


# ---- the builder


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "theirs"
    (folder / "pictures").mkdir(parents=True)
    Image.new("RGB", (4, 3), (200, 0, 0)).save(folder / "pictures" / "a.png")
    row = {"messages": [USER, says("a dog")], "images": ["pictures/a.png"]}
    write_rows(
        folder / "train.jsonl", [row, {**row, "images": ["pictures/none.png"]}, {"messages": [SYSTEM]}]
    )
    return folder


def build(source, output, **options):
    return Converted(source=str(source), **options).build(output)


def test_converted_copies_media_and_names_what_it_leaves_out(source, tmp_path):
    counts = build(source, tmp_path / "ours", source_form="ms_swift", bad_rows="drop")
    assert counts == {"train": 1, "dropped": 2}
    (row,) = valid_rows(tmp_path / "ours" / "train.jsonl")
    assert row.columns == {"question": "What is it?", "answer": "a dog", "images": ["media/pictures/a.png"]}
    assert (tmp_path / "ours" / "media" / "pictures" / "a.png").is_file()
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    assert ["none.png" in manifest["dropped"][0], "ask nothing" in manifest["dropped"][1]] == [True, True]
    with pytest.raises(RowError, match=r"train\.jsonl:2: there is no file 'pictures/none\.png'"):
        build(source, tmp_path / "strict", source_form="ms_swift")


def test_converted_goes_to_verl_with_images_inside_and_back(source, tmp_path):
    build(source, tmp_path / "verl", source_form="ms_swift", form="verl", bad_rows="drop")
    (row,) = valid_rows(tmp_path / "verl" / "train.parquet")
    encoded = (source / "pictures" / "a.png").read_bytes()
    assert row.columns["images"] == [{"bytes": encoded, "path": "media/pictures/a.png"}]
    assert row.columns["prompt"] == [USER]
    assert row.columns["extra_info"] == {"split": "train", "index": 0}
    build(tmp_path / "verl", tmp_path / "back", source_form="verl")
    (row,) = valid_rows(tmp_path / "back" / "train.jsonl")
    assert row.columns["answer"] == "a dog"
    assert (tmp_path / "back" / row.columns["images"][0]).read_bytes() == encoded


def test_converted_describes_itself_to_llama_factory(source, tmp_path):
    build(source, tmp_path / "lf", source_form="ms_swift", form="llama_factory", bad_rows="drop")
    info = json.loads((tmp_path / "lf" / "dataset_info.json").read_text())
    assert info["lf_train"]["file_name"] == "train.json"
    assert len(json.loads((tmp_path / "lf" / "train.json").read_text())) == 1


@pytest.mark.parametrize(
    ("name", "toolkit"),
    [
        *[(name, "ms_swift") for name in ("ms-swift", "MS_Swift", "swift", "modelscope/ms-swift")],
        *[
            (name, "llama_factory")
            for name in ("LLaMA-Factory", "llamafactory", "llama_factory", "LLaVA", "ShareGPT")
        ],
        *[(name, "verl") for name in ("verl", "veRL", "VERL")],
        ("mmrl", "mmrl"),
    ],
)
def test_a_toolkit_goes_by_any_spelling_of_its_name(name, toolkit):
    assert toolkit_of(name, "source_form") == toolkit


def test_places_of_boxes_are_refused_and_image_addresses_read():
    row = {"messages": [{"role": "user", "content": "Find <ref-object>"}, says("<bbox>")]}
    with pytest.raises(RowError, match="its text marks <ref-object>, which ms-swift fills from `objects`"):
        read_row({**row, "objects": {"ref": ["car"], "bbox": [[1, 2, 30, 40]]}}, "ms_swift")
    assert read_row(row, "ms_swift")["answer"] == "<bbox>"
    parts = [
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "text", "text": "What is it?"},
    ]
    row = {"messages": [SYSTEM, {"role": "user", "content": parts}, says("a dog")]}
    assert read_row(row, "llama_factory") == OURS


def test_an_unknown_toolkit_is_refused_with_the_names():
    with pytest.raises(
        ValueError, match=r"`source_form` is 'trl'; wanted mmrl, verl, ms_swift .*LLaMA-Factory"
    ):
        Converted(source="rows.jsonl", source_form="trl")


def test_an_unknown_form_is_an_error_of_the_configuration(tmp_path, capsys):
    config = tmp_path / "build.yaml"
    config.write_text(
        "build: {name: vision.converted, source: rows.jsonl, source_form: trl}\n"
        f"output: {tmp_path / 'ours'}\n"
    )
    assert main(["build", str(config)]) == 2
    assert "build: `source_form` is 'trl'; wanted mmrl, verl" in capsys.readouterr().err
