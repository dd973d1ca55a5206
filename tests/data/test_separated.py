"""CSV and TSV files are read by the names of their columns, by every reader of rows."""

from __future__ import annotations

import pytest

from mmrl.config.loading import ConfigError
from mmrl.data.dataset_io import RowError, Rows, SourceError
from mmrl.diffusion.datasets.prompts import prompts
from mmrl.vision.benchmarks.grounding_annotations import spans_of
from mmrl.vision.datasets.boxes import boxes
from mmrl.vision.datasets.conversations import conversations
from mmrl.vision.datasets.preference_pairs import preference_pairs
from mmrl.vision.datasets.visual_qa import visual_qa


def written(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_cell_is_a_text_under_the_name_of_its_column(tmp_path):
    text = '\ufeffquestion,answer,note\n"What, ""this""?\nSay.",007,\nAnd,x,n\n'
    first, second = Rows(written(tmp_path, "a.csv", text), tmp_path)
    assert first.columns == {"question": 'What, "this"?\nSay.', "answer": "007", "note": None}
    assert (second.columns["note"], first.place[-6:], second.place[-6:]) == ("n", ".csv:2", ".csv:4")
    assert first.split == "a"


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_every_reader_takes_them(tmp_path, name, mark):
    path = str(written(tmp_path, name, f"question{mark}answer\nWhat?{mark}this\n"))
    (asked,) = visual_qa(path=path)
    (talked,) = conversations(path=path)
    assert (asked.text, asked.target) == (talked.text, talked.target) == ("What?", "this")
    (drawn,) = prompts(path=str(written(tmp_path, name, f"prompt{mark}tag\na cat{mark}1\n")))
    assert (drawn.text, drawn.columns["tag"], drawn.uid) == ("a cat", "1", "a#2")


def test_a_table_is_no_list_of_texts(tmp_path):
    with pytest.raises(ConfigError, match="read by the names of its columns, not as 'txt'"):
        prompts(path=str(written(tmp_path, "a.csv", "prompt\na cat\n")), format="txt")
    with pytest.raises(SourceError, match=r"wanted a key 'prompt' or 'caption' \(the row has text\)"):
        prompts(path=str(written(tmp_path, "b.csv", "text\na cat\n")))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("question,answer\nWhat?\n", r"a.csv:2: has 1 cells, and the first line names 2 columns: question"),
        ("question,question\na,b\n", "names the column 'question' twice"),
        ("question;answer\nWhat?;this\n", "separated by ';', and those of .csv by ','"),
        ("question,answer\n", "holds no row"),
        ("", "holds no row"),
    ],
)
def test_a_damaged_table_is_named(tmp_path, text, words):
    with pytest.raises(SourceError, match=words):
        visual_qa(path=str(written(tmp_path, "a.csv", text)))


def test_a_cell_is_a_number_or_a_list_where_the_column_is_one(tmp_path):
    (asked,) = visual_qa(
        path=str(
            written(tmp_path, "a.csv", 'question,answers,choices\nWhat?,"[""a"", ""b""]","[""a"", ""c""]"\n')
        ),
        prompt="{question} {choices}",
    )
    assert (asked.target, asked.text) == (("a", "b"), "What? A. a\nB. c")
    (tmp_path / "a.png").write_bytes(b"")
    path = written(tmp_path, "b.csv", 'image,query,bbox\na.png,a dog,"[1, 2, 3, 4.5]"\n')
    (boxed,) = boxes(path=str(path))
    assert boxed.target.boxes == ((1, 2, 3, 4.5),)
    spans = spans_of({"start": "1.5", "end": "2e1"}, ("spans",))
    assert spans == ((1.5, 20.0),)
    pair = "prompt,chosen,rejected,score_chosen,score_rejected\nq,a,b,0.5,-1\n"
    (prompt,) = preference_pairs(path=str(written(tmp_path, "c.csv", pair)))
    assert [answer.recorded["score"] for answer in prompt.answers] == [0.5, -1]
    with pytest.raises(RowError, match="wanted a finite number as `score_chosen`, got '1_0'"):
        preference_pairs(path=str(written(tmp_path, "c.csv", pair.replace("0.5", "1_0"))))
