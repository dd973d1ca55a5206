"""CSV and TSV files are read by the names of their columns, by every reader of rows."""

from __future__ import annotations

import pytest

from mmrl.config.loading import ConfigError
from mmrl.data.dataset_io import Rows, SourceError
from mmrl.diffusion.datasets import prompts
from mmrl.vision.datasets.conversations import conversations
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
        ("question,answer\n", "holds no row"),
        ("", "holds no row"),
    ],
)
def test_a_damaged_table_is_named(tmp_path, text, words):
    with pytest.raises(SourceError, match=words):
        visual_qa(path=str(written(tmp_path, "a.csv", text)))
