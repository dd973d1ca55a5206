"""Rows as TRL has them: prompts with media in or beside the messages, and pairs with implicit prompts."""

from __future__ import annotations

import pytest
from PIL import Image

from mmrl.data.dataset_io import RowError, write_rows
from mmrl.data.object_rows import put_rows
from mmrl.vision.datasets.conversations import conversations
from mmrl.vision.datasets.preference_pairs import preference_pairs

ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What colour?"}]
SAID = {"role": "assistant", "content": "red"}
PLACE = {"type": "image"}


@pytest.fixture
def home(tmp_path):
    Image.new("RGB", (4, 3), (200, 0, 0)).save(tmp_path / "a.png")
    Image.new("RGB", (2, 2), (0, 0, 200)).save(tmp_path / "b.png")
    (tmp_path / "c.mp4").write_bytes(b"")
    return tmp_path


def read(home, *rows, name="train.jsonl", dataset=conversations, **options):
    write_rows(home / name, rows)
    return dataset(path=str(home / name), **options)


def shown(prompt):
    """What a prompt shows: its roles, with the texts and the names of media of each."""
    return [
        (m.role, [part.media.name if part.media else part.text for part in m.parts]) for m in prompt.messages
    ]


def test_media_without_places_come_first_in_the_first_message_of_the_user(home):
    (prompt,) = read(
        home, {"prompt": ASKED, "images": ["a.png", "b.png"], "solution": "red", "problem_type": 3}
    )
    assert shown(prompt) == [("system", ["Be short."]), ("user", ["a.png", "b.png", "What colour?"])]
    assert prompt.target == "red"
    parts = [PLACE, PLACE, {"type": "text", "text": "What colour?"}]
    asked = [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": parts},
    ]
    assert prompt.columns == {"prompt": asked, "solution": "red", "problem_type": 3}


def test_media_fill_their_places_in_every_message(home):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "This"}, PLACE, {"type": "video"}]},
        SAID,
        {"role": "user", "content": "and <image>?"},
    ]
    (prompt,) = read(home, {"prompt": turns, "video": "c.mp4", "images": ["a.png", "b.png"]})
    assert shown(prompt)[0] == ("user", ["This", "a.png", "c.mp4"])
    assert shown(prompt)[2] == ("user", ["and ", "b.png", "?"])


def test_parts_hold_their_images_themselves_and_columns_fill_the_other_places(home):
    encoded = {"bytes": (home / "b.png").read_bytes(), "path": "b"}
    content = [{"type": "image", "image": "a.png"}, PLACE, {"type": "text", "text": "?"}]
    path = put_rows("d", [{"prompt": [{"role": "user", "content": content}], "image": encoded}], "train")
    (prompt,) = conversations(path=path, root=str(home))
    assert shown(prompt) == [("user", ["a.png", "b", "?"])]
    assert prompt.media[1].load().pixels[0, :, 0, 0].tolist() == [0, 0, 200]
    assert prompt.columns["prompt"][0]["content"] == [PLACE, PLACE, content[2]]  # without the encoded image


def test_images_of_pil_in_memory_are_read(home):
    rows = [{"prompt": ASKED, "image": Image.new("RGB", (2, 2), (0, 9, 0)), "answer": 3}]
    (prompt,) = conversations(path=put_rows("rows", rows, "train"))
    assert prompt.media[0].load().pixels[0, :, 0, 0].tolist() == [0, 9, 0]
    assert (prompt.uid, prompt.target) == ("train#0", "3")


def test_rows_of_parquet_have_every_key_of_a_part(home):
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    (prompt,) = read(
        home, {"prompt": [{"role": "user", "content": content}], "image": "a.png"}, name="t.parquet"
    )
    assert shown(prompt) == [("user", ["a.png", "What?"])]


def test_the_last_turn_of_the_assistant_is_a_recorded_answer(home):
    (prompt,) = read(home, {"messages": [*ASKED, SAID], "target": [1, 2]})
    assert [message.role for message in prompt.messages] == ["system", "user"]
    assert [answer.text for answer in prompt.answers] == ["red"]
    assert prompt.columns["prompt"] == ASKED and "messages" not in prompt.columns
    assert prompt.target == (1, 2)
    (prompt,) = read(home, {"prompt": ASKED, "completion": [SAID]})
    assert [answer.text for answer in prompt.answers] == ["red"]


