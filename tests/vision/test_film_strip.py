"""Film strips show a clip, its true span and what every model answered."""

from __future__ import annotations

import base64
import io
import re

import pytest
import torch
from PIL import Image

from mmrl.core.reward_table import Measured, RewardTable
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Trajectory
from mmrl.vision.benchmarks.time_spans import Moments
from mmrl.vision.visualizations.answers import film_strip


def asked(uid, *spans, query="a fox <jumps>", count=8):
    greys = torch.arange(count, dtype=torch.uint8)[:, None, None, None] * 20
    frames = Frames(greys.expand(-1, 3, 28, 56).contiguous(), torch.arange(count).double(), float(count))
    media = Media("video", "v", lambda: frames)
    message = Message("user", (Part(media=media), Part("when")))
    return Prompt(uid, (message,), Moments(spans, float(count)), columns={"query": query})


def measured(*pairs):
    rows = tuple(Trajectory(prompt, prompt.uid, (Outcome(text=text),), None, 1) for prompt, text in pairs)
    return Measured({}, {}, rows, RewardTable.empty())


def bars(page):
    return [
        (float(left), float(width)) for left, width in re.findall(r"left:([-\d.]+)%;width:([-\d.]+)%", page)
    ]


def test_film_strip_draws_true_and_answered_spans_as_shares_of_the_clip():
    page = film_strip({"grpo": measured((asked("p", (2, 4)), "<answer>1 to 5</answer>"))})
    # Of 8 s: 2 to 4 starts at a quarter and is a quarter long; 1 to 5 starts at an eighth and is half.
    assert bars(page) == [(25, 25), (12.5, 50)]
    assert "2 to 4 s" in page and "1 to 5 s" in page and "grpo" in page


def test_film_strip_keeps_bars_inside_their_strip():
    page = film_strip({"m": measured((asked("p", (6, 20)), "<answer>30 to 40</answer>"))})
    assert bars(page) == [(75, 25), (100, 0)]


def test_film_strip_quotes_answers_without_a_span_and_escapes_everything():
    page = film_strip({"<m>": measured((asked("p", (2, 4)), "<b>no</b> idea"))})
    assert bars(page) == [(25, 25)]
    assert "no span in" in page and "&lt;b&gt;no" in page
    assert "a fox &lt;jumps&gt;" in page and "&lt;m&gt;" in page
    assert "<b>no" not in page and "<jumps>" not in page


def test_film_strip_shows_the_first_answer_of_every_model_to_a_prompt():
    prompt = asked("p", (2, 4))
    page = film_strip(
        {"one": measured((prompt, "0 to 1"), (prompt, "0 to 2")), "two": measured((prompt, "0 to 4"))}
    )
    assert bars(page) == [(25, 25), (0, 12.5), (0, 50)]
    assert page.count("<figure>") == 1


def test_film_strip_chooses_prompts_at_equal_distances_in_order():
    pairs = [(asked(f"p{i}", (2, 4), query=f"query {i}."), "0 to 1") for i in range(10)]
    page = film_strip({"m": measured(*pairs)}, num=5)
    assert re.findall(r"query (\d)\.", page) == ["0", "2", "4", "6", "8"]
    assert re.findall(r"query (\d)\.", film_strip({"m": measured(*pairs[:3])}, num=5)) == ["0", "1", "2"]


@pytest.mark.parametrize(("frames", "shades"), [(3, [0, 80, 140]), (99, [20 * i for i in range(8)])])
def test_film_strip_holds_its_frames_as_images_inside_the_page(frames, shades):
    # Of eight frames three stand at 0, 3.5 (rounded to the even 4) and 7.
    page = film_strip({"m": measured((asked("p", (2, 4)), "0 to 1"))}, frames=frames)
    pictures = re.findall(r"src='data:image/jpeg;base64,([^']+)'", page)
    images = [Image.open(io.BytesIO(base64.b64decode(picture))) for picture in pictures]
    assert [image.size for image in images] == [(168, 84)] * len(shades)
    assert [image.getpixel((80, 40))[0] for image in images] == pytest.approx(shades, abs=4)


def test_film_strip_of_nothing_is_empty():
    assert "<figure>" not in film_strip({"m": measured()})
