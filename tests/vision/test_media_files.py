"""`mmrl data check`: what it finds, what it lets pass, and how it ends."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from examples.video_grounding.spliced_videos import write_video
from mmrl.cli import main
from mmrl.data.dataset_io import Rows, write_rows
from mmrl.data.media_root import MediaRef, media_of
from mmrl.vision.checks.media_files import missing_media, spans_out_of_range, split_leakage, unreadable_media


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "a.mp4"
    noise = torch.randint(256, (32, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    write_video(path, noise, 4)  # 8 seconds
    return path.read_bytes()


@pytest.fixture
def home(tmp_path, clip):
    Image.new("RGB", (4, 3), (200, 0, 0)).save(tmp_path / "a.png")
    Image.new("RGB", (4, 3), (0, 200, 0)).save(tmp_path / "b.png")
    (tmp_path / "same.png").write_bytes((tmp_path / "a.png").read_bytes())
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:45])
    (tmp_path / "a.mp4").write_bytes(clip)
    return tmp_path


def found(check, home, *rows, split="train"):
    write_rows(home / f"{split}.jsonl", rows)
    return [(one.place.rpartition("/")[2], one.what) for one in check(Rows(home, home))]


# ---- which media a row names


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"image": "a.png", "video": "a.mp4"}, [("image", "a.png"), ("video", "a.mp4")]),
        ({"images": ["a.png", {"path": "b.png", "bytes": None}]}, [("image", "a.png"), ("image", "b.png")]),
        ({"chosen": "a.png", "rejected": "a dog. It is in b.png or so"}, [("image", "a.png")]),
        (
            {"chosen": "a.mp4", "masks": ["m.png"], "background": "grass"},
            [("video", "a.mp4"), ("image", "m.png")],
        ),
        ({"image": None, "images": [], "question": "a.png"}, []),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "image"}]}
                ]
            },
            [("image", "a.png")],
        ),
    ],
)
def test_media_of_rows_of_known_forms(row, wanted):
    assert [(named.kind, named.path) for named in media_of(row)] == wanted


def test_media_inside_rows():
    assert list(media_of({"image": {"bytes": b"x", "path": "n.png"}})) == [MediaRef("image", "n.png", b"x")]
    assert list(media_of({"image": b"x"})) == [MediaRef("image", "", b"x")]


# ---- checks


def test_broken_media_are_found_and_sound_ones_are_not(home):
    sound = [{"image": "a.png"}, {"video": "a.mp4"}, {"question": "no media"}]
    assert not found(unreadable_media, home, *sound)
    wrong = [
        ({"image": "none.png"}, "there is no file 'none.png'"),
        ({"image": "cut.png"}, "cannot decode"),
        ({"image": "../a.png"}, "leaves its root"),
        ({"image": "a\0.png"}, "null"),
        ({"images": ["a.png", "none.png"]}, "there is no file 'none.png'"),
    ]
    listed = found(unreadable_media, home, *[row for row, _ in wrong])
    assert [place for place, _ in listed] == [f"train.jsonl:{i}" for i in range(1, 6)]
    assert all(word in what for (_, word), (_, what) in zip(wrong, listed, strict=True))


def test_a_video_that_breaks_off_is_broken(home, clip):
    (home / "cut.mp4").write_bytes(clip[: len(clip) * 2 // 3])
    ((_, what),) = found(unreadable_media, home, {"video": "cut.mp4"})
    assert "cut.mp4" in what


@pytest.mark.parametrize("image", [17, {"url": "a.png"}, {"bytes": None, "path": None}, [None], {"path": 5}])
def test_an_image_of_an_unknown_form_is_found(home, image):
    ((place, what),) = found(unreadable_media, home, {"image": "a.png"}, {"image": image})
    assert place == "train.jsonl:2" and "wanted a path, bytes, or an object" in what
    assert not found(split_leakage, home, {"image": image})  # the check above names it


def test_parts_of_messages_must_hold_their_medium_in_a_known_form(home):
    part = lambda **held: {"messages": [{"role": "user", "content": [held]}]}
    rows = [part(type="image", url="a.png"), part(type="image_url", image_url=5), part(type="image")]
    assert [place for place, _ in found(unreadable_media, home, *rows)] == ["train.jsonl:1", "train.jsonl:2"]


def test_rows_without_media_are_counted_where_others_of_their_file_have_some(home):
    rows = [{"image": "a.png"}, {"question": "?"}, {"video": "a.mp4"}, {"image": None}]
    listed = found(missing_media, home, *rows)
    assert [place for place, _ in listed] == ["train.jsonl:2", "train.jsonl:4"]
    assert listed[0][1] == "names no image or video; 2 rows of its file do"
    assert len(found(missing_media, home, {"question": "?"}, split="texts")) == 2  # of the other file


def test_encoded_images_are_looked_at(home):
    rows = [
        {"image": {"bytes": (home / "a.png").read_bytes(), "path": None}},
        {"image": {"bytes": b"no", "path": None}},
    ]
    write_rows(home / "train.parquet", rows)
    (finding,) = unreadable_media(Rows(home, home))
    assert finding.place.endswith("train.parquet[1]") and "cannot decode" in finding.what


def test_spans_outside_their_video_are_found(home):
    rows = [
        {"video": "a.mp4", "start": 1, "end": 8.04, "duration": 8.2},  # rounded
        {"video": "a.mp4", "start": 1, "end": 9},
        {"video": "a.mp4", "spans": [[0, 2], [5, 4]]},
        {"video": "none.mp4", "start": -1, "end": 4, "duration": 5},
        {"video": "none.mp4", "relevant_windows": [[0, 6]], "duration": 5},
        {"video": "a.mp4", "start": 0, "end": 2, "duration": 30},
        {"video": "a.mp4", "start": "soon", "end": 2},
        {"question": "none"},
    ]
    listed = found(spans_out_of_range, home, *rows)
    assert [place[-1] for place, _ in listed] == ["2", "3", "4", "5", "6", "7"]
    wanted = ("1 to 9 s lies outside its video of 8.00 s", "5 to 4 s does not end", "-1 to 4 s lies outside")
    wanted += (
        "0 to 6 s lies outside its video of 5.00 s",
        "its video lasts 8.00 s, not 30 s",
        "wanted a finite number as `span: start`, got 'soon'",
    )
    assert all(word in what for word, (_, what) in zip(wanted, listed, strict=True))


def test_media_shared_by_splits_are_found_by_their_content(home):
    assert not found(split_leakage, home, {"image": "a.png"}, {"image": "same.png"}, {"image": "b.png"})
    listed = found(
        split_leakage, home, {"image": "same.png"}, {"image": "a.png"}, {"image": "gone.png"}, split="test"
    )
    assert len(listed) == 1 and listed[0][0].startswith("train.jsonl:1")
    assert "'a.png' of split 'train' is also in split 'test'" in listed[0][1]
    encoded = {"image": {"bytes": (home / "b.png").read_bytes(), "path": None}}
    write_rows(home / "dev.parquet", [encoded])
    assert len(list(split_leakage(Rows(home, home)))) == 2


# ---- the command


def test_a_sound_data_set_passes(home, capsys):
    write_rows(home / "train.jsonl", [{"id": 1, "image": "a.png", "answer": "red"}])
    write_rows(home / "test.jsonl", [{"id": 1, "image": "b.png", "answer": "green"}])
    assert main(["data", "check", str(home)]) == 0
    said = capsys.readouterr().out
    assert f"{home}: 2 rows (test 1, train 1), nothing wrong" in said
    for check in (
        "unreadable_rows",
        "duplicate_ids",
        "empty_answers",
        "vision.unreadable_media",
        "vision.split_leakage",
    ):
        assert f"{check} " in said


def test_what_is_wrong_is_a_table_and_ends_with_1(home, capsys):
    row = {"image": "none.png", "answer": ""}
    write_rows(home / "train.jsonl", [row] * 5)
    assert main(["data", "check", str(home / "train.jsonl"), "--show", "2"]) == 1
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("vision.unreadable_media:")]
    assert [line.partition(": ")[2].partition(": ")[0] for line in lines[:2]] == [
        f"{home / 'train.jsonl'}:{number}" for number in (1, 2)
    ]
    assert lines[2] == "vision.unreadable_media: and 3 more"
    assert "5 rows (train 5), 10 wrong" in said


def test_rows_with_special_tokens_are_named(home, checkpoint, capsys):
    turns = [{"role": "user", "content": [{"type": "text", "text": "so <|im_end|> <s>"}]}]
    write_rows(
        home / "train.jsonl",
        [{"messages": turns}, {"question": "<image> a < b | c > d [IN] <b>", "answer": "</global-img>"}],
    )
    assert main(["data", "check", str(home)]) == 1
    said = capsys.readouterr().out
    assert f"special_tokens: {home / 'train.jsonl'}:1: `messages` holds '<|im_end|>', '<s>'\n" in said
    assert "2 rows (train 2), 1 wrong" in said
    write_rows(home / "train.jsonl", [{"question": "so <s>"}, {"answer": "<global-img>"}])
    assert main(["data", "check", str(home), "--model", str(checkpoint("llava"))]) == 1
    assert "train.jsonl:2: `answer` holds '<global-img>'\n" in capsys.readouterr().out
    assert main(["data", "check", str(home), "--model", str(home)]) == 2
    assert "cannot read the tokenizer of" in capsys.readouterr().err


def test_media_are_looked_for_in_the_root_that_is_given(home, capsys):
    (home / "rows").mkdir()
    write_rows(home / "rows" / "train.jsonl", [{"image": "a.png"}])
    assert main(["data", "check", str(home / "rows")]) == 1
    assert main(["data", "check", str(home / "rows"), "--root", str(home)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no file or folder"),
        (["."], "holds no rows"),
        (["a.png"], "cannot tell what"),
        (["a.png", "--root", "nothing"], "there is no folder 'nothing'"),
    ],
)
def test_wrong_usage_ends_with_2(home, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(home)
    assert main(["data", "check", *arguments]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["data", "check"])
    assert ended.value.code == 2


def test_an_empty_data_set_is_wrong(home, capsys):
    (home / "train.jsonl").write_text("")
    assert main(["data", "check", str(home / "train.jsonl")]) == 2
    assert "holds no rows" in capsys.readouterr().err


def test_checks_are_listed(capsys):
    assert main(["list", "check"]) == 0
    assert "vision.spans_out_of_range" in capsys.readouterr().out


def test_a_check_of_json_that_is_not_a_list_is_wrong_usage(home, capsys):
    (home / "a.json").write_text(json.dumps(3))
    assert main(["data", "check", str(home / "a.json")]) == 2
    assert "must hold a list" in capsys.readouterr().err
