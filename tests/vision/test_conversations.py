"""Rows as TRL has them: prompts with media in or beside the messages, and pairs with implicit prompts."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict
from PIL import Image

from mmrl.core.types import Outcome
from mmrl.data.dataset_io import RowError, write_rows
from mmrl.data.object_rows import put_rows
from mmrl.data.row_fields import NAMED, NamedColumns
from mmrl.rewards.adapters import from_trl
from mmrl.vision.datasets.conversations import conversations
from mmrl.vision.datasets.preference_pairs import preference_pairs
from mmrl.vision.models.processor import template_message

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
        ({"prompt": [{"role": "user", "content": [{"type": "depth"}]}]}, "parts of the types text, image"),
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


FIRST, SECOND = ({"role": "user", "content": text} for text in ("a", "b"))
BLUE = {"role": "assistant", "content": "blue"}


def test_turns_that_both_sides_share_belong_to_the_prompt(home):
    row = {"prompt": [FIRST], "chosen": [SAID, SECOND, SAID], "rejected": [SAID, SECOND, BLUE]}
    (pair,) = read(home, row, dataset=preference_pairs)
    assert shown(pair) == [("user", ["a"]), ("assistant", ["red"]), ("user", ["b"])]
    assert [answer.text for answer in pair.answers] == ["red", "blue"]


def test_a_conversation_may_repeat_the_prompt_and_the_chosen_answer(home):
    """As rows of UltraFeedback do, some with a system prompt in the conversations alone."""
    begins = [ASKED[0], FIRST]
    row = {"prompt": "a", "chosen": [*begins, SAID], "rejected": [*begins, BLUE], "score_chosen": 8.0}
    (pair,) = read(home, {**row, "score_rejected": 3.0}, dataset=preference_pairs)
    assert shown(pair) == [("system", ["Be short."]), ("user", ["a"])]
    row = {"prompt": "a", "chosen": [FIRST, SAID], "rejected": [FIRST, BLUE], "messages": [FIRST, SAID]}
    (pair,) = read(home, row, dataset=preference_pairs)
    assert shown(pair) == [("user", ["a"])]
    assert [answer.text for answer in pair.answers] == ["red", "blue"]
    with pytest.raises(RowError, match="that is not the chosen one"):
        read(home, {**row, "messages": [FIRST, BLUE]}, dataset=preference_pairs)


def test_a_margin_that_is_no_number_is_an_error_before_the_run(home):
    row = {"prompt": "a", "chosen": "red", "rejected": "blue"}
    with pytest.raises(RowError, match="wanted a finite number as `margin`, got 'large'"):
        read(home, {**row, "margin": "large"}, dataset=preference_pairs)
    for margin in (2, "0.5", [4, 2], "", None):
        assert read(home, {**row, "margin": margin}, dataset=preference_pairs)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_score_of_one_side_alone_is_an_error(home, side):
    """The other side would get 1 or 0, on another scale than the score."""
    row = {"prompt": "a", "chosen": "red", "rejected": "blue", f"score_{side}": 8.0}
    with pytest.raises(RowError, match=f"wanted both scores of the pair, got `score_{side}` without"):
        read(home, row, dataset=preference_pairs)


def test_images_of_a_repeated_prompt_are_kept(home):
    shows = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "a"}]}
    row = {"prompt": "a", "chosen": [shows, SAID], "rejected": [shows, BLUE]}
    (pair,) = read(home, row, dataset=preference_pairs)
    assert shown(pair) == [("user", ["a.png", "a"])]
    with pytest.raises(RowError, match="repeat the prompt"):
        read(home, {**row, "rejected": [FIRST, BLUE]}, dataset=preference_pairs)
    with pytest.raises(RowError, match="keep one of them"):
        read(home, {"prompt": [shows], "messages": [FIRST, SAID]})


def test_converted_pairs_have_a_question_and_a_system_prompt(home):
    row = {"question": "a", "system": "Be short.", "chosen": "red", "rejected": "blue", "images": ["a.png"]}
    (pair,) = read(home, row, dataset=preference_pairs)
    assert shown(pair) == [("system", ["Be short."]), ("user", ["a.png", "a"])]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": [SAID, SECOND], "rejected": [BLUE]}, "words of the assistant as `chosen`"),
        ({"prompt": "a", "chosen": {"role": "user", "content": "x"}, "rejected": "y"}, "of the role 'user'"),
        ({"prompt": "a", "chosen": [SECOND, SAID], "rejected": [FIRST, BLUE]}, "not the one that `chosen`"),
        ({"prompt": "a", "chosen": ["blue", "green"], "rejected": "red"}, "`chosen`, got 2 answers"),
        ({"prompt": "a", "chosen": "red", "rejected": [SAID]}, "that differ, got 'red' twice"),
        (
            {"prompt": "a", "messages": [SECOND], "chosen": "red", "rejected": "b"},
            "is not the one of `messages`",
        ),
        (
            {"prompt": "a", "chosen": {**SAID, "loss": False}, "rejected": "blue"},
            "the key `loss` of",
        ),
        ({"prompt": "a", "chosen": "x", "rejected": "y", "chosen_images": ["b.png"]}, "`chosen_images`"),
    ],
)
def test_pairs_that_would_lose_words_are_named(home, row, message):
    with pytest.raises(RowError, match=message):
        read(home, row, dataset=preference_pairs)


# ---- calls, thoughts and names of recorded turns


def test_keys_of_earlier_turns_reach_the_chat_template(home):
    call = {"id": "call_1", "type": "function", "function": {"name": "crop", "arguments": '{"box": [0, 1]}'}}
    turns = [
        FIRST,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I look."},
        {"role": "tool", "content": "done", "tool_call_id": "call_1", "name": "crop"},
        SECOND,
    ]
    (prompt,) = read(home, {"prompt": turns})
    second, third = map(template_message, prompt.messages[1:3])
    made = {"name": "crop", "arguments": {"box": [0, 1]}}
    assert second["tool_calls"] == [{"id": "call_1", "type": "function", "function": made}]
    assert second["reasoning_content"] == "I look."
    assert (third["tool_call_id"], third["name"]) == ("call_1", "crop")
    assert prompt.columns["prompt"][1]["tool_calls"][0]["function"] == made
    assert hash(prompt.messages) == hash(read(home, {"prompt": turns})[0].messages)


def test_calls_and_thoughts_beside_an_answer_stay(home):
    turn = {**SAID, "content": None, "tool_calls": [{"name": "crop", "arguments": {}}]}
    turn["reasoning_content"] = "I look."
    for row in ({"messages": [FIRST, turn]}, {"prompt": [FIRST], "completion": [turn]}):
        (answer,) = read(home, row)[0].answers
        kept = json.loads(answer.extra)
        assert (answer.text, kept["reasoning_content"]) == ("", "I look.")
        assert kept["tool_calls"][0]["function"]["name"] == "crop"
    pair = {"prompt": [FIRST], "chosen": [{**SAID, "reasoning_content": "why"}], "rejected": [SAID]}
    chosen, rejected = read(home, pair, dataset=preference_pairs)[0].answers
    assert (chosen.text, rejected.text, rejected.extra) == ("red", "red", "")
    with pytest.raises(RowError, match="differ"):
        read(home, {**pair, "rejected": pair["chosen"]}, dataset=preference_pairs)


def test_messages_written_as_json_are_messages(home):
    for row in (
        {"messages": json.dumps([FIRST, SAID])},
        {"prompt": json.dumps([FIRST]), "completion": "red"},
    ):
        (prompt,) = read(home, row)
        assert shown(prompt) == [("user", ["a"])] and prompt.answers[0].text == "red"
    sides = {"chosen": json.dumps([FIRST, SAID]), "rejected": json.dumps([FIRST, BLUE])}
    (pair,) = read(home, sides, dataset=preference_pairs)
    assert shown(pair) == [("user", ["a"])] and [a.text for a in pair.answers] == ["red", "blue"]
    assert shown(read(home, {"prompt": '["a", 1] is a list'})[0]) == [("user", ['["a", 1] is a list'])]


def test_every_rejected_answer_makes_a_pair(home):
    row = {
        "id": "q",
        "prompt": "a",
        "chosen": "b",
        "rejected": ["c", "d", "e"],
        "score_chosen": 1,
        "score_rejected": [0, 0.5, 0.2],
    }
    prompts = read(
        home, row, {**row, "id": "p", "rejected": "c", "score_rejected": 0}, dataset=preference_pairs
    )
    assert [prompt.uid for prompt in prompts] == ["q", "q/2", "q/3", "p"]
    for _ in range(2):  # made again from their rows
        shown = [[answer.text for answer in prompt.answers] for prompt in prompts]
        assert shown == [["b", "c"], ["b", "d"], ["b", "e"], ["b", "c"]]
    assert prompts[1].answers[1].recorded["score"] == 0.5
    row |= {"score_chosen": None, "score_rejected": None}
    with pytest.raises(RowError, match="differ"):
        read(home, {**row, "rejected": ["c", "b"]}, dataset=preference_pairs)


def test_rows_of_kto_belong_to_another_data_set(home):
    rows = [{"prompt": [FIRST], "completion": [SAID], "label": label} for label in (True, False)]
    with pytest.raises(RowError, match=r"vision\.unpaired_preferences"):
        read(home, *rows)
    named = NAMED.set(NamedColumns(frozenset({"label"})))  # a reward reads the column
    try:
        with pytest.raises(RowError, match=r"vision\.unpaired_preferences"):
            read(home, *rows)
    finally:
        NAMED.reset(named)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [{**FIRST, "weight": 0}]}, "nothing reads the key `weight` of `prompt.0.`"),
        (
            {"prompt": [FIRST, {**SAID, "tool_calls": [{"name": 3}]}, SECOND]},
            "cannot read `prompt.1..tool_calls`",
        ),
        (
            {"messages": [FIRST, {**SAID, "function_call": {"name": "x"}}]},
            "nothing reads the key `function_call`",
        ),
        ({"prompt": [FIRST], "completion": [SAID, SECOND, BLUE]}, "wanted one answer as `completion`, got 3"),
        ({"prompt": [FIRST, SAID]}, "the prompt ends with words of the assistant"),
        ({"prompt": "a", "messages": [SECOND, SAID]}, "is not the one of `messages`"),
        ({"messages": [FIRST, SAID], "completion": "blue"}, "ends with words of the assistant"),
        ({"prompt": ASKED, "system": "Be long."}, "is not the system prompt of the messages"),
        ({"prompt": "What is <audio>?"}, "have 1 audio places, but 0 are given"),
        ({"prompt": "a", "question": "b", "history": [["c", "d"]]}, "nothing reads the column `history`"),
    ],
)
def test_rows_that_would_lose_words_are_named(home, row, message):
    with pytest.raises(RowError, match=message):
        read(home, row)


def test_a_prompt_beside_the_same_conversation_loses_nothing(home):
    (prompt,) = read(home, {"prompt": "a", "messages": [FIRST, SAID], "solution": "red"})
    assert [answer.text for answer in prompt.answers] == ["red"] and shown(prompt) == [("user", ["a"])]


# ---- datasets of a program


def test_a_transform_and_chosen_columns_of_a_dataset_hold():
    table = Dataset.from_dict({"prompt": ["a", "b"], "label": [1, 0]})
    made = table.with_transform(lambda batch: {"prompt": [text.upper() for text in batch["prompt"]]})
    for held in (made, DatasetDict(train=made)):
        assert [p.text for p in conversations(path=put_rows("made", held, "train"))] == ["A", "B"]
    held = table.with_format("numpy", columns=["prompt"])
    prompts = conversations(path=put_rows("held", held, "train"))
    assert [dict(prompt.columns) for prompt in prompts] == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(RowError, match="`label`"):
        conversations(path=put_rows("whole", table, "train"))


def test_rewards_in_trls_form_see_the_images_of_the_prompt(home):
    rows = [{"prompt": "a", "images": ["a.png", "b.png"]}, {"prompt": "b", "image": "b.png"}, {"prompt": "c"}]
    prompts = list(read(home, *rows))
    seen = []

    def sizes(completions, images, **columns):
        seen.append("image" in columns)
        return [sum(image.size[0] for image in shown) for shown in images]

    outcomes = [Outcome(text="x")] * 3
    assert from_trl(sizes)(prompts, outcomes) == [6, 2, 0]
    one = lambda completions, image: [-1 if shown is None else shown.getpixel((0, 0))[2] for shown in image]
    assert from_trl(one)(prompts[1:], outcomes[1:]) == [200, -1]
    assert seen == [False]  # of several images none is the one