def test_a_text_is_one_message_and_stays_a_text_for_rewards(home):
    (prompt,) = read(home, {"prompt": "What is <image>?", "image": "a.png"})
    assert shown(prompt) == [("user", ["What is ", "a.png", "?"])]
    assert prompt.columns["prompt"] == "What is <image>?"
    assert prompt.target is None


def test_a_row_that_names_its_environment_needs_no_prompt(home):
    rows = {"environment": "cups", "cups": 5}, {"environment": "cups", "image": "a.png", "prompt": None}
    first, second = read(home, *rows)
    assert [shown(prompt) for prompt in (first, second)] == [[("user", [""])], [("user", ["a.png"])]]
    # Messages, so that rewards in TRL's form get the whole conversation.
    asked = [{"role": "user", "content": ""}]
    assert first.columns == {"environment": "cups", "cups": 5, "prompt": asked}
    (told,) = read(home, rows[0], system_prompt="Play.")
    assert shown(told) == [("system", ["Play."]), ("user", [""])]
    for lacking in ({"environment": None, "cups": 5}, {"prompt": "", "cups": 5}):
        with pytest.raises(RowError, match="wanted"):
            read(home, lacking)


def test_a_system_prompt_and_columns_of_other_names(home):
    columns = {"prompt": "problem", "image": "picture", "solution": "gt"}
    row = {"problem": "What?", "picture": "a.png", "gt": True}
    (prompt,) = read(home, row, columns=columns, system_prompt="Think.")
    assert shown(prompt) == [("system", ["Think."]), ("user", ["a.png", "What?"])]
    assert prompt.target == "yes"
    (prompt,) = read(home, {"prompt": ASKED}, system_prompt="Think.")
    assert shown(prompt)[0] == ("system", ["Be short."])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "wanted a list as `prompt` or `messages`"),
        ({"prompt": []}, "wanted a `prompt` with a turn of the user"),
        ({"prompt": [SAID]}, "wanted a `prompt` with a turn of the user"),
        ({"prompt": [{"role": "critic", "content": "x"}]}, "as the role of `prompt.0.`, got 'critic'"),
        ({"prompt": [{"role": "user", "content": [PLACE]}]}, "1 image places, but 0 are given"),
        ({"prompt": "<image> or <image>?", "image": "a.png"}, "2 image places, but 1 are given"),
        ({"prompt": "<image>?", "images": ["a.png", "b.png"]}, "1 image places, but 2 are given"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "parts of the types text, image"),
        ({"prompt": [{"role": "user", "content": [{**PLACE, "image": "../a.png"}]}]}, "leaves its root"),
        ({"prompt": "What?", "image": "none.png"}, "there is no file 'none.png'"),
        ({"prompt": "What?", "completion": " "}, "wanted a text as `completion`"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_are_named(home, row, message):
    with pytest.raises(RowError, match=message):
        read(home, row)


# ---- pairs


def test_a_prompt_that_both_conversations_begin_with(home):
    row = {
        "chosen": [*ASKED, SAID],
        "rejected": [*ASKED, {"role": "assistant", "content": "blue"}],
        "image": "a.png",
    }
    (pair,) = read(home, row, dataset=preference_pairs)
    assert shown(pair) == [("system", ["Be short."]), ("user", ["a.png", "What colour?"])]
    assert [answer.text for answer in pair.answers] == ["red", "blue"]


def test_pairs_whose_conversations_are_equal_are_errors(home):
    with pytest.raises(RowError, match="differ in their last turn"):
        read(home, {"chosen": [*ASKED, SAID], "rejected": [*ASKED, SAID]}, dataset=preference_pairs)


def test_an_explicit_prompt_with_an_image_inside(home):
    content = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "What?"}]
    row = {"prompt": [{"role": "user", "content": content}], "chosen": [SAID], "rejected": "blue"}
    (pair,) = read(home, row, dataset=preference_pairs)
    assert shown(pair) == [("user", ["b.png", "What?"])]
    assert [answer.text for answer in pair.answers] == ["red", "blue"]
