"""Pairs as TRL, LLaMA-Factory and ms-swift write them: videos, other media of a side, turns with tools."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from mmrl.core.types import Message, Part
from mmrl.data.dataset_io import RowError, write_rows
from mmrl.vision.datasets.preference_pairs import preference_pairs

ASKED, SAID = {"role": "user", "content": "what"}, {"role": "assistant", "content": "a dog"}
OTHER = {"role": "assistant", "content": "a cat"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "crop", "arguments": '{"box": [0, 1]}'}}]}
REPLY = {"role": "tool", "content": "done"}
TOOL = {"name": "crop", "description": "Cut.", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": TOOL}


@pytest.fixture
def home(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 3)).save(tmp_path / name)
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def read(home, *rows, name="rows.jsonl", dataset=preference_pairs, **options):
    write_rows(home / name, rows)
    return list(dataset(path=str(home / name), **options))


def shown(messages):
    """List role, texts and names of media of every message."""
    return [(m.role, [part.media.name if part.media else part.text for part in m.parts]) for m in messages]


def asks(video="a.mp4"):
    """Make a message of the user that contains a video."""
    return {"role": "user", "content": [{"type": "video", "video": video}, {"type": "text", "text": "what"}]}


WITH_VIDEO = {
    "trl": {"prompt": "what", "chosen": "a dog", "rejected": "a cat", "videos": ["a.mp4"]},
    "trl column": {"prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER], "video": "a.mp4"},
    "trl places": {
        "prompt": [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what"}]}],
        "chosen": [SAID], "rejected": [OTHER], "videos": ["a.mp4"],
    },
    "trl parts": {"prompt": [asks()], "chosen": [SAID], "rejected": [OTHER]},
    "trl implicit": {"chosen": [asks(), SAID], "rejected": [asks(), OTHER]},
    "llama-factory": {
        "conversations": [{"from": "human", "value": "<video>what"}], "videos": ["a.mp4"],
        "chosen": {"from": "gpt", "value": "a dog"}, "rejected": {"from": "gpt", "value": "a cat"},
    },
    "llama-factory messages": {
        "messages": [{"role": "user", "content": "<video>what"}], "videos": ["a.mp4"],
        "chosen": SAID, "rejected": OTHER,
    },
    "alpaca": {
        "instruction": "<video>what", "input": "", "chosen": "a dog", "rejected": "a cat", "videos": ["a.mp4"]
    },
    "ms-swift": {
        "messages": [{"role": "user", "content": "<video>what"}, SAID], "videos": ["a.mp4"],
        "rejected_response": "a cat",
    },
    "ms-swift messages": {
        "messages": [{"role": "user", "content": "<video>what"}, SAID], "videos": ["a.mp4"],
        "rejected_messages": [{"role": "user", "content": "<video>what"}, OTHER],
    },
    "ms-swift query": {
        "query": "<video>what", "response": "a dog", "rejected_response": "a cat", "videos": ["a.mp4"]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("form", WITH_VIDEO)
def test_a_pair_about_a_video_is_the_same_in_every_form(home, form, name):
    if (form, name) == ("trl implicit", "rows.parquet"):
        return  # Arrow has no column of texts and lists
    (pair,) = read(home, WITH_VIDEO[form], name=name, frames_per_second=1.0, max_frames=8, total_pixels=4096)
    assert shown(pair.messages) == [("user", ["a.mp4", "what"])]
    assert [answer.text for answer in pair.answers] == ["a dog", "a cat"]
    assert [answer.recorded["preferred"] for answer in pair.answers] == [1, 0]
    assert not any(answer.asked or answer.turns or answer.extra for answer in pair.answers)
    sampling = pair.media[0].load.sampling
    assert (sampling.frames_per_second, sampling.max_frames, sampling.total_pixels) == (1.0, 8, 4096)


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [asks(), SAID], "rejected": [asks("b.mp4"), OTHER]},
        {"chosen": [asks(), SAID], "rejected": [asks("b.mp4"), SAID]},  # the same words about another video
        {"prompt": "what", "chosen": [asks(), SAID], "rejected": [asks("b.mp4"), OTHER]},
        {**WITH_VIDEO["ms-swift"], "rejected_videos": ["b.mp4"]},
        {**WITH_VIDEO["ms-swift"], "rejected_response": "a dog", "rejected_videos": ["b.mp4"]},
        {**WITH_VIDEO["ms-swift messages"], "rejected_videos": ["b.mp4"]},
        {**WITH_VIDEO["trl"], "rejected_videos": ["b.mp4"]},
    ],
)
def test_the_rejected_answer_may_be_about_another_video(home, row):
    (pair,) = read(home, row)
    assert shown(pair.messages) == [("user", ["a.mp4", "what"])]
    chosen, rejected = pair.answers
    assert chosen.asked == () and shown(rejected.asked) == [("user", ["b.mp4", "what"])]


def test_only_the_kind_that_is_named_is_replaced(home):
    row = {**WITH_VIDEO["trl"], "images": ["a.png"], "rejected_images": ["b.png"]}
    (pair,) = read(home, row)
    assert shown(pair.messages) == [("user", ["a.png", "a.mp4", "what"])]
    assert {m.name for m in type(pair)("x", pair.answers[1].asked).media} == {"b.png", "a.mp4"}


TALKS = {
    "trl": {
        "prompt": [ASKED], "chosen": [CALL, REPLY, SAID], "rejected": [OTHER], "tools": [WRAPPED],
    },
    "trl text": {
        "prompt": "what", "chosen": [CALL, REPLY, SAID], "rejected": "a cat", "tools": json.dumps([WRAPPED]),
    },
    "trl implicit": {"chosen": [ASKED, CALL, REPLY, SAID], "rejected": [ASKED, OTHER], "tools": [TOOL]},
    "ms-swift": {
        "messages": [
            ASKED, {"role": "tool_call", "content": '{"name": "crop", "arguments": {"box": [0, 1]}}'},
            {"role": "tool_response", "content": "done"}, SAID,
        ],
        "rejected_messages": [ASKED, OTHER], "tools": json.dumps([TOOL]),
    },
    "llama-factory": {
        "conversations": [{"from": "human", "value": "what"}], "tools": json.dumps([TOOL]),
        "chosen": [
            {"from": "function_call", "value": '{"name": "crop", "arguments": {"box": [0, 1]}}'},
            {"from": "observation", "value": "done"}, {"from": "gpt", "value": "a dog"},
        ],
        "rejected": {"from": "gpt", "value": "a cat"},
    },
}  # fmt: skip


@pytest.mark.parametrize("form", TALKS)
def test_turns_with_tools_are_part_of_the_answer(home, form):
    (pair,) = read(home, TALKS[form])
    chosen, rejected = pair.answers
    assert shown(pair.messages) == [("user", ["what"])] and pair.tools == (WRAPPED,)
    assert [turn.role for turn in chosen.turns] == ["assistant", "tool"] and rejected.turns == ()
    made = {"type": "function", "function": {"name": "crop", "arguments": {"box": [0, 1]}}}
    assert chosen.turns[0].keys["tool_calls"] == [made]  # arguments as an object, also from JSON text
    assert chosen.turns[1] == Message("tool", (Part("done"),))
    assert (chosen.text, rejected.text) == ("a dog", "a cat")


def test_common_turns_are_the_prompt_and_an_answer_begins_with_a_turn_of_the_assistant(home):
    worse = [ASKED, CALL, {"role": "tool", "content": "failed"}, OTHER]
    better, call = [ASKED, CALL, REPLY, SAID], {"from": "function_call", "value": '{"name": "crop"}'}
    (pair,) = read(home, {"chosen": better, "rejected": [*better[:3], OTHER]})
    assert [message.role for message in pair.messages] == ["user", "assistant", "tool"]
    (pair,) = read(home, {"chosen": better, "rejected": worse})  # the replies differ: from the call on
    assert [message.role for message in pair.messages] == ["user"]
    assert [shown(one.turns)[1] for one in pair.answers] == [("tool", ["done"]), ("tool", ["failed"])]
    calls = [{"role": "tool_call", "content": json.dumps({"name": name})} for name in ("crop", "ocr")]
    (pair,) = read(home, {"messages": [ASKED, *calls, REPLY, REPLY, SAID], "rejected_response": "no"})
    assert [call["function"]["name"] for call in pair.messages[1].keys["tool_calls"]] == ["crop", "ocr"]
    row = {
        "conversations": [{"from": "human", "value": "what"}],
        "chosen": call,
        "rejected": call | {"value": "[]"},
    }
    with pytest.raises(RowError, match="empty|wanted"):
        read(home, row)


def test_images_in_replies_of_tools_fill_places_after_those_of_the_prompt(home):
    reply = {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "half"}]}
    asked = {"role": "user", "content": "<image>what"}
    row = {"prompt": [asked], "chosen": [CALL, reply, SAID], "rejected": [CALL, reply, OTHER]}
    (pair,) = read(home, {**row, "images": ["a.png", "b.png"]})
    assert shown(pair.messages)[::2] == [("user", ["a.png", "what"]), ("tool", ["b.png", "half"])]
    own = {"role": "tool", "content": [{"type": "image", "image": "b.png"}]}
    (pair,) = read(home, {"prompt": "what", "chosen": [CALL, own, SAID], "rejected": "no", "image": "a.png"})
    assert shown(pair.messages) == [("user", ["a.png", "what"])]
    assert shown(pair.answers[0].turns)[1] == ("tool", ["b.png"])
    with pytest.raises(RowError, match="2 image places, but 1 are given"):
        read(home, {**row, "images": ["a.png"]})


PAIR = {"prompt": "what", "chosen": "a dog", "rejected": "a cat"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PAIR, "videos": ["no.mp4"]}, "no file 'no.mp4'"),
        ({**PAIR, "videos": ["../rows.jsonl"]}, "leaves its root"),
        ({**PAIR, "prompt": "<video><video>what", "videos": ["a.mp4"]}, "2 video places, but 1 are given"),
        (
            {**WITH_VIDEO["ms-swift"], "rejected_videos": ["a.mp4", "b.mp4"]},
            "1 video places, but 2 are given",
        ),
        ({**PAIR, "rejected": "a dog"}, "differ, got 'a dog' twice"),
        ({**WITH_VIDEO["ms-swift"], "rejected_response": "a dog"}, "differ"),
        ({"chosen": [ASKED, CALL, REPLY, SAID], "rejected": [ASKED, CALL, REPLY, SAID]}, "differ"),
        ({"chosen": [ASKED, SAID], "rejected": [ASKED, SAID, ASKED, OTHER]}, "differ in their last turn"),
        (
            {"chosen": [ASKED, SAID], "rejected": [{**ASKED, "content": "who"}, OTHER]},
            "differ in their prompt",
        ),
        (
            {**PAIR, "conversations": [{"from": "human", "value": "what"}]},
            "asks in `prompt` beside conversations",
        ),
        ({**PAIR, "rejected_response": "x"}, "asks in `prompt` beside rejected_response"),
        ({**WITH_VIDEO["ms-swift"], "chosen": "x"}, "`chosen` beside the rejected answer of ms-swift"),
        ({**WITH_VIDEO["ms-swift"], "rejected_messages": [ASKED, OTHER]}, "beside `rejected_messages`"),
        ({**PAIR, "tools": [{"description": "x"}]}, "as `tools.0..name`"),
        ({**PAIR, "tools": "crop"}, "wanted a list as `tools`"),
        ({**PAIR, "chosen": [CALL, REPLY]}, "words of the assistant as `chosen`"),
        ({**PAIR, "chosen": [CALL, SAID]}, "turns of the assistant and replies"),
        (
            {**PAIR, "chosen": [{"role": "tool_call", "content": "crop"}, REPLY, SAID]},
            "as JSON in `chosen.0.`",
        ),
        ({**PAIR, "chosen": [{"role": "tool_call", "content": "3"}, REPLY, SAID]}, "tool_calls"),
        (
            {**PAIR, "images": ["a.png"], "chosen": [{**SAID, "content": "<image>"}, ASKED, SAID]},
            "shows a medium",
        ),
    ],
)
def test_rows_that_would_teach_something_else_are_named(home, row, message):
    with pytest.raises(RowError, match=message):
        read(home, row)
    assert [pair.uid for pair in read(home, row, {**PAIR, "id": "good"}, bad_rows="drop")] == ["good"]
