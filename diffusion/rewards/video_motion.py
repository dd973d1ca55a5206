"""Motion of videos as VBench defines it (arXiv 2311.17982): dynamic degree and motion smoothness."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.reward_inputs import RewardInputs
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion import reward_base as base
from mmrl.rewards.frames import frame_rate

RATE = 8  # frames per second at which motion is measured
UPDATES = 20  # refinement steps of the optical flow
FASTEST = 0.05  # fraction of the pixels: the mean motion of the fastest 5 % counts
VIDEO = frozenset({"video"})
SMALLEST = 128  # smallest side in pixels that torchvision's RAFT can read


def video_of(reward: str, prompt: Prompt, outcome: Outcome, least: int) -> Tensor:
    """Return a video's frames (F, 3, height, width); raises ValueError if there are fewer than `least`."""
    if outcome.video is None or len(outcome.video) < least:
        raise ValueError(
            f"{reward} scores videos of at least {least} frames; an outcome of prompt '{prompt.uid}' is none"
        )
    return base.frames_of(prompt, outcome)


@reward(inputs=RewardInputs(VIDEO, min_frames=2, min_side=SMALLEST))
class DynamicDegree:
    """Whether a video moves, 1 or 0: VBench's dynamic degree by optical flow of RAFT (arXiv 2311.17982).

    Flow is measured between neighbouring frames, at about 8 frames per second. A pair of frames moves if the
    fastest 5 % of its pixels move by more than 6 pixels on average, for a shorter side of 256 pixels. The
    video moves if the moving pairs are at least a quarter of its frames.

    Args:
        weights: File of torchvision's `raft_large`, or `owner/name:file` of the hub. Null: the weights
            `C_T_V1` from download.pytorch.org, which are the published ones that VBench uses.
        batch_size: Number of pairs of frames per forward pass.
        device: Device of the network; `auto` is the GPU if there is one, else the CPU.
    """

    def __init__(
        self, *, weights: str | None = None, batch_size: PositiveInt = 8, device: str = "auto"
    ) -> None:
        self.raft = base.shared_model("dynamic_degree", device, lambda: load_raft(weights), weights or "")
        self.batch_size = batch_size

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every video."""
        return [float(self._moves(*both)) for both in zip(prompts, outcomes, strict=True)]

    def _moves(self, prompt: Prompt, outcome: Outcome) -> bool:
        video = video_of("dynamic_degree", prompt, outcome, 2)
        side = min(video.shape[2:])
        if side < SMALLEST:
            raise ValueError(
                f"dynamic_degree reads frames of at least {SMALLEST} pixels a side, not {side} as of prompt "
                f"'{prompt.uid}'"
            )
        frames = video[:: max(1, round(frame_rate(prompt, outcome) / RATE))]
        motions = self.motions(frames)
        moving = sum(motion > 6 * side / 256 for motion in motions)
        return bool(motions) and moving >= round(4 * len(frames) / 16)

    @torch.no_grad()
    def motions(self, frames: Tensor) -> list[float]:
        """Return the mean motion, in pixels, of the fastest 5 % of pixels per pair of neighbour frames."""
        height, width = frames.shape[2:]
        low, wide = -height % 8, -width % 8
        device = next(self.raft.parameters()).device
        sides = (wide // 2, wide - wide // 2, low // 2, low - low // 2)
        pixels = pad(frames.to(device).float() / 127.5 - 1, sides, mode="replicate")
        motions: list[float] = []
        for first, second in zip(
            pixels[:-1].split(self.batch_size), pixels[1:].split(self.batch_size), strict=True
        ):
            flow = self.raft(first, second, num_flow_updates=UPDATES)[-1]  # (B, 2, H, W), with the padding
            speed = flow.norm(dim=1).flatten(1)
            motions += speed.topk(int(speed.shape[1] * FASTEST)).values.mean(1).tolist()
        return motions


def load_raft(weights: str | None) -> nn.Module:
    """Create torchvision's large RAFT, with weights from a file or from torchvision's server."""
    from torchvision.models.optical_flow import Raft_Large_Weights, raft_large

    cure = "Fetch it once where there is a network, and name the file as `weights`"
    if weights is not None:
        state = base.read_weights("dynamic_degree", weights)
    else:
        with base.explained("dynamic_degree: cannot fetch the weights of RAFT", cure):
            published = Raft_Large_Weights.C_T_V1
            state = published.get_state_dict(progress=False, check_hash=True, weights_only=True)
    model = raft_large(weights=None)
    with base.explained("dynamic_degree: these are not the weights of torchvision's `raft_large`"):
        model.load_state_dict(state)
    return model


@reward(inputs=RewardInputs(VIDEO, min_frames=3))
class MotionSmoothness:
    """Similarity of frames to their interpolation: VBench's motion smoothness (arXiv 2311.17982).

    Every second frame is left out and interpolated from its neighbours. The reward is the mean of
    (255 - d) / 255, where d is the mean absolute difference of a frame and its interpolation, in values of
    0 to 255. mmrl contains no interpolation network, because no package with VBench's AMT-S (arXiv
    2304.09790) works beside this library. Name your own network; only AMT-S gives VBench's scores.

    Args:
        interpolate: Function `package.module:function` of your network. It maps frames before and after,
            (B, 3, height, width) in [0, 1], to the frames in between, of the same shape.
        batch_size: Number of pairs of frames per forward pass.
    """

    def __init__(self, *, interpolate: str, batch_size: PositiveInt = 8) -> None:
        self.interpolate = base.import_function("motion_smoothness", interpolate)
        self.batch_size = batch_size

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every video."""
        return [self._smoothness(*both) for both in zip(prompts, outcomes, strict=True)]

    @torch.no_grad()
    def _smoothness(self, prompt: Prompt, outcome: Outcome) -> float:
        video = video_of("motion_smoothness", prompt, outcome, 3)
        kept, total = video[::2].float() / 255, 0.0
        left_out = video[1::2][: len(kept) - 1]
        for at in range(0, len(left_out), self.batch_size):
            truth = left_out[at : at + self.batch_size]
            end = at + len(truth)
            middle = self.interpolate(kept[at:end], kept[at + 1 : end + 1])
            if middle.shape != truth.shape:
                raise ValueError(
                    f"motion_smoothness: the function gave {tuple(middle.shape)}, not {tuple(truth.shape)}"
                )
            rounded = (middle * 255).clamp(0, 255).to(truth.device, torch.uint8)  # truncated, as in VBench
            total += (rounded.double() - truth.double()).abs().mean((1, 2, 3)).sum().item()
        return 1 - total / len(left_out) / 255
