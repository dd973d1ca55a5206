"""Small images: of what was asked about, and of what was made."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image

from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Sound
from mmrl.data.media import MediaError
from mmrl.data.sound import load_sound
from mmrl.reporting.thumbnails import (
    SECONDS,
    SIDE,
    data_uri,
    illustrated,
    of_outcome,
    of_prompt,
    of_tools,
    sound_of_prompt,
    strip,
)


def opened(picture: bytes) -> Image.Image:
    return Image.open(io.BytesIO(picture))


def coloured(*greys: int, height: int = 10, width: int = 20) -> torch.Tensor:
    return torch.stack([torch.full((3, height, width), grey, dtype=torch.uint8) for grey in greys])


def test_frames_stand_beside_each_other_from_the_first_to_the_last():
    picture = opened(strip(coloured(0, 50, 100, 150, 200), height=10, most=3)).convert("L")
    # Three of 20 pixels, two white ones between.
    assert picture.size == (64, 10)
    assert [round(picture.getpixel((x, 5)) / 10) for x in (10, 32, 54)] == [0, 10, 20]


def test_small_images_are_enlarged_in_squares():
    frame = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    frame[..., 1] = 255
    picture = opened(strip(frame, height=64)).convert("L")
    assert picture.size == (64, 64)
    assert picture.getpixel((24, 32)) < 20 and picture.getpixel((40, 32)) > 235, "no blur between"


def test_an_outcome_shows_its_image_or_its_video():
    assert opened(of_outcome(Outcome(image=coloured(9)[0]))).size == (2 * SIDE, SIDE)
    video = opened(of_outcome(Outcome(video=coloured(1, 2, 3, 4, 5, 6))))
    assert video.size == (4 * 2 * SIDE + 6, SIDE)
    assert of_outcome(Outcome(text="word")) is None
    assert of_outcome(Outcome(image=torch.zeros(2))) is None, "a point of a toy"


def test_a_prompt_shows_its_first_medium():
    media = Media("image", "x", lambda: Frames(coloured(7), torch.zeros(1).double()))
    assert opened(of_prompt(Prompt("p", (Message("user", (Part(media=media),)),)))).size == (144, 72)
    assert of_prompt(Prompt("p", (Message("user", (Part("word"),)),))) is None


def test_a_prompt_plays_the_begin_of_its_first_sound():
    def asked(*loaded):
        parts = tuple(Part(media=Media("audio", "x", partial(lambda one: one, one))) for one in loaded)
        return Prompt("p", (Message("user", parts),))

    frames = Frames(coloured(7), torch.zeros(1).double())
    sound = Sound(torch.linspace(-0.5, 0.5, 48000), 48000)
    for prompt in (
        asked(frames, sound),
        asked(replace(frames, sound=sound)),
        asked(sound, Sound(torch.ones(9), 8)),
    ):
        heard = load_sound(sound_of_prompt(prompt), "x")
        assert (heard.rate, len(heard.samples)) == (16000, 16000)
        assert heard.samples[8000] == pytest.approx(0.0, abs=1e-3)
    long = load_sound(sound_of_prompt(asked(Sound(torch.zeros(8 * 40), 8))), "x")
    assert (long.rate, len(long.samples)) == (8, 8 * SECONDS)
    assert sound_of_prompt(asked(frames)) is None and of_prompt(asked(sound)) is None
    assert of_prompt(asked(sound, frames))[:2] == b"\xff\xd8"


def test_a_data_uri_embeds_the_jpeg():
    assert data_uri(b"\x00\xff") == "data:image/jpeg;base64,AP8="


def test_a_prompt_whose_image_cannot_be_read_has_no_thumbnail():
    def broken():
        raise MediaError("there is no file 'a.png'")

    prompt = Prompt("p", (Message("user", (Part(media=Media("image", "a.png", broken)),)),))
    assert of_prompt(prompt) is None


def test_what_tools_showed_stands_where_the_conversation_has_it():
    talk = "call <image: 9 tokens> a <image: 4 tokens>"
    assert illustrated(talk, [b"1", b"2"]) == ["call ", b"1", " a ", b"2"]
    # The model wrote a mark itself, so nobody knows which of them are images.
    assert illustrated(talk, [b"1"]) == [talk, b"1"]
    assert illustrated(talk, []) == [talk] and illustrated("no image", []) == ["no image"]


def test_every_image_of_a_tool_has_a_thumbnail():
    grey = Frames(coloured(100), torch.zeros(1).double())
    pictures = of_tools([Media("image", "a part", lambda: grey)] * 2)
    assert [opened(picture).size for picture in pictures] == [(2 * SIDE, SIDE)] * 2
    assert of_tools([]) is None
