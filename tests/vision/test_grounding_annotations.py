"""Annotation files are read as they are published, and a malformed line is an error that names where it
is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.data.dataset_io import RowError
from mmrl.data.media_root import MediaRoot
from mmrl.vision.benchmarks.grounding_annotations import FORMS, Annotations, Query

CHARADES = "3MSZA 24.3 30.4##person turn a light on.\nAO8RW 0.0 6.9##a person is putting a book on a shelf.\n"
LENGTHS = (
    "id,subject,scene,quality,relevance,verified,script,objects,descriptions,actions,length\n"
    '3MSZA,NUVY,Bedroom,6,7,Yes,"A person, tired,\nturns a light on.",bed;light,Bed.,c105 24.0 30.4,30.96\n'
    "AO8RW,YMXV,Living room,5,6,No,Books.,book,Shelf.,,33.67\n"
)


def written(tmp_path, text, name="rows.txt"):
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8"))
    return path


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(form, path, durations="", extension=".mp4"):
    """Read every row; instead of a row that cannot be read stands its error, with its place."""
    source = Annotations(path, form, str(durations), extension)
    found = []
    for row in source:
        try:
            found.append(f"{row.place}: {row.fault}" if row.fault else source.parse(row))
        except RowError as error:
            found.append(f"{row.place}: {error}")
    return found


def refused(form, path, *words):
    """See that the last row, or the whole file, is an error with these words, and every other is read."""
    try:
        *sound, last = read(form, path)
    except RowError as error:
        sound, last = [], str(error)
    assert all(isinstance(row, Query) for row in sound)
    assert all(word in last for word in words), last


def test_read_charades_with_durations(tmp_path):
    durations = written(tmp_path, LENGTHS, "lengths.csv")
    first, second = read("charades_sta", written(tmp_path, CHARADES), durations, ".mp4")
    assert (first.video, first.query, first.spans) == (
        "3MSZA.mp4",
        "person turn a light on.",
        ((24.3, 30.4),),
    )
    assert (first.duration, second.duration) == (30.96, 33.67)
    assert second.spans == ((0.0, 6.9),)
    assert first.uid != second.uid


def test_read_charades_without_durations_or_with_another_split_leaves_them_open(tmp_path):
    path = written(tmp_path, CHARADES)
    assert [row.duration for row in read("charades_sta", path, extension=".avi")] == [None, None]
    durations = written(tmp_path, "id,length\n3MSZA,30.96\n", "lengths.csv")
    assert [row.duration for row in read("charades_sta", path, durations, ".avi")] == [30.96, None]


def test_read_charades_keeps_marks_inside_a_sentence_and_skips_empty_lines(tmp_path):
    path = written(tmp_path, "A 1 2##he says ## twice\r\n\r\nB 3 4##x\r\n")
    first, second = read("charades_sta", path)
    assert first.query == "he says ## twice"
    assert (second.query, second.uid) == ("x", "B#3")


@pytest.mark.parametrize(
    "line",
    [
        "AO8RW 0.0 6.9#one mark",
        "AO8RW 0.0##a span without end",
        "AO8RW 0.0 6.9 7.0##too many",
        "AO8RW zero 6.9##not a number",
        "##no video",
        "AO8RW 0.0 6.9##",
        "AO8RW",
    ],
)
def test_a_malformed_line_of_charades_names_file_and_line(tmp_path, line):
    path = written(tmp_path, CHARADES + line + "\n")
    refused("charades_sta", path, f"{path}:3", "##", repr(line))


@pytest.mark.parametrize(
    ("text", "line"),
    [("id,length\nA,1\nB,long\n", 3), ("id,length\nA\n", 2), ("name,seconds\nA,3\n", 2)],
)
def test_a_malformed_line_of_durations_names_file_and_line(tmp_path, text, line):
    durations = written(tmp_path, text, "lengths.csv")
    path = written(tmp_path, CHARADES)
    with pytest.raises(RowError, match=rf"lengths\.csv:{line}: .*length"):
        read("charades_sta", path, durations)


def test_read_activitynet_gives_a_row_for_every_sentence(tmp_path):
    text = json.dumps(
        {
            "v_QOlSCBRmfWY": {
                "duration": 82.73,
                "timestamps": [[0.83, 19.86], [17.37, 60.81]],
                "sentences": ["A young woman is seen.", "  The girl dances."],
                "phrases": [["woman"], ["girl"]],
            },
            "v_other": {"duration": 10, "timestamps": [[0, 5]], "sentences": ["Something."]},
        }
    )
    rows = list(read("activitynet", written(tmp_path, text, "train.json")))
    assert [row.uid for row in rows] == ["v_QOlSCBRmfWY#0", "v_QOlSCBRmfWY#1", "v_other#0"]
    assert rows[1].video == "v_QOlSCBRmfWY.mp4"
    assert rows[1].query == "  The girl dances."
    assert rows[1].spans == ((17.37, 60.81),)
    assert rows[1].duration == 82.73


@pytest.mark.parametrize(
    "entry",
    [
        {"duration": 9, "timestamps": [[0, 1]], "sentences": []},
        {"duration": 9, "timestamps": [[0, 1, 2]], "sentences": ["a"]},
        {"duration": 9, "timestamps": [["x", 1]], "sentences": ["a"]},
        {"duration": 9, "timestamps": [[0, 1]], "sentences": [5]},
        {"duration": None, "timestamps": [[0, 1]], "sentences": ["a"]},
        {"timestamps": [[0, 1]], "sentences": ["a"]},
        {"duration": 9, "sentences": ["a"]},
        [0, 1],
    ],
)
def test_a_malformed_entry_of_activitynet_names_file_and_video(tmp_path, entry):
    path = written(tmp_path, json.dumps({"v_bad": entry}), "train.json")
    refused("activitynet", path, str(path), "'v_bad'")


def test_a_file_of_activitynet_that_is_no_object_is_an_error_that_names_it(tmp_path):
    path = written(tmp_path, '{"v_a":\n {"duration": 1,,}}', "train.json")
    refused("activitynet", path, str(path), "line 2")
    path = written(tmp_path, "[]", "train.json")
    refused("activitynet", path, str(path), "not a JSON object")


HIGHLIGHT = {
    "qid": 9769,
    "query": "some military patriots",
    "duration": 10,
    "vid": "j7rJstUseKg_360.0_510.0",
    "relevant_windows": [[0, 2], [4, 8]],
    "relevant_clip_ids": [0, 2, 3],
    "saliency_scores": [[4, 1, 1], [3, 3, 3], [2, 0, 4]],
}


def without(*names, **changes):
    return {name: value for name, value in {**HIGHLIGHT, **changes}.items() if name not in names}


def test_read_qvhighlights_with_saliency_over_all_clips(tmp_path):
    bare = without("saliency_scores", "relevant_clip_ids")
    row, bare = read("qvhighlights", written(tmp_path, lines(HIGHLIGHT, bare)))
    assert (row.uid, row.video) == ("9769", "j7rJstUseKg_360.0_510.0.mp4")
    assert row.query == "some military patriots"
    assert row.spans == ((0, 2), (4, 8))
    assert row.duration == 10
    assert row.saliency == ((4, 1, 1), (0, 0, 0), (3, 3, 3), (2, 0, 4), (0, 0, 0))
    assert row.columns["qid"] == 9769
    assert bare.saliency == ()


@pytest.mark.parametrize(
    "row",
    [
        without("qid"),
        without("relevant_windows"),
        without("relevant_clip_ids"),
        without(relevant_windows=[[0]]),
        without(relevant_clip_ids=[0, 2]),
        without(relevant_clip_ids=[0, 2, 5]),
        without(relevant_clip_ids=[0, 2, -1]),
        without(saliency_scores=[[4, 1], [3, 3, 3], [2, 0, 4]]),
        without(duration="long"),
        without(vid=7),
        without(query=None),
        [1],
    ],
)
def test_a_malformed_row_of_qvhighlights_names_file_and_line(tmp_path, row):
    path = written(tmp_path, lines(HIGHLIGHT, row))
    refused("qvhighlights", path, f"{path}:2")


def test_read_jsonl_with_one_span_several_or_none(tmp_path):
    path = written(
        tmp_path,
        lines(
            {"video": "a.mp4", "query": "x", "start": 1, "end": 2.5, "duration": 9, "id": 7, "level": "easy"},
            {"video": "b/c.mkv", "query": "y", "spans": [[0, 1], [2, 3]]},
            {"video": "d.mp4", "query": "z"},
        ),
    )
    one, several, none = read("jsonl", path, extension=".avi")
    assert (one.uid, one.video, one.query, one.spans) == ("7", "a.mp4", "x", ((1, 2.5),))
    assert (one.duration, one.columns["level"]) == (9, "easy")
    assert (several.video, several.spans, several.duration) == ("b/c.mkv", ((0, 1), (2, 3)), None)
    assert none.spans == ()
    assert len({one.uid, several.uid, none.uid}) == 3


@pytest.mark.parametrize(
    "row",
    [
        {"query": "x", "start": 1, "end": 2},
        {"video": "a.mp4", "start": 1, "end": 2},
        {"video": "a.mp4", "query": "x", "start": 1},
        {"video": "a.mp4", "query": "x", "start": "one", "end": 2},
        {"video": "a.mp4", "query": "x", "spans": [[1, 2, 3]]},
        {"video": "a.mp4", "query": "x", "spans": 5},
        {"video": "a.mp4", "query": 5, "start": 1, "end": 2},
        {"video": 5, "query": "x", "start": 1, "end": 2},
        {"video": "a.mp4", "query": "x", "start": 1, "end": 2, "duration": "long"},
        [1, 2],
        "x",
        None,
    ],
)
def test_a_malformed_row_of_jsonl_names_file_and_line(tmp_path, row):
    good = {"video": "a.mp4", "query": "x", "start": 1, "end": 2}
    path = written(tmp_path, lines(good) + "\n" + lines(row))
    refused("jsonl", path, f"{path}:3")


@pytest.mark.parametrize("name", ["jsonl", "qvhighlights"])
def test_a_line_that_is_no_json_names_file_and_line(tmp_path, name):
    path = written(tmp_path, "\n{broken\n")
    refused(name, path, f"{path}:2", "JSON")


@pytest.mark.parametrize("name", sorted(FORMS))
def test_a_file_that_is_no_utf8_names_file_and_line(tmp_path, name):
    path = tmp_path / "rows"
    path.write_bytes(b"\n\n\xff\xfe\n")
    refused(name, path, f"{path}:3", "UTF-8")


def test_a_line_separator_inside_a_json_string_does_not_cut_the_line(tmp_path):
    row = {"video": "a.mp4", "query": "one\u2028two\u0085three", "start": 1, "end": 2}
    path = written(tmp_path, json.dumps(row, ensure_ascii=False) + "\n" + lines(row))
    assert [row.query for row in read("jsonl", path)] == ["one\u2028two\u0085three"] * 2


TVG = {
    "path": "./dataset/videos/tvgbench_data/a.mp4", "question": "a person sits.", "answer": "1.5-7.25",
    "start": None, "end": None, "duration": 30.5, "source": "x.json", "qsemtype": "Human Pose",
}  # fmt: skip


def test_read_tvgbench(tmp_path):
    rows = [TVG, {**TVG, "answer": "3.0-3.0"}]
    first, second = read("tvgbench", written(tmp_path, json.dumps(rows), "tvgbench.json"), extension=".avi")
    assert (first.uid, second.uid, first.video) == ("0", "1", "a.mp4")
    assert (first.query, first.spans, first.duration) == ("a person sits.", ((1.5, 7.25),), 30.5)
    assert second.spans == ((3.0, 3.0),) and second.points  # 11 of its 800 spans have no length


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer": "5"}, ("[1]: ", "wanted `answer` as start-end in seconds, got '5'")),
        ({"answer": "a-b"}, ("[1]: ", "wanted a finite number as `spans: start`")),
        ({"path": None}, ("[1]: ", "wanted a text as `path`")),
        ({"duration": 0}, ("[1]: ", "wanted more than 0")),
    ],
)
def test_a_wrong_row_of_tvgbench_is_named(tmp_path, change, words):
    refused("tvgbench", written(tmp_path, json.dumps([TVG, {**TVG, **change}]), "tvgbench.json"), *words)


def test_only_tvgbench_has_spans_without_length():
    point = Query("q", "a.mp4", "x", ((3.0, 3.0),), 9.0)
    home = MediaRoot(Path(__file__).parent)
    name = Path(__file__).name
    assert replace(point, video=name, points=True).inside_video(home, trim=True).spans == ((3.0, 3.0),)
    with pytest.raises(RowError, match="does not end after it starts"):
        replace(point, video=name).inside_video(home, trim=True)
