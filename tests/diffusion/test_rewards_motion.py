"""Dynamic degree and motion smoothness of VBench, by numbers derived by hand."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.diffusion.rewards import video_motion
from mmrl.diffusion.rewards.video_motion import DynamicDegree, MotionSmoothness

PROMPT = Prompt("p", (Message("user", (Part("a dog"),)),))


def clip(frames, rate=8.0):
    return Outcome(video=frames.to(torch.uint8), times=torch.arange(len(frames)) / rate)


def greys(*values, height=2, width=2):
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 3, height, width)


# ---- dynamic degree


class Flow(nn.Module):
    """In place of RAFT: the left 5 % of the columns move by the mean grey of the second frame."""

    def __init__(self):
        super().__init__()
        self.weight, self.shapes = nn.Parameter(torch.zeros(1)), []

    def forward(self, first, second, num_flow_updates):
        assert num_flow_updates == 20 and first.min() >= -1 and first.max() <= 1
        self.shapes.append(tuple(first.shape))
        flow = torch.zeros(len(first), 2, *first.shape[2:])
        speed = (second.mean((1, 2, 3)) + 1) * 127.5
        flow[..., : first.shape[3] // 20] = torch.stack([0.6 * speed, 0.8 * speed], 1)[..., None, None]
        return [torch.full_like(flow, 1000), flow]


@pytest.fixture
def flow(monkeypatch):
    network = Flow()
    monkeypatch.setattr(video_motion, "load_raft", lambda weights: network)
    return network


SIDES = {"height": 128, "width": 160}


def degree(*values, rate=8.0, **sides):
    return DynamicDegree(device="cpu")([PROMPT], [clip(greys(*values, **(sides or SIDES)), rate)])[0]


def test_a_video_moves_if_a_quarter_of_its_frames_move_fast_enough(flow):
    # The shorter side of 128 pixels has the threshold 6 * 128 / 256 = 3; 8 frames want 8 / 16 * 4 = 2 pairs.
    assert degree(0, 4, 4, 0, 0, 0, 0, 0) == 1
    assert degree(0, 4, 0, 0, 0, 0, 0, 0) == 0
    assert degree(0, 2, 2, 2, 2, 2, 2, 2) == 0
    # Two frames want round(0.5) = 0 pairs.
    assert degree(0, 0) == 1


def test_frames_are_taken_at_8_a_second_and_padded_to_multiples_of_8(flow):
    # Of 24 a second every third is taken: 0, 3, 6, ... are still, all others are bright.
    assert degree(*([0, 200, 200] * 8), rate=24.0) == 0
    assert degree(*([0, 200, 200] * 8), rate=12.0) == 1
    flow.shapes.clear()
    degree(0, 0, height=130, width=161)
    assert flow.shapes == [(1, 3, 136, 168)]


def test_the_fastest_twentieth_of_the_pixels_counts(flow):
    # 128 x 160 pixels: 1024 count, the 8 left columns, which move by 5 * 0.6, 5 * 0.8.
    reward = DynamicDegree(device="cpu")
    assert reward.motions(greys(0, 5, 5, **SIDES).to(torch.uint8)) == pytest.approx([5.0, 5.0], abs=1e-4)


def test_videos_that_cannot_be_measured_are_refused(flow):
    for outcome, told in (
        (Outcome(image=greys(0)[0].to(torch.uint8)), "dynamic_degree scores videos of at least 2 frames"),
        (clip(greys(0, 0, 0)), "frames of at least 128 pixels a side, not 2 as of prompt 'p'"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            DynamicDegree(device="cpu")([PROMPT], [outcome])


def test_the_network_is_the_large_raft_of_torchvision(tmp_path):
    from torchvision.models.optical_flow import raft_large

    torch.manual_seed(0)
    network = raft_large(weights=None).eval()
    torch.save(network.state_dict(), tmp_path / "raft.pth")
    generator = torch.Generator().manual_seed(1)
    frames = torch.randint(256, (2, 3, 128, 128), generator=generator, dtype=torch.uint8)
    with torch.no_grad():
        flow = network(frames[:1] / 127.5 - 1, frames[1:] / 127.5 - 1, num_flow_updates=20)[-1]
    fastest = flow.square().sum(1).sqrt().flatten().sort().values[-int(128 * 128 * 0.05) :]
    reward = DynamicDegree(weights=str(tmp_path / "raft.pth"), device="cpu")
    assert reward.motions(frames) == pytest.approx([float(fastest.mean())], rel=1e-4)
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="dynamic_degree: these are not the weights of torchvision's"):
        DynamicDegree(weights=str(tmp_path / "other.pth"), device="cpu")


# ---- motion smoothness


def halfway(before, after):
    """Interpolate linearly, and go out of range where both frames are white."""
    return (before + after) / 2 + (before + after == 2)


def wrong(before, after):
    return before[:, :1]


def smoothness(*values, batch_size=8, function="halfway"):
    reward = MotionSmoothness(interpolate=f"{__name__}:{function}", batch_size=batch_size)
    return reward([PROMPT], [clip(greys(*values))])[0]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_smoothness_compares_every_second_frame_with_its_interpolation(batch_size):
    # 20 lies between 0 and 40. 50 is 5 from 45, between 40 and 50; the last frame has no neighbour behind it.
    assert smoothness(0, 20, 40, batch_size=batch_size) == 1
    assert smoothness(0, 20, 40, 50, 50, 7, batch_size=batch_size) == pytest.approx(1 - (0 + 5) / 2 / 255)
    # 0 and 1 have 0.5 between them, which is cut off to 0; white is clipped.
    assert smoothness(0, 0, 1, batch_size=batch_size) == 1
    assert smoothness(255, 255, 255, batch_size=batch_size) == 1
    assert smoothness(0, 255, 0, batch_size=batch_size) == 0


def test_a_function_or_a_video_of_another_form_is_refused():
    with pytest.raises(ValueError, match="motion_smoothness cannot import 'no.such:thing'"):
        MotionSmoothness(interpolate="no.such:thing")
    with pytest.raises(ValueError, match=r"the function gave \(1, 1, 2, 2\), not \(1, 3, 2, 2\)"):
        smoothness(0, 0, 0, function="wrong")
    with pytest.raises(ValueError, match="motion_smoothness scores videos of at least 3 frames"):
        smoothness(0, 0)
