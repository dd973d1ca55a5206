"""The text of a image against what its prompt asks for: worked numbers on strings, and real recognition."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.diffusion.rewards.text_in_image import TextInImage, edit_distance, quoted, text_match

# What the recogniser below "reads": a image's first value chooses.
READ: dict[int, list[tuple[str, float]]] = {
    0: [],
    1: [("HELLO ", 0.9), ("world", 0.2)],
    2: [("hello", 0.9), ("nothing", 0.0), ("world", 0.1)],
    3: [("xx hello world yy", 0.9)],
    4: [("helo wrld", 0.9)],
}


def look_up(picture: torch.Tensor) -> list[tuple[str, float]]:
    return READ[int(picture[0, 0, 0])]


def asking(text: str) -> Prompt:
    return Prompt(uid="p", messages=(Message("user", (Part(text),)),))


def picture(which: int) -> torch.Tensor:
    return torch.full((3, 4, 4), which, dtype=torch.uint8)


SIGN = asking('a sign that says "Hello World" and "more"')


@pytest.fixture
def reward():
    return TextInImage(recogniser=f"{__name__}:look_up")


# ---- strings


@pytest.mark.parametrize(
    ("target", "found", "wanted"),
    [
        ("Hello World", "HELLO WORLD", 1.0),
        ("Hello World", "xx hello world yy", 1.0),
        ("Hello World", "helo wrld", 0.8),  # two letters of ten are missing
        ("Hello World", "", 0.0),
        ("STOP", "completely different text", 0.0),
        ("New Year", "New Yaer", 0.714286),  # two of seven letters differ
        ("  ", "anything", 0.0),
        ("", "", 0.0),
    ],
)
def test_edits_are_taken_off(target, found, wanted):
    assert text_match(target, found, more=True) == pytest.approx(wanted, abs=2e-6)


def test_of_a_clip_the_text_must_stand_alone():
    # Four letters too many, of ten wanted.
    assert text_match("Hello World", "xx hello world yy", more=False) == pytest.approx(0.6)
    assert text_match("Hello World", "HELLO WORLD", more=False) == 1.0


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("", "", 0),
        ("abc", "", 3),
        ("", "ab", 2),
        ("kitten", "sitting", 3),
        ("ab", "ba", 2),
        ("abc", "abc", 0),
    ],
)
def test_edit_distances(one, other, wanted):
    assert edit_distance(one, other) == edit_distance(other, one) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('a sign "OPEN" and "CLOSED"', "OPEN"), ("a sign “OPEN”", "OPEN"), ('a sign “OPEN"', "OPEN"),
        ("„Öffnen“ sign", "Öffnen"), ("«OUVERT» sign", "OUVERT"), ("« OUVERT » sign", "OUVERT"),
        ("「営業中」の看板", "営業中"), ("『本日休業』", "本日休業"),
        ("写着\"营业中\"的牌子", "营业中"), ("‘OPEN’ sign", "OPEN"),
        ("the dog's sign 'Don't walk' here", "Don't walk"), ("the dogs' sign 'OPEN'", "OPEN"),
        ('a 5" tall sign that says "OPEN"', "OPEN"), ("7'5\" man with \"HI\"", "HI"), ('"Room 5"', "Room 5"),
        ('a "5" pipe" sign', '5" pipe'), ("a sign '5\" pipe'", '5" pipe'), ('a sign \\"OPEN\\"', "OPEN"),
        ('a sign ""OPEN""', "OPEN"), ("&quot;OPEN&quot;", "OPEN"), ('nothing: ""', ""),
    ],
)  # fmt: skip
def test_the_text_stands_between_the_first_quotes_of_any_form(text, wanted):
    assert quoted(asking(text)) == wanted


def test_the_wanted_text_may_stand_in_a_column():
    reward = TextInImage(recogniser=f"{__name__}:look_up", column="text")
    sign = replace(asking("a sign"), columns={"text": ["no", "Hello\nWorld"]})
    assert reward([sign], [Outcome(image=picture(1))]) == [1.0]
    with pytest.raises(ValueError, match="in the column 'text', but prompt 'p' has None there"):
        reward([asking('a "sign"')], [Outcome(image=picture(1))])
    assert text_match("Öffnen", "O\u0308FFNEN", more=False) == 1.0


def test_a_prompt_without_quotes_is_an_error():
    for text in ("a sign", 'a sign that says "open', "it's a dog's life", 'a 5" by 7" card'):
        with pytest.raises(ValueError, match="wanted text in quotes or in a `column`, but prompt 'p' reads"):
            quoted(asking(text))


# ---- images


def test_what_is_recognised_is_joined(reward):
    given = reward([SIGN] * 5, [Outcome(image=picture(i)) for i in range(5)])
    assert given == pytest.approx([0.0, 1.0, 1.0, 1.0, 0.8])


def test_of_a_clip_every_fourth_frame_is_read_and_those_without_are_left_out(reward):
    #                  read       read       read
    frames = torch.stack([picture(i) for i in (4, 1, 1, 1, 0, 1, 1, 1, 1)])
    # .8 and 1; the frame without text earns nothing and does not count
    assert reward([SIGN], [Outcome(video=frames)]) == pytest.approx([0.9])
    assert reward([SIGN], [Outcome(video=frames[4:8])]) == [0.0]


def fail(picture):
    raise RuntimeError("out of ink")


def test_a_recogniser_that_fails_earns_nothing_and_says_so():
    reward = TextInImage(recogniser=f"{__name__}:fail")
    with pytest.warns(UserWarning, match="recogniser of text_in_image failed, which earns 0.*out of ink"):
        assert reward([SIGN], [Outcome(image=picture(1))]) == [0.0]


def test_malformed_outcomes_and_options_are_errors(reward):
    with pytest.raises(ValueError, match="has neither an image nor a video"):
        reward([SIGN], [Outcome(text="Hello World")])
    with pytest.raises(ValueError, match="text_in_image cannot import 'tests.nowhere:f'"):
        TextInImage(recogniser="tests.nowhere:f")
    with pytest.raises(ValueError, match="must read package.module:function"):
        TextInImage(recogniser="rapid")


def test_rapidocr_that_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rapidocr", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'mmrl[ocr]'")):
        TextInImage()


def test_rapidocr_is_handed_rows_of_blue_green_red_and_loads_at_once(monkeypatch):
    seen, asked = [], {}

    class Reader:
        def __init__(self, params):
            asked.update(params)

        def __call__(self, array, **options):
            seen.append((array, options))
            texts = ("a", "b") if array.shape[0] == 4 else None
            return SimpleNamespace(txts=texts, scores=texts and (0.9, 0.1))

    monkeypatch.setitem(__import__("sys").modules, "rapidocr", SimpleNamespace(RapidOCR=Reader))
    recognise = TextInImage().recognise
    assert asked["Global.text_score"] == 0.0, "every confidence above 0 counts"
    assert [options for _, options in seen] == [{}, {"use_det": False, "use_cls": False}]
    red = torch.tensor([200, 100, 50], dtype=torch.uint8)[:, None, None].expand(3, 4, 6)
    assert recognise(red) == [("a", 0.9), ("b", 0.1)]
    array = seen[-1][0]
    assert array.shape == (4, 6, 3) and array[0, 0].tolist() == [50, 100, 200]


@pytest.mark.slow
def test_rendered_text_is_read():
    pytest.importorskip("rapidocr")
    import numpy
    from PIL import Image, ImageDraw, ImageFont

    def drawn(text: str) -> Outcome:
        image = Image.new("RGB", (256, 96), "white")
        ImageDraw.Draw(image).text((16, 24), text, fill="darkred", font=ImageFont.load_default(40))
        return Outcome(image=torch.from_numpy(numpy.array(image)).permute(2, 0, 1))

    reward = TextInImage()
    outcomes = [drawn("Hello World"), drawn("Help"), drawn(""), drawn("Hello World 7")]
    exact, other, empty, longer = reward([SIGN] * 4, outcomes)
    assert exact == longer == 1.0
    # "Help" shares three of its four letters with the ten wanted: seven edits.
    assert other == pytest.approx(0.3)
    assert empty == 0.0
