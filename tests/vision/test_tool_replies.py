"""Replies of tools: what they hold is bounded, and images that cannot be shown are not decoded."""

from __future__ import annotations

import pytest
from PIL import Image

from mmrl.vision.tools import replies as tool_replies
from mmrl.vision.tools.replies import Limits, ToolFault, as_answer, as_parts

IMAGE = Image.new("RGB", (4, 3))


def test_texts_of_a_reply_are_cut_together():
    # 4 of 6 characters, then 2 of 4; the mark stands for the rest.
    parts = as_parts(["abcd", IMAGE, "efgh", "ij"], "tool", Limits(6, 100))
    assert [part.text for part in parts if not part.media] == ["abcd", "ef [...]"]
    assert [part.text for part in as_parts(["abc", "def"], "tool", Limits(6, 100))] == ["abc", "def"]
    assert [part.text for part in as_parts(["abcdef", "g"], "tool", Limits(6, 100))] == ["abcdef", " [...]"]


def test_a_reply_of_too_many_parts_is_a_fault():
    with pytest.raises(ToolFault, match="returned 1000 texts and images; the most is 64"):
        as_answer(["a"] * 1000, "tool", Limits(4000, 100))


def test_images_that_cannot_be_shown_are_counted_and_not_decoded(monkeypatch):
    decoded, make = [], tool_replies._to_media
    monkeypatch.setattr(tool_replies, "_to_media", lambda *args: (decoded.append(1), make(*args))[1])
    blocks = [IMAGE, "a", {"type": "image", "image": IMAGE}, {"type": "video", "video": [IMAGE] * 2}]
    answer = as_answer(blocks, "tool", Limits(4000, 100, images=2))
    assert (answer.shown, answer.parts, decoded) == (3, (), [])
    answer = as_answer(blocks, "tool", Limits(4000, 100, images=3))
    assert (answer.shown, len(answer.parts), decoded) == (3, 4, [1, 1, 1])
