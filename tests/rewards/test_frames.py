"""Rewards of images look at evenly spread frames of a video, and give their mean."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.frames import mean_over_frames

PROMPTS = [Prompt("a", ()), Prompt("b", ())]
# Frame i of the video is grey i.
VIDEO = torch.arange(9, dtype=torch.uint8).view(9, 1, 1, 1).expand(9, 3, 2, 2)


def grey(prompts, outcomes):
    return [float(outcome.image.float().mean()) for outcome in outcomes]


@pytest.mark.parametrize(("frames", "wanted"), [(1, 0.0), (2, 4.0), (3, 4.0), (9, 4.0), (20, 4.0)])
def test_frames_are_spread_from_the_first_to_the_last(frames, wanted):
    seen = []
    score = lambda prompts, outcomes: seen.extend(grey(prompts, outcomes)) or grey(prompts, outcomes)
    assert mean_over_frames(score, PROMPTS[:1], [Outcome(video=VIDEO)], frames) == [wanted]
    assert seen == {1: [0], 2: [0, 8], 3: [0, 4, 8]}.get(frames, list(range(9)))


def test_images_and_videos_together():
    outcomes = [Outcome(image=torch.full((3, 2, 2), 7, dtype=torch.uint8)), Outcome(video=VIDEO[:4])]
    # The mean of the frames 0, 1, 2 and 3 is 1.5.
    assert mean_over_frames(grey, PROMPTS, outcomes, 4) == [7.0, 1.5]


def test_a_video_with_a_frame_without_a_value_has_none():
    score = lambda prompts, outcomes: [None if value == 8 else value for value in grey(prompts, outcomes)]
    assert mean_over_frames(score, PROMPTS[:1], [Outcome(video=VIDEO)], 2) == [None]
    assert mean_over_frames(score, PROMPTS[:1], [Outcome(video=VIDEO[:8])], 2) == [3.5]
