"""Every field of a row that says something is read, or named, by every data set and every conversion."""

from __future__ import annotations

import json
import logging
import re
from itertools import product

import pytest
from PIL import Image

from mmrl.config.registry import find, pieces
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import RowError, write_rows
from mmrl.data.row_fields import ASKING, JUDGING
from mmrl.vision.benchmarks.conversions import CONVERSATIONS, read_row, write_row

CALL = {"type": "function", "function": {"name": "@crop", "arguments": {"box": "@call"}}}
ASKED = {"role": "user", "content": "@asked"}
SAID = {"role": "assistant", "content": "@said"}
OTHER = {"role": "assistant", "content": "@other"}
TURNS = [{"role": "system", "content": "@sys"}, {"role": "user", "content": "@first"}, SAID, ASKED]
TALK = [{"from": "system", "value": "@sys"}, {"from": "human", "value": "<image>@asked"}]
ANSWERED = [*TALK, {"from": "gpt", "value": "@said"}]
PAIR = {"chosen": {"from": "gpt", "value": "@said"}, "rejected": {"from": "gpt", "value": "@other"}}

# Rows as they are published; what starts with @ says something.
FORMS = {
    "trl prompt": {"prompt": "@asked", "images": ["a.png"], "solution": "@right"},
    "trl messages": {"prompt": TURNS, "image": "a.png", "answer": "@right", "difficulty": "@hard"},
    "trl prompt completion": {"prompt": [ASKED], "completion": [SAID]},
    "trl several turns": {"prompt": [ASKED], "completion": [SAID, {"role": "user", "content": "@go"}, OTHER]},
    "trl preference": {"prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER], "margin": "@margin"},
    "trl texts": {"prompt": "@asked", "chosen": "@said", "rejected": "@other", "images": ["a.png"]},
    "trl implicit": {"chosen": [*TURNS, SAID], "rejected": [*TURNS, OTHER]},
    "trl unpaired": {"prompt": [ASKED], "completion": [SAID], "label": False},
    "trl parts twice": {"chosen": [ASKED, SAID, ASKED, OTHER], "rejected": [ASKED, OTHER, ASKED, SAID]},
    "trl lists": {"prompt": "@asked", "chosen": "@said", "rejected": ["@other", "@worse"]},
    "trl tools": {
        "messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, SAID, ASKED, OTHER],
        "tools": [{"name": "@crop", "parameters": {}}],
    },
    "openai": {
        "messages": [
            ASKED,
            {"role": "assistant", "tool_calls": [{**CALL, "id": "@id"}], "reasoning_content": "@thought"},
            {"role": "tool", "tool_call_id": "@id", "name": "@crop", "content": "@reply"},
            SAID,
        ],
        "parallel_tool_calls": True,
    },
    "openai thought": {"messages": [ASKED, {**SAID, "reasoning_content": "@thought"}]},
    "openai pairs": {
        "input": {"messages": [ASKED]}, "preferred_output": [SAID], "non_preferred_output": [OTHER]
    },
    "alpaca": {"instruction": "@do", "input": "@it", "output": "@said", "system": "@sys"},
    "alpaca history": {"instruction": "@do", "output": "@said", "history": [["@first", "@then"]]},
    "sharegpt": {"conversations": ANSWERED, "images": ["a.png"], "tools": "@tools"},
    "sharegpt pair": {"conversations": TALK, "images": ["a.png"], **PAIR},
    "sharegpt kto": {"conversations": ANSWERED, "images": ["a.png"], "kto_tag": False},
    "sharegpt sound": {"conversations": [{"from": "human", "value": "<audio>@asked"}], "audios": ["@a.wav"]},
    "swift": {"messages": [*TURNS, SAID], "images": ["a.png"], "solution": "@right"},
    "swift pair": {"messages": [*TURNS, SAID], "rejected_response": "@other", "label": "@label"},
    "swift messages": {"messages": [*TURNS, SAID], "rejected_messages": [ASKED, OTHER]},
    "swift query": {"query": "@asked", "response": "@said", "history": [["@a", "@b"]], "system": "@sys"},
    "swift grounding": {"messages": [ASKED, SAID], "images": ["a.png"], "objects": {"ref": ["@dog"]}},
    "verl": {
        "data_source": "@set", "prompt": TURNS, "images": ["a.png"], "ability": "@math",
        "reward_model": {"style": "@model", "ground_truth": "@right"}, "extra_info": {"index": "@index"},
    },
    "llava": {"id": "@id", "image": "a.png", "conversations": ANSWERED[1:], "model": "@teacher"},
    "converted": {"question": "@asked", "system": "@sys", "answer": "@right", "images": ["a.png"]},
    "choices": {"question": "@asked", "choices": ["@one", "@two"], "answer": "@right", "image": "a.png"},
    "boxes": {"image": "a.png", "query": "@dog", "bbox": [0, 0, 1, 1], "area": "@area"},
    "pair of images": {"original": "a.png", "changed": "a.png", "caption": "@said"},
    "steps": {
        "steps": [{"step_type": "ans", "problem": "@asked", "answer": "@right", "system": "@sys"}],
        "images": ["a.png"],
    },
    "clip": {"video": "c.mp4", "query": "@dog", "start": 0, "end": 1, "duration": 2},
    "pope": {"image": "a.png", "text": "@asked", "label": "yes", "category": "@hard"},
    "chart": {"imgname": "a.png", "query": "@asked", "label": "@right"},
    "vocabulary": {"image": "a.png", "objects": ["dog"], "prompt": "@asked", "captions": ["a dog"]},
    "recorded": {"prompt": "@asked", "chosen": "a.png", "rejected": "b.png", "negative_prompt": "@not"},
    "recorded clip": {"prompt": "@asked", "videos": ["c.mp4"], "caption": "@said"},
    "layers": {"caption": "@asked", "foreground": "a.png", "background": "a.png", "mask": "a.png"},
    "text to image": {"prompt": "@asked", "metadata": {"tag": "@tag"}, "image": "a.png"},
}  # fmt: skip
# What data sets need besides the rows, and those that read no rows of this kind.
OPTIONS = {
    "vision.grounding": {"stream": Stream(0)},
    "vision.visual_qa": {"prompt": "{question}\n{choices}"},
    "vision.benchmark": {"format": "chartqa"},
    "vision.closed_vocabulary": {"ontology": "words.json"},
    "diffusion.videos": {"num_frames": 1, "height": 8, "width": 8},
}
WITHOUT_ROWS = {
    "mixture", "drop_thoughts", "token_budget", "episodes",
    "vision.chair", "vision.amber", "vision.object_halbench",
}  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 3)).save(tmp_path / name)
    (tmp_path / "c.mp4").write_bytes(b"x")
    (tmp_path / "words.json").write_text(json.dumps({"objects": {"dog": ["dog"]}}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*values):
    """The words of values that say something."""
    return set(re.findall(r"@\w+", repr(values)))


def lost(name, row, home, caplog):
    """The columns that a data set neither reads nor names."""
    write_rows(home / "rows.jsonl", [row])
    caplog.clear()
    entry = find("data", name)
    own = OPTIONS.get(name, {}) | ({"root": str(home)} if "root" in entry.options else {})
    try:
        prompts = list(entry.target(path=str(home / "rows.jsonl"), **own))
    except RowError:
        return None  # what the errors say other tests look at
    read = said(*((p.uid, p.text, [m.extra for m in p.messages], p.target) for p in prompts))
    if not name.startswith("diffusion"):  # whose answers are files
        read |= said(*((answer.text, answer.extra) for prompt in prompts for answer in prompt.answers))
    return [key for key, value in row.items() if said(value) - read and f"{key} (" not in caplog.text]


@pytest.mark.parametrize("name", [e.full_name for e in pieces("data") if e.full_name not in WITHOUT_ROWS])
def test_a_data_set_reads_every_field_or_names_it(home, caplog, name):
    caplog.set_level(logging.WARNING, "mmrl")
    found = {form: lost(name, row, home, caplog) for form, row in FORMS.items()}
    assert not any(found.values()), found
    assert [] in found.values()  # it reads one
    # A column more, in the rows that can be read.
    for form, column in product(found, (*ASKING, *JUDGING, "whatever")):
        if found[form] == [] and column not in FORMS[form]:
            row = {**FORMS[form], column: "@more"}
            assert not lost(name, row, home, caplog), f"{form} with {column}"


KEYS = ("tool_calls", "reasoning_content", "name", "loss", "weight", "function_call", "audio", "whatever")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("at", range(4))
def test_a_key_of_a_message_is_read_or_refused(home, caplog, key, at):
    value = {"tool_calls": [CALL], "loss": False, "weight": 0}.get(key, "@key")
    turns = [*TURNS, SAID]
    turns[at] = {**turns[at], key: value}
    for row in ({"messages": turns}, {"prompt": turns[:-1]}):
        assert not lost("vision.conversations", row, home, caplog)
        if key not in ("tool_calls", "reasoning_content", "name"):
            with pytest.raises(RowError, match=f"`{key}`"):
                list(find("data", "vision.conversations").target(path=str(home / "rows.jsonl")))


@pytest.mark.parametrize("toolkit", CONVERSATIONS)
def test_conversions_keep_every_field_or_refuse_the_row(toolkit):
    """There, on to every toolkit, and back."""
    kept = 0
    for form, row in FORMS.items():
        try:
            ours = read_row(row, toolkit)
        except RowError:
            continue
        assert said(row) <= said(ours), form
        for other in CONVERSATIONS:
            try:
                theirs = write_row(ours, other)
            except RowError:
                continue
            assert said(ours) <= said(theirs), (form, other)
            back = read_row(theirs, other)
            assert said(ours) <= said(back), (form, other, "back")
            kept += 1
    assert kept >= 10
