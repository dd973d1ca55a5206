"""Prompts that are made again from their rows: as in a list, and the same object while held."""

from __future__ import annotations

import gc
import json
import os
import pickle
import weakref

import pytest

from mmrl.core.types import Message, Part, Prompt
from mmrl.data import row_files
from mmrl.data.dataset_io import Rows, SourceError, read_prompts, write_rows
from mmrl.data.fields import RowError, text, uid_of
from mmrl.data.row_prompts import ByUid, RowPrompts, chosen, uids_of
from mmrl.data.stored_bytes import ByteFile

# A byte order mark, a blank line, a letter of two bytes, CRLF, an escape, and no end of the last line.
LINES = (
    b'\xef\xbb\xbf{"id": "a", "q": "eins"}\n\n'
    b'{"id": "b", "q": "zw\xc3\xb6lf"}\r\n'
    b'{"q": "drei\\u2028"}\n'
    b'{"id": 4, "q": "vier", "split": "test"}'
)
ROWS = [{"id": f"r{i}", "q": f"question {i}"} for i in range(10)]


def make(row, number):
    question = text(row.columns.get("q"), "q")
    return Prompt(
        uid_of(row.columns, f"{row.split}#{number}"),
        (Message("user", (Part(question),)),),
        row.place,
        columns=row.columns,
    )


def read(path, make=make, **options):
    return read_prompts(path, Rows(path, path.parent), make, **options)


def as_list(path):
    return [make(row, number) for number, row in enumerate(Rows(path, path.parent))]


def write_parquet(path, rows, size):
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=size)


def write_saved(path, rows):
    import datasets

    parts = {"train": datasets.Dataset.from_list(rows[:6]), "test": datasets.Dataset.from_list(rows[6:])}
    datasets.DatasetDict(parts).save_to_disk(path)


