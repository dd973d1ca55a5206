"""Rewards of edits, by numbers derived by hand, and the labels that judges see."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt
from mmrl.diffusion.rewards.edits import ClipDirection, unmasked_identity
from mmrl.rewards.asking import judge_prompt


def medium(pixels):
    return Media("image", "a.png", lambda: Frames(pixels[None], torch.zeros(1)))


def grey(value, height=2, width=2):
    return torch.full((3, height, width), value, dtype=torch.uint8)


def edit(source, **columns):
    parts = (Part(media=medium(source)), Part("make it bright"))
    return Prompt("p", (Message("user", parts),), columns=columns)


class Plane:
    """Encoders onto the unit circle: an image to the angle of its grey in degrees, a text to its number."""

    def look(self, images):
        return self.at([float(image.float().mean()) for image in images])

    def read(self, texts):
        return self.at([float(text) for text in texts])

    def at(self, degrees):
        radians = torch.tensor(degrees).deg2rad()
        return torch.stack([radians.cos(), radians.sin()], 1)


@pytest.fixture
def direction(monkeypatch):
    monkeypatch.setattr("mmrl.diffusion.rewards.edits.load_towers", lambda *given: Plane())
    return ClipDirection()


@pytest.mark.parametrize(
    ("after", "captions", "wanted"),
    [
        (90, ("0", "90"), 1.0),  # the same turn
        (90, ("90", "0"), -1.0),  # back
        # From 0 to 90 degrees the difference points to 135 degrees, from 0 to 180 to 180 degrees.
        (90, ("0", "180"), math.cos(math.radians(45))),
        (0, ("0", "90"), 0.0),  # the image stays
        (90, ("30", "30"), 0.0),  # the caption stays
    ],
)
def test_directional_similarity_is_the_cosine_of_the_turns(direction, after, captions, wanted):
    columns = dict(zip(("original_prompt", "edited_prompt"), captions, strict=True))
    prompt = edit(grey(0), **columns)
    assert direction([prompt], [Outcome(image=grey(after))]) == [pytest.approx(wanted, abs=1e-6)]


def test_directional_similarity_wants_captions_and_a_source(direction):
    assert direction([], []) == []
    with pytest.raises(ValueError, match="'edited_prompt', and the columns original_prompt"):
        direction([edit(grey(0), original_prompt="1")], [Outcome(image=grey(1))])
    bare = Prompt("p", (Message("user", (Part("x"),)),), columns={})
    with pytest.raises(ValueError, match="prompt 'p' has none"):
        direction([bare], [Outcome(image=grey(1))])


def test_identity_counts_pixels_outside_the_mask():
    mask = torch.zeros(3, 2, 2, dtype=torch.uint8)
    mask[:, 0] = 255  # the upper row may change
    prompt = edit(grey(100), mask=medium(mask))
    image = grey(100)
    image[:, 0] = 255
    assert unmasked_identity([prompt], [Outcome(image=image)]) == [1.0]
    image[:, 1, 0] = 151  # one of two kept pixels changes by 51 / 255 = 0.2
    assert unmasked_identity([prompt], [Outcome(image=image)]) == [pytest.approx(0.9)]
    video = torch.stack([image, grey(100)])
    assert unmasked_identity([prompt], [Outcome(video=video)]) == [pytest.approx(0.95)]


def test_source_and_mask_are_resized_to_the_result():
    mask = torch.zeros(3, 4, 8, dtype=torch.uint8)
    mask[:, :2] = 255
    prompt = edit(grey(100, 4, 8), mask=medium(mask))
    image = grey(0, 2, 4)
    image[:, 1] = 100
    assert unmasked_identity([prompt], [Outcome(image=image)]) == [pytest.approx(1.0, abs=1e-6)]


def test_without_pixels_to_keep_there_is_no_value():
    covered = edit(grey(0), mask=medium(grey(255)))
    assert unmasked_identity([edit(grey(0)), covered], [Outcome(image=grey(0))] * 2) == [None, None]


def test_judges_see_what_was_before_and_after():
    prompt = edit(grey(0))
    kinds = lambda asked: [part.text or part.media.kind for part in asked.messages[0].parts]
    one = judge_prompt("j", prompt, [Outcome(image=grey(1))], "Judge.")
    assert kinds(one) == ["Before:", "image", "After:", "image", "Judge."]
    two = judge_prompt("j", prompt, [Outcome(image=grey(1)), Outcome(image=grey(2))], "Judge.")
    assert kinds(two)[2:] == ["After, answer A:", "image", "After, answer B:", "image", "Judge."]
    text = judge_prompt("j", prompt, [Outcome(text="yes")], "Judge.")
    assert kinds(text) == ["image", "Judge."]
