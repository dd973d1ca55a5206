"""Positions of Qwen2-VL and Qwen2.5-VL around videos, against numbers derived by hand.

What follows a video continues after the largest position of any axis. transformers 5.23 continues after the
height or width, so it is no reference here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmrl.core.types import Outcome
from mmrl.vision.models.model_families import family_of
from tests.vision import mixed, tiny

BOTH = pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
TEXT, IMAGE, VIDEO = 0, 1, 2


def positions(family, runs, *, images=(), videos=(), seconds=(), rate=2):
    """Place runs of (kind, number of tokens); grids are (frames, rows, columns) of features."""
    vision = SimpleNamespace(spatial_merge_size=2)
    if family == "qwen2_5_vl":
        vision.tokens_per_second = rate
    core = SimpleNamespace(config=SimpleNamespace(model_type=family, vision_config=vision))
    kinds = torch.tensor([[kind for kind, number in runs for _ in range(number)]])
    inputs = {"input_ids": torch.zeros_like(kinds), "mm_token_type_ids": kinds}
    unmerged = torch.tensor([1, 2, 2])
    for name, grids in (("image_grid_thw", images), ("video_grid_thw", videos)):
        if grids:
            inputs[name] = torch.tensor(grids) * unmerged
    if seconds:
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    found = family_of(core.config).positions(core, inputs)
    assert found.dtype == torch.int64 and found.shape == (3, kinds.shape[1])
    return found.T.tolist()


def same(*numbers):
    """Text has one number on all axes."""
    return [[number] * 3 for number in numbers]


def test_text_video_text_image_text():
    # 4 frames of 1 x 2 features, 1 x 2 features of an image.
    runs = [(TEXT, 2), (VIDEO, 8), (TEXT, 1), (IMAGE, 2), (TEXT, 2)]
    shown = {"videos": [(4, 1, 2)], "images": [(1, 1, 2)]}
    # Frames are numbered: the video starts at 2, its last frame is 2 + 3, so text continues at 6; the image's
    # columns are 7 and 8, so text continues at 9.
    assert positions("qwen2_vl", runs, **shown) == [
        *same(0, 1),
        *([time, 2, column] for time in (2, 3, 4, 5) for column in (2, 3)),
        *same(6),
        [7, 7, 7], [7, 7, 8],
        *same(9, 10),
    ]  # fmt: skip
    # 1.5 seconds a frame, 2 numbers a second: frames are at 0, 3, 6 and 9, the last one at 2 + 9.
    assert positions("qwen2_5_vl", runs, seconds=[1.5], **shown) == [
        *same(0, 1),
        *([time, 2, column] for time in (2, 5, 8, 11) for column in (2, 3)),
        *same(12),
        [13, 13, 13], [13, 13, 14],
        *same(15, 16),
    ]  # fmt: skip


def test_two_videos_of_fractions_of_seconds():
    # 0.7 seconds a frame: 1.4 numbers, so frames are at 0, 1.4, 2.8, 4.2, 5.6 and 7, without the fractions.
    # 0.25 seconds a frame: 0, 0.5 and 1; the four columns reach further than that.
    runs = [(VIDEO, 6), (TEXT, 1), (VIDEO, 12), (TEXT, 1)]
    shown = {"videos": [(6, 1, 1), (3, 1, 4)]}
    assert positions("qwen2_5_vl", runs, seconds=[0.7, 0.25], **shown) == [
        *([time, 0, 0] for time in (0, 1, 2, 4, 5, 7)),
        *same(8),
        *([time, 9, column] for time in (9, 9, 10) for column in (9, 10, 11, 12)),
        *same(13),
    ]
    assert positions("qwen2_vl", runs, **shown) == [
        *([time, 0, 0] for time in range(6)),
        *same(6),
        *([time, 7, column] for time in (7, 8, 9) for column in (7, 8, 9, 10)),
        *same(11),
    ]


def test_the_rate_is_the_models_and_media_may_follow_each_other():
    # 25 numbers a second, 2 seconds a frame; the next video starts after 50, its rows reach 51 + 1.
    runs = [(VIDEO, 2), (VIDEO, 2), (IMAGE, 1), (TEXT, 1)]
    found = positions(
        "qwen2_5_vl", runs, videos=[(2, 1, 1), (1, 2, 1)], images=[(1, 1, 1)], seconds=[2.0, 2.0], rate=25
    )
    assert found == [[0, 0, 0], [50, 0, 0], [51, 51, 51], [51, 52, 51], *same(53, 54)]


def by_hand(policy, encoded, family, answer):
    """Derive the positions of text, 8 frames of 56 pixels at one a second, text, an image of 56 pixels, and
    text with an answer: (3, 1, S)."""
    config, ids = policy.model.config, encoded.ids.tolist()
    video, image = ids.index(config.video_token_id), ids.index(config.image_token_id)
    # Two frames make one, of 2 x 2 features: 2 seconds, which Qwen2.5-VL counts as 4 and Qwen2-VL as 1.
    times = (0, 4, 8, 12) if family == "qwen2_5_vl" else (0, 1, 2, 3)
    square = [(row, column) for row in (0, 1) for column in (0, 1)]
    found = same(*range(video))
    found += [[video + time, video + row, video + column] for time in times for row, column in square]
    start = video + times[-1] + 1
    found += same(*range(start, start + image - video - 16))
    start += image - video - 16
    found += [[start, start + row, start + column] for row, column in square]
    left = len(ids) + answer - len(found)
    return torch.tensor(found + same(*range(start + 2, start + 2 + left))).T[:, None]


@BOTH
def test_what_is_learned_and_what_is_generated_follow_the_video(exact, family):
    policy, packed = exact(family), exact(family, gradient_checkpointing=True)
    prompt = tiny.ask("both", "look", tiny.clip(8), "and", tiny.picture(), "when does the fox jump")
    (drawn,) = mixed.generate(policy, [prompt])
    for row in (drawn, policy.encode(prompt, Outcome(text="0123 fox"))):
        encoded, many = row.steps.prompt, len(row.steps.ids)
        places = by_hand(policy, encoded, family, many)
        assert torch.equal(encoded.positions, places[:, 0, : len(encoded.ids)])
        assert encoded.next_position == int(places[0, 0, len(encoded.ids)])
        ids = torch.cat([encoded.ids, row.steps.ids])[None]
        with torch.no_grad():
            logits = policy.model(input_ids=ids, position_ids=places, use_cache=False, **encoded.media).logits
            read = [reader(reader.collate((row,))).logp[0] for reader in (policy, packed)]
        logits = logits[0, -many - 1 : -1].index_fill(
            -1, torch.tensor(policy.prompt_encoder.placeholders), -torch.inf
        )
        wanted = logits.log_softmax(-1).gather(-1, row.steps.ids[:, None])[:, 0]
        for logp in read:
            torch.testing.assert_close(logp, wanted, rtol=0, atol=1e-10)
        if row is drawn:
            torch.testing.assert_close(row.notes["logp"].double(), wanted, rtol=0, atol=2e-5)