@pytest.fixture(params=["lines", "parquet", "saved", "folder"])
def path(request, tmp_path):
    match request.param:
        case "lines":
            (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
            return tmp_path / "train.jsonl"
        case "parquet":
            write_parquet(tmp_path / "train.parquet", ROWS, 3)
            return tmp_path / "train.parquet"
        case "saved":
            write_saved(tmp_path / "saved", ROWS)
            return tmp_path / "saved"
    write_rows(tmp_path / "both" / "a.jsonl", ROWS[:4])
    write_parquet(tmp_path / "both" / "data" / "train-00000-of-00001.parquet", ROWS[4:], 2)
    return tmp_path / "both"


def test_random_access_gives_what_a_list_has(path):
    wanted, prompts = as_list(path), read(path)
    assert type(prompts) is RowPrompts and len(prompts) == len(wanted) == 10
    assert [prompts[i].target for i in (9, 0, 5, -1, 3, 5)] == [wanted[i].target for i in (9, 0, 5, 9, 3, 5)]
    for found, expected in zip(prompts, wanted, strict=True):
        assert (found.uid, found.messages, found.columns, found.target) == (
            expected.uid,
            expected.messages,
            expected.columns,
            expected.target,
        )
    assert uids_of(prompts) == [prompt.uid for prompt in wanted] == uids_of(wanted)
    with pytest.raises(IndexError):
        prompts[10]


def test_splits_are_those_of_the_rows(path, tmp_path):
    splits = [row.split for row in Rows(path, path.parent)]
    assert [prompt.split for prompt in read(path)] == splits
    assert len(set(splits)) == (1 if path.is_file() else 2)


def test_lines_are_found_again_by_their_bytes(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(LINES)
    prompts = read(tmp_path / "train.jsonl")
    assert [prompts[i].text for i in (3, 1, 2, 0)] == ["vier", "zwölf", "drei\u2028", "eins"]
    assert uids_of(prompts) == ["a", "b", "train#2", "4"]
    assert [prompts[i].split for i in (3, 0)] == ["test", "train"]
    assert [prompt.target.rpartition(":")[2] for prompt in prompts] == ["1", "3", "4", "5"]


def test_nothing_stays_in_memory_that_nobody_holds(path):
    prompts = read(path)
    gc.collect()
    assert not prompts.places.alive and not prompts.places.kept
    one = prompts[4]
    assert prompts[4] is one and prompts[2:][2] is one and list(prompts)[4] is one
    assert ByUid(prompts)["r4"] is one and chosen(prompts, [7, 4])[1] is one
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None and prompts[4].uid == "r4"


def test_slices_and_choices_read_nothing(path):
    prompts = read(path)
    part = chosen(prompts[2:9:2], [3, 0])
    assert type(part) is RowPrompts and not prompts.places.alive
    assert uids_of(part) == [prompt.uid for prompt in part] == ["r8", "r2"]
    assert uids_of(chosen(list(prompts), [3, 0])) == ["r3", "r0"]
    assert list(ByUid(part)) == ["r8", "r2"] and "r3" not in ByUid(part) and ByUid(part).get("r3") is None


def test_other_processes_get_the_prompts_themselves(tmp_path):
    write_rows(tmp_path / "train.jsonl", ROWS)
    prompts = read(tmp_path / "train.jsonl")
    sent = pickle.dumps(prompts[:3])
    (tmp_path / "train.jsonl").unlink()
    assert [prompt.uid for prompt in pickle.loads(sent)] == ["r0", "r1", "r2"]


# ---- files that change


def test_a_file_of_another_size_is_an_error(path):
    prompts = read(path)
    held = prompts[0]
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with file.open("ab") as opened:
                opened.write(b"\n")
    assert prompts[0] is held, "it was read before"
    with pytest.raises(SourceError, match="changed after it was read"):
        prompts[1]
    with pytest.raises(SourceError, match="changed after it was read"):
        prompts[9]


def test_a_file_of_another_time_and_a_missing_one_are_errors(path):
    prompts = read(path)
    files = [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    for file in files:
        os.utime(file, ns=(1, 1))
    with pytest.raises(SourceError, match="changed after it was read"):
        prompts[3]
    for file in files:
        file.unlink()
    with pytest.raises(SourceError, match="changed after it was read"):
        prompts[3]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (b'{"id": "rX", "q": "question 1"}', "it was the row 'r1'"),
        (b'{"id": "r1", "q": 12345678901}_', "not a JSON object"),
        (b'{"id": "r1", "q": 123456789012}', "wanted a text as `q`"),
        (b'{"id": "r1", "Q": "question 1"}', "wanted a text as `q`, got None"),
    ],
)
def test_another_row_at_the_offset_is_an_error_whatever_the_time_says(tmp_path, replaced, message):
    path = tmp_path / "train.jsonl"
    write_rows(path, ROWS)
    prompts, stat, old = read(path), path.stat(), json.dumps(ROWS[1]).encode()
    assert len(old) == len(replaced)
    path.write_bytes(path.read_bytes().replace(old, replaced))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prompts[0].uid == "r0" and prompts[2].uid == "r2"
    with pytest.raises(SourceError, match=message) as error:
        prompts[1]
    assert f"{path}:2" in str(error.value)


# ---- the rules of reading


def test_bad_rows_are_dropped_and_the_others_keep_their_numbers(tmp_path, caplog):
    path = tmp_path / "train.jsonl"
    path.write_text('{"q": "one"}\n{"q": \n{"q": 2}\n{"q": "four"}\n')
    with pytest.raises(RowError, match="2 rows of"):
        read(path, bad_rows="error")
    prompts = read(path, bad_rows="drop")
    assert [(prompt.uid, prompt.text) for prompt in prompts] == [("train#0", "one"), ("train#3", "four")]
    assert len(caplog.records) == 3  # each row, and how many there are


def test_skipped_rows_and_a_limit(tmp_path):
    write_rows(tmp_path / "train.jsonl", ROWS)
    odd = lambda row, number: make(row, number) if number % 2 else None
    prompts = read(tmp_path / "train.jsonl", odd, limit=3)
    assert [prompts[i].uid for i in (2, 1, 0)] == ["r5", "r3", "r1"]
    assert len(read(tmp_path / "train.jsonl", limit=4)) == 4


def test_an_id_that_comes_twice_is_an_error(path):
    twice = lambda row, number: make(row, number) and Prompt(f"p{number % 9}", ())
    with pytest.raises(RowError, match="the id 'p0' is that of"):
        read(path, twice)


def test_what_cannot_be_found_again_stays_a_list(tmp_path, monkeypatch):
    write_rows(tmp_path / "train.json", ROWS)
    assert type(read(tmp_path / "train.json")) is list
    write_parquet(tmp_path / "train.parquet", ROWS, 6)
    assert type(read(tmp_path / "train.parquet")) is RowPrompts
    monkeypatch.setattr(row_files, "GROUP_ROWS", 5)
    assert uids_of(read(tmp_path / "train.parquet")) == [row["id"] for row in ROWS]
    assert type(read(tmp_path / "train.parquet")) is list, "of a row group of 6"


def test_a_folder_of_both_kinds_keeps_only_what_it_must(tmp_path, monkeypatch):
    write_rows(tmp_path / "a.jsonl", ROWS[:4])
    write_parquet(tmp_path / "b.parquet", ROWS[4:], 6)
    monkeypatch.setattr(row_files, "GROUP_ROWS", 5)
    prompts = read(tmp_path)
    gc.collect()
    assert len(prompts.places.kept) == 6 and not prompts.places.alive
    assert [prompt.uid for prompt in prompts] == [row["id"] for row in ROWS]


def test_row_groups_stay_decoded_up_to_a_limit(tmp_path, monkeypatch):
    write_parquet(tmp_path / "train.parquet", ROWS, 3)
    prompts, opened = read(tmp_path / "train.parquet"), []
    (file,) = prompts.places.files
    real = file._group
    monkeypatch.setattr(file, "_group", lambda group: opened.append(group) or real(group))
    assert [prompts[i].uid for i in (0, 2, 9, 1, 8)] == ["r0", "r2", "r9", "r1", "r8"]
    assert opened == [0, 3, 2]


def test_images_of_a_row_that_is_read_again_are_not_stored_again(tmp_path, monkeypatch):
    import io

    from PIL import Image

    from mmrl.vision.datasets.visual_qa import visual_qa

    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), (9, 8, 7)).save(buffer, "PNG")
    row = {
        "id": "a",
        "question": "what?",
        "answer": "grey",
        "image": {"bytes": buffer.getvalue(), "path": None},
    }
    write_parquet(tmp_path / "train.parquet", [row], 1)
    file = ByteFile(limit=0)
    monkeypatch.setattr("mmrl.data.media_root.byte_file", lambda: file)
    prompts = visual_qa(path=str(tmp_path / "train.parquet"))
    first, end = prompts[0].messages, file.end
    assert end == len(buffer.getvalue())
    again = prompts[0].messages
    assert file.end == end, "it is in the file already"
    assert again is not first and again == first and hash(again) == hash(first), (
        "caches know it by its messages"
    )
    assert again[0].parts[0].media.load().pixels.shape == (1, 3, 20, 30)


def test_media_in_files_are_equal_when_their_row_is_read_again(tmp_path):
    from PIL import Image

    from mmrl.vision.datasets.visual_qa import visual_qa

    Image.new("RGB", (30, 20), (9, 8, 7)).save(tmp_path / "a.png")
    write_rows(tmp_path / "train.jsonl", [{"question": "what?", "answer": "grey", "image": "a.png"}])
    prompts = visual_qa(path=str(tmp_path / "train.jsonl"))
    first = prompts[0].messages
    frames = first[0].parts[0].media.load()
    again = prompts[0].messages
    assert again is not first and again == first and hash(again) == hash(first)
    assert again[0].parts[0].media.load() is frames
