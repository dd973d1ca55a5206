"""Rows of data sets: every form gives the same, and what cannot be read is told."""

from __future__ import annotations

import json

import pytest

from mmrl.data.dataset_io import RowError, Rows, row_files, split_of, valid_rows, write_rows
from mmrl.diagnostics.checks.dataset_rows import duplicate_ids, empty_answers, text_of, unreadable_rows

ROWS = [{"id": "a", "answer": "één", "n": 1}, {"id": "b", "answer": "two\u2028lines", "n": 2}]


def columns(path):
    return [dict(row.columns) for row in valid_rows(path)]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_rows_come_back_as_they_were_written(tmp_path, ending):
    path = tmp_path / "deep" / f"train{ending}"
    assert write_rows(path, iter(ROWS)) == 2
    assert columns(path) == ROWS
    assert {row.split for row in valid_rows(path)} == {"train"}


def test_json_lines_named_json_are_read_as_lines(tmp_path):
    path = tmp_path / "coco_pope_random.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert columns(path) == ROWS


def test_one_object_over_several_lines_is_named_as_such(tmp_path):
    path = tmp_path / "nested.json"
    path.write_text(json.dumps({"data": ROWS}, indent=1))
    with pytest.raises(RowError, match="must hold a list of objects"):
        columns(path)
    path.write_text('{"a": \n{"a": 1}\n')
    assert [bool(row.fault) for row in Rows(path, tmp_path)] == [True, False]


def test_rows_without_an_answer_among_others_are_found(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"answer": NaN}\n{"answer": null}\n{"question": "q"}\n{"answer": 3.0}\n{"target": "x"}\n'
    )
    found = [finding.what for finding in empty_answers(Rows(path, tmp_path))]
    assert found == ["`answer` is nan", *["has no answer; 3 rows of its file have one"] * 2]
    path.write_text('{"question": "q"}\n{"question": "r"}\n')
    assert not list(empty_answers(Rows(path, tmp_path)))


def test_columns_that_the_first_row_lacks_are_written_to_parquet(tmp_path):
    write_rows(tmp_path / "a.parquet", [{"a": 1}, {"a": 2, "b": "x"}])
    assert columns(tmp_path / "a.parquet") == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]


def test_what_datasets_saved_is_read_with_its_splits_and_encoded_images(tmp_path):
    import datasets

    one = datasets.Dataset.from_list([{"q": "a", "image": {"bytes": b"png", "path": None}}])
    one = one.cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "saved")
    found = list(valid_rows(tmp_path / "saved"))
    assert [row.split for row in found] == ["train", "test"]
    assert found[0].columns == {"q": "a", "image": {"bytes": b"png", "path": None}}


def test_a_folder_is_its_files_and_splits_are_their_names(tmp_path):
    write_rows(tmp_path / "test.jsonl", ROWS)
    write_rows(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    (tmp_path / "manifest.json").write_text("{}")  # describes, and holds no rows
    assert [row.split for row in valid_rows(tmp_path)] == ["train", "test", "test"]
    assert split_of(tmp_path / "train-00001-of-00002.parquet") == "train"


def test_a_pattern_names_the_files_of_a_split(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_rows(tmp_path / "data" / f"{name}.parquet", ROWS)
    (tmp_path / "data" / "train.md").write_text("about")
    found = list(valid_rows(tmp_path / "data" / "train*"))
    assert [row.split for row in found] == ["train"] * 4
    with pytest.raises(RowError, match="there is no file or folder"):
        row_files(tmp_path / "data" / "dev*")
    assert [row.split for row in valid_rows(tmp_path / "d*" / "test*")] == ["test"] * 2


def test_splits_that_are_read_together_are_named(tmp_path, caplog):
    from mmrl.vision.datasets.visual_qa import visual_qa

    for name in ("train", "test"):
        write_rows(tmp_path / f"{name}.jsonl", [{"question": "What?", "answer": "this"}])
    assert len(visual_qa(path=str(tmp_path))) == 2
    assert "holds the splits test, train, and all of them are read" in caplog.text
    caplog.clear()
    assert len(visual_qa(path=str(tmp_path / "train*"))) == 1
    assert not caplog.text


def test_a_row_may_name_its_split(tmp_path):
    write_rows(tmp_path / "all.jsonl", [{"split": "dev"}, {"split": ""}])
    assert [row.split for row in valid_rows(tmp_path / "all.jsonl")] == ["dev", "all"]


def test_rows_that_cannot_be_read_are_distinguished_and_do_not_end_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n\n\xff\xfe\n{"id": \n[1]\n{"id": 2}')
    found = list(Rows(path, tmp_path))
    assert [row.place.rpartition(":")[2] for row in found] == ["1", "3", "4", "5", "6"]
    assert [row.columns.get("id") for row in found] == [1, None, None, None, 2]
    assert [row.fault.partition(":")[0].partition(",")[0] for row in found] == [
        "", "not UTF-8", "not a JSON object", "not a JSON object", "",
    ]  # fmt: skip
    with pytest.raises(RowError, match=r"a\.jsonl:3: not UTF-8"):
        columns(path)
    assert [row.columns["id"] for row in Rows(path, tmp_path).valid()] == [1, 2]


def test_a_text_in_parquet_that_is_not_utf8_is_one_bad_row(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.StringArray.from_buffers(
        2, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"ok\xff\xfe")
    )
    parquet.write_table(pyarrow.table({"a": texts}), tmp_path / "a.parquet")
    good, bad = Rows(tmp_path / "a.parquet", tmp_path)
    assert good.columns == {"a": "ok"} and bad.fault.startswith("not UTF-8")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "x", "cannot tell what"),
        ("a.json", "3", "must hold a list"),
        ("a.parquet", "no parquet", "cannot read"),
    ],
)
def test_files_that_hold_no_rows_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(RowError, match=message):
        columns(tmp_path / name)


