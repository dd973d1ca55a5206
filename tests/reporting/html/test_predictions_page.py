"""Pages of predictions: the data they embed, what a script may do there, and what links to them."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from mmrl.reporting.answers import step_file, write_columns
from mmrl.reporting.effects import Explanation
from mmrl.reporting.html import write_compared_page, write_page, write_predictions_page
from mmrl.reporting.html.predictions import change_rows, notes_on
from mmrl.reporting.predictions import change_of, join, read_predictions
from tests.reporting.test_predictions import write

HOSTILE = "</script><script>alert(1)</script><!--"


def data_of(text: str) -> dict:
    """Read the data that a page embeds."""
    (data,) = re.findall(r'<script type="application/json" class=data>(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def test_a_page_embeds_every_answer_once_and_no_html_of_it(tmp_path):
    more = {"completion": [HOSTILE, "b"], "seen": [b"jpeg", b"jpeg"], "correct": [False, None]}
    path = write(tmp_path / HOSTILE.replace("/", "_") / "p.parquet", [0.0, float("nan")], **more)
    page = write_predictions_page(path)
    assert page == path.with_suffix(".html")
    text = page.read_text()
    data = data_of(text)
    assert [row["uid"] for row in data["rows"]] == ["p0", "p1"]
    answer = {"text": HOSTILE, "made": None, "turns": [], "values": [0.0], "correct": False}
    assert data["rows"][0]["sides"] == [[answer]]
    assert data["rows"][1]["sides"][0][0]["values"] == [None], "JSON has no NaN"
    assert data["images"] == [base64.b64encode(b"jpeg").decode()], "both rows show one image"
    assert data["measures"] == ["right"] and "alert(1)</script>" not in text
    assert "0 of 1 are correct: right is 1" in text


def test_a_page_plays_the_sound_of_a_prompt(tmp_path):
    data = data_of(
        write_predictions_page(write(tmp_path / "p.parquet", [1.0, 0.0], heard=[b"RIFF", None])).read_text()
    )
    assert data["sounds"] == [base64.b64encode(b"RIFF").decode()]
    assert [row["heard"] for row in data["rows"]] == [0, None]


def test_a_conversation_is_shown_with_what_tools_showed(tmp_path):
    talk = f"{HOSTILE} tool <image: 4 tokens> a fox"
    more = {"conversation": [talk, talk], "seen": [b"whole", None], "shown": [[b"part"], None]}
    data = data_of(write_predictions_page(write(tmp_path / "p.parquet", [1.0, 0.0], **more)).read_text())
    turns = [row["sides"][0][0]["turns"] for row in data["rows"]]
    assert turns == [[f"{HOSTILE} tool ", 0, " a fox"], [talk]]
    assert data["images"] == [base64.b64encode(image).decode() for image in (b"part", b"whole")]


def test_only_its_own_script_may_run(tmp_path):
    text = write_predictions_page(write(tmp_path / "p.parquet", [1.0])).read_text()
    script = text[text.rindex("<script>") + 8 : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; "
        f"script-src 'sha256-{digest}'" in text
    )
    assert "innerHTML" not in script and "insertAdjacentHTML" not in script
    assert not re.search(r'(src|href)="?https?:', text)


def test_filters_are_those_that_the_rows_allow(tmp_path):
    plain = write(tmp_path / "a.parquet", [1.0, 1.0], judge="", **{"reward/iou": [0.5, 0.7]})
    text = write_predictions_page(plain).read_text()
    assert "name=show" not in text and "name=split" not in text
    more = {"split": ["test", "val"], "correct": [True, False]}
    text = write_predictions_page(write(tmp_path / "b.parquet", [1.0, 0.0], **more)).read_text()
    assert "<option>wrong</option>" in text and "<option>val</option>" in text


def test_two_evaluations_stand_side_by_side(tmp_path):
    first = write(tmp_path / "a.parquet", [0.0, 1.0, 0.0], completion=["a", "b", "c"])
    second = write(tmp_path / "b.parquet", [1.0, 1.0], completion=["d", "e"])
    joined = join(read_predictions(first), read_predictions(second))
    changes = [change_of(joined, measure) for measure in joined.measures]
    names, page = ["<one>", "two"], tmp_path / "deep" / "c.html"
    text = write_compared_page({"": joined}, {"": changes}, names, page, Explanation()).read_text()
    data = data_of(text)
    assert [[answers[0]["text"] for answers in row["sides"]] for row in data["rows"]] == [
        ["a", "d"],
        ["b", "e"],
    ]
    assert data["names"] == ["<one>", "two"] and "&lt;one&gt;" in text and "<one>" not in text
    assert change_rows(changes, ["one", "two"])[1] == [
        ["right", "0.5", "1", "1", "0", "1", "1", "+0.5 (+0 to +1)"]
    ]
    assert notes_on(joined, ["one", "two"]) == ["2 prompts are in both", "1 only in one"]
    assert "<option>better</option>" in text


def test_a_damaged_file_does_not_cost_the_page_of_a_run(tmp_path, caplog):
    path = step_file(tmp_path, 3)
    path.parent.mkdir()
    path.write_bytes(b"PAR1 half")
    assert "predictions.html" not in write_page(tmp_path).read_text()
    assert "no page of predictions" in caplog.messages[0]
    write_columns(path, {"uid": ["p"], "prompt": ["why"], "reward": [1.0], "reward/right": [1.0]})
    assert '<a href="predictions.html">' in write_page(tmp_path).read_text()
    assert data_of((tmp_path / "predictions.html").read_text())["rows"][0]["uid"] == "p"
