"""Ready runs on rows as their heads show them: what is read, and what right and wrong answers earn."""

from __future__ import annotations

import json
import re

import pytest
from PIL import Image

from mmrl.config.binding import Pieces
from mmrl.config.schema import as_piece, load
from mmrl.config.stages import load_stages
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.data.dataset_io import write_rows
from tests.support.configs import CONFIGS


@pytest.fixture
def home(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (200, 100)).save(tmp_path / name)
    return tmp_path


def shown_rows(name):
    """Read the rows that the comment at the head of a run shows."""
    lines = (CONFIGS / f"train/{name}.yaml").read_text().splitlines()
    head = "".join(line.lstrip("#") for line in lines if line.startswith("#"))
    decoder, rows = json.JSONDecoder(), []
    for match in re.finditer(r'\{"ima', head):
        rows.append(decoder.raw_decode(head[match.start() :])[0])
    return rows


def prompts_of(run, home, rows, options):
    path = home / "rows.jsonl"
    write_rows(path, rows)
    piece = as_piece({**options, "path": str(path)}, "data")
    return Pieces(Stream()).prompts(piece, "data")


def earned(run, prompt, text):
    """Score an answer with the rewards of a run that load nothing and ask nobody."""
    found = {}
    for piece in run.rewards:
        if piece.name in ("http", "route_reward"):
            continue
        bound = Pieces(Stream()).make("reward", piece)
        wanted = bound.call.get("where", {}).items()
        if all(prompt.columns.get(name) == value for name, value in wanted):
            found[bound.name] = bound([prompt], [Outcome(text=text)])[0]
    return found


def test_the_rows_of_craft_gui(home):
    run = load(CONFIGS / "train/craft_gui.yaml")
    click, asked = prompts_of(run, home, shown_rows("craft_gui"), {"name": run.data.name, **run.data.options})
    right = "<think>so</think><action>{'action': 'click', 'position': [0.2, 0.25]}</action>"
    assert earned(run, click, right) == {"tag_format": 1, "click_reward": 1, "action_argument": 1}
    missed = right.replace("0.25", "0.31")
    assert earned(run, click, missed) == {"tag_format": 1, "click_reward": 1, "action_argument": 0}
    said = "<think>so</think><action>{'action': 'answer', 'value': '80'}</action>"
    assert earned(run, asked, said) == {"tag_format": 1, "click_reward": 1, "action_argument": None}
    assert asked.columns["judged"] is True and "judged" not in click.columns
    # The actions that the prompt shows can be read.
    shown = re.findall(r'\{"action".*?\}', click.text)
    assert [json.loads(action)["action"] for action in shown] == ["click", "type", "back"]


def test_the_rows_of_r1_router(home):
    run = load(CONFIGS / "train/r1_router.yaml")
    options = {"name": run.data.name, **run.data.options}
    route, answer = prompts_of(run, home, shown_rows("r1_router"), options)
    assert (route.uid, answer.uid) == ("rows#0/0", "rows#0/1")
    assert earned(run, route, "<think>a</think><answer>...</answer>") == {"answer_recall": None}


def test_the_rows_of_mimo_vl_miloco(home):
    _, run = (stage.config for stage in load_stages(CONFIGS / "train/mimo_vl_miloco.yaml"))
    grounding, *others = run.data.options["data"]["data"]
    (screen, maths), found = shown_rows("mimo_vl_miloco"), []
    for row, options, source in zip((screen, maths), others, ("gui", "maths"), strict=True):
        path = home / f"{source}.jsonl"
        write_rows(path, [row])
        found.append({**options, "path": str(path)})
    mixture = as_piece({"name": "mixture", "data": found, "sources": ["gui", "maths"]}, "data")
    screen, maths = Pieces(Stream()).prompts(mixture, "data")
    # 200 x 100 is resized to 196 x 112, in which the box is (19.6, 11.2, 98, 56).
    said = "<think>so</think><answer>[20, 11, 98, 56]</answer>"
    scores = earned(run, screen, said)
    assert scores == {"box_iou": pytest.approx(1, abs=0.03), "tag_format": 1}
    assert earned(run, maths, "<think>so</think><answer>12</answer>") == {"exact_match": 1, "tag_format": 1}