def test_files_that_are_not_read_are_named_once(tmp_path, caplog):
    names = ["a.jsonl", "b.jsonl.gz", "c.ndjson", "d.png", "e.txt", "f.json", "a.tar.gz"]
    for name in names:
        (tmp_path / name).write_text("{}\n")
    for _ in range(2):
        assert row_files(tmp_path) == [tmp_path / "a.jsonl"]
    (said,) = caplog.messages
    assert "is read without b.jsonl.gz, c.ndjson; " in said
    row_files(tmp_path / "*l*")
    assert "without b.jsonl.gz" in caplog.messages[1]


def test_folders_without_rows_are_refused(tmp_path):
    with pytest.raises(RowError, match="holds no rows"):
        row_files(tmp_path)
    with pytest.raises(RowError, match="there is no file or folder"):
        row_files(tmp_path / "nothing")
    with pytest.raises(RowError, match="cannot write rows"):
        write_rows(tmp_path / "a.csv", [])


# ---- checks of texts


def findings(check, tmp_path, *rows):
    write_rows(tmp_path / "train.jsonl", rows)
    path = tmp_path / "train.jsonl"
    return [(one.place.rpartition(":")[2], one.what) for one in check(Rows(path, tmp_path))]


def test_unreadable_rows_are_found(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n\xff\n")
    (found,) = unreadable_rows(Rows(tmp_path, tmp_path))
    assert found.place.endswith("a.jsonl:2") and found.what.startswith("not UTF-8")


def test_shared_ids_are_found_within_a_split_only(tmp_path):
    rows = [{"id": 1}, {"id": "1"}, {"id": 1, "split": "test"}, {}, {}]
    assert [place for place, _ in findings(duplicate_ids, tmp_path, *rows)] == ["2"]


def test_useless_answers_are_found(tmp_path):
    message = lambda text: [{"role": "assistant", "content": text}]
    rows = [
        {"answer": "yes", "answers": ["", "no"]},
        {"answer": " "},
        {"chosen": "a dog", "rejected": "a dog "},
        {"chosen": message("a dog"), "rejected": message("a cat")},
        {"chosen": message("a dog"), "rejected": message([{"type": "text", "text": "a dog"}])},
        {"answers": []},
        {"answer": 0},
        {"answer": None},
    ]
    assert findings(empty_answers, tmp_path, *rows) == [
        ("2", "`answer` is empty"),
        ("3", "`chosen` and `rejected` are both 'a dog'"),
        ("5", "`chosen` and `rejected` are both 'a dog'"),
        ("6", "`answers` holds no answer"),
        ("8", "has no answer; 7 rows of its file have one"),
    ]


def test_said_reads_answers_of_every_form():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "dog"}]
    assert text_of(parts) == "a dog"
    assert text_of({"from": "gpt", "value": "a dog"}) == "a dog"
    assert (text_of(None), text_of([]), text_of(3)) == ("", "", "3")
