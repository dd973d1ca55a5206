"""Questions with answers that can be checked: reading them, and judging answers."""

from __future__ import annotations

import logging

import pytest
from PIL import Image

from mmrl.core.answer_text import answer_part
from mmrl.core.answers import words_of
from mmrl.core.types import Outcome, Prompt
from mmrl.data.dataset_io import RowError, write_rows
from mmrl.vision.datasets.visual_qa import visual_qa
from mmrl.vision.rewards.answers import short_answer

ROW = {"id": "q1", "image": "a.png", "question": "What colour is it?", "answer": "red"}


@pytest.fixture
def home(tmp_path):
    Image.new("RGB", (4, 3), (200, 0, 0)).save(tmp_path / "a.png")
    Image.new("RGB", (2, 2), (0, 0, 200)).save(tmp_path / "b.png")
    return tmp_path


def read(home, *rows, name="train.jsonl", **options):
    write_rows(home / name, rows)
    return visual_qa(path=str(home / name), **options)


def test_visual_qa_shows_the_image_then_asks(home):
    (prompt,) = read(home, ROW)
    (message,) = prompt.messages
    assert [part.media.name if part.media else part.text for part in message.parts] == [
        "a.png",
        ROW["question"],
    ]
    assert (prompt.uid, prompt.target, prompt.answers) == ("q1", "red", ())
    assert message.parts[0].media.load().pixels[0, :, 0, 0].tolist() == [200, 0, 0]


def test_visual_qa_reads_columns_of_other_names_and_encoded_images(home):
    encoded = {"bytes": (home / "b.png").read_bytes(), "path": None}
    row = {"query": "What colour?", "label": ["blue", "azure"], "picture": encoded}
    columns = {"question": "query", "answer": "label", "image": "picture"}
    (prompt,) = read(home, row, name="train.parquet", columns=columns)
    assert (prompt.uid, prompt.target) == ("train#0", ("blue", "azure"))
    assert prompt.media[0].load().pixels[0, :, 0, 0].tolist() == [0, 0, 200]
    assert "image" not in prompt.columns  # a data set of encoded pictures is not held twice


def test_visual_qa_places_media_and_letters_choices(home):
    row = {"images": ["a.png", "b.png"], "question": "<image> or <image>?", "choices": ["first", "second"]}
    (prompt,) = read(home, {**row, "answer": "B"}, prompt="{question}\n{choices}")
    parts = [part.media.name if part.media else part.text for part in prompt.messages[0].parts]
    assert parts == ["a.png", " or ", "b.png", "?\nA. first\nB. second"]


def test_visual_qa_gives_the_right_answer_as_a_demonstration(home):
    (prompt,) = read(home, {**ROW, "answer": 3}, demo="<answer>{answer}</answer>")
    assert prompt.answers[0].text == "<answer>3</answer>"
    assert short_answer([prompt], prompt.answers) == [1.0]


@pytest.mark.parametrize(("answer", "target"), [(True, "yes"), (False, "no"), (0, "0"), (2.5, "2.5")])
def test_answers_that_are_no_texts_become_texts(home, answer, target):
    assert read(home, {**ROW, "answer": answer})[0].target == target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": ""}, "wanted a text as `question`"),
        ({"answer": None}, "wanted a text as `answer`"),
        ({"answer": " "}, "wanted a text as `answer`"),
        ({"image": "nothing.png"}, "there is no file 'nothing.png'"),
        ({"image": "../a.png"}, r"the path '../a.png' leaves its root"),
        ({"question": "<image> <image>"}, "the text marks image, image, but the row holds image"),
    ],
)
def test_rows_that_cannot_be_used_are_named_and_counted(home, caplog, change, message):
    with pytest.raises(RowError, match=rf"1 row of .*cannot be used.*\n.*train\.jsonl:2: {message}"):
        read(home, ROW, {**ROW, "id": "q2", **change})
    with caplog.at_level(logging.WARNING, "mmrl"):
        assert len(read(home, ROW, {**ROW, "id": "q2", **change}, bad_rows="drop")) == 1
    assert message.replace("\\", "") in caplog.text


@pytest.mark.parametrize(
    "image",
    [17, "", {"url": "a.png"}, {"bytes": None, "path": None}, [None], {"path": 5}, ["a.png", None],
     [["a.png"]], True, {}],
)  # fmt: skip
def test_an_image_of_an_unknown_form_is_a_bad_row_and_not_a_prompt_without_it(home, image):
    place = r"train\.jsonl:2: wanted a path, bytes, or an object .* as `image"
    rows = [ROW, {**ROW, "id": "q2", "image": image}]
    with pytest.raises(RowError, match=place):
        read(home, *rows)
    assert [one.uid for one in read(home, *rows, bad_rows="drop")] == ["q1"]


def test_every_bad_row_is_counted_and_the_first_are_named(home):
    rows = [ROW, *({**ROW, "id": str(i), "image": i} for i in range(12))]
    with pytest.raises(RowError, match=r"(?s)^12 rows of .*jsonl:2: .*jsonl:11: .*\n  and 2 more$"):
        read(home, *rows)
    (home / "train.jsonl").write_text('{"id": \n[1]\n{}\n')
    with pytest.raises(RowError, match=r"(?s)^3 rows of .*jsonl:1: not a JSON object.*jsonl:2: .*jsonl:3: "):
        visual_qa(path=str(home / "train.jsonl"))


def test_null_or_no_image_is_none(home):
    assert not read(home, {**ROW, "image": None}, {**ROW, "id": "q2", "images": []})[0].media


@pytest.mark.parametrize("choices", ["ab", 5, {"a": 1}, [["x"]], list(range(27))])
def test_choices_are_a_list_of_at_most_26_texts_or_numbers(home, choices):
    with pytest.raises(RowError, match=r"jsonl:1: wanted .*`choices"):
        read(home, {**ROW, "choices": choices}, prompt="{question}\n{choices}")


def test_a_prompt_that_names_a_column_there_is_not(home):
    with pytest.raises(RowError, match="names 'hint', which the row does not have"):
        read(home, ROW, prompt="{question} {hint}")


def test_two_rows_of_one_id_are_refused(home):
    with pytest.raises(ValueError, match=r"jsonl:2: the id 'q1' is that of .*jsonl:1"):
        read(home, ROW, ROW)
    assert len(read(home, ROW, ROW, limit=1)) == 1


# ---- rewards


def judged(target, text, **options):
    return short_answer([Prompt("a", (), target)], [Outcome(text=text)], **options)[0]


@pytest.mark.parametrize(
    ("target", "text", "wanted"),
    [
        ("a teal triangle", "Teal triangle.", 1.0),
        ("teal triangle", "<answer>red</answer> no, <answer> TEAL triangle </answer>", 1.0),
        ("teal triangle", "it is a teal triangle", 0.0),
        ("2", "Two", 1.0),
        ("4", r"so it is \boxed{4}", 1.0),
        (("car", "automobile"), "an automobile", 1.0),
        ("red", "", 0.0),
        ("the", "", 0.0),  # nothing is left of both
        ("1,000", "1000", 1.0),
    ],
)
def test_short_answer_of_words(target, text, wanted):
    assert judged(target, text) == wanted


@pytest.mark.parametrize(
    ("target", "text", "tolerance", "wanted"),
    [
        ("100", "about 104.9", 0.05, 1.0),
        ("100", "105.1", 0.05, 0.0),
        ("12.5%", "0.125", 0.0, 1.0),
        ("-3", "first 2, then -3", 0.0, 1.0),
        ("1,234", "1234.0", 0.0, 1.0),
        ("3", "no number", 0.5, 0.0),
        ("cow", "a cow", 0.0, 1.0),  # a target without a number is compared by words
    ],
)
def test_short_answer_of_numbers(target, text, tolerance, wanted):
    assert judged(target, text, form="number", tolerance=tolerance) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("B", 1.0), ("(B) second", 1.0), ("A or B", 0.0), ("A", 0.0), ("Both", 0.0), ("b", 1.0), ("A, B", 0.0)],
)
def test_short_answer_of_letters(text, wanted):
    assert judged("B", text, form="letter") == wanted


def test_the_last_block_counts_before_a_box_before_the_text():
    assert answer_part("<a>1</a> <A>2</A>", "a") == "2"
    assert answer_part(r"\boxed{1} \boxed{2} 3", "answer") == "2"
    assert words_of("The dog's 3.5 km, an hour!") == ["dog's", "3.5", "km", "hour"]


def test_a_number_is_the_place_of_a_choice_where_another_choice_reads_like_it(home):
    rows = [
        {**ROW, "choices": ["1", "2", "3"], "answer": 1},
        {**ROW, "choices": ["1", "2", "3"], "answer": "1"},
    ]
    rows += [{**ROW, "choices": [1, 2, 3], "answer": 1}, {**ROW, "choices": ["a", "b"], "answer": 1}]
    prompts = read(home, *({**row, "id": str(i)} for i, row in enumerate(rows)))
    assert [prompt.target for prompt in prompts] == ["B", "1", "1", "1"]
    right = [[short_answer([p], [Outcome(text=t)], form="choice")[0] for t in "AB"] for p in prompts]
    assert right == [[0, 1], [1, 0], [1, 0], [0, 1]]


def test_the_ten_answers_of_vqa_are_read(home):
    answers = [
        {"answer": word, "answer_confidence": "yes", "answer_id": i} for i, word in enumerate(("a", "b"))
    ]
    row = {key: value for key, value in ROW.items() if key != "answer"}
    assert read(home, {**row, "answers": answers})[0].target == ("a", "b")
