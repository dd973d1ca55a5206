"""Flow policies for tests: the tiny pipelines, and a flow whose velocity is known in closed form."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.diffusion.flow_math import along
from mmrl.diffusion.model_family import Request
from mmrl.diffusion.schedule import shift_times
from mmrl.diffusion.steps import Conditioning
from mmrl.rewards.adapters import per_outcome

TEXTS = ("a cat", "two dogs on a boat")
SMALLEST = 0.003 / 1.002  # the smallest time of SD3.5's scheduler before it shifts a second time
SOLVERS = ("flow_sde", "dance_sde", "cps")


def make(kind: str, name: str, *given: Any, stream: Stream | None = None, **options: Any) -> Any:
    """Make a piece as a config does."""
    return Pieces(stream or Stream()).make(kind, Piece(name, options), *given)


def solver(name: str, **options: Any) -> Any:
    """Bind a stochastic step to its options."""
    return make("solver", f"diffusion.{name}", **options)


def flow(
    folder: Path, likelihood: Any = "diffusion.transition", stream: Stream | None = None, **options: Any
):
    """Make a policy of a tiny pipeline: float64, and with texts as short as they can be."""
    usual = {"model": str(folder), "dtype": "float64", "max_sequence_length": 1, "likelihood": likelihood}
    return make("policy", "diffusion.flow", stream=stream, **{**usual, **options})


def denoise(policy: Any, stream: Stream | None = None, **options: Any):
    """Make the engine, for images of 32 pixels in a few steps without guidance."""
    usual = {"height": 32, "width": 32, "num_inference_steps": 4, "guidance_scale": 1.0}
    return make("engine", "diffusion.denoise", policy, stream=stream, **{**usual, **options})


def asked(*texts: str, num: int = 1, answers: Sequence[Outcome] = ()) -> list[Prompt]:
    """Ask every text `num` times; a text has one name wherever it stands."""
    return [
        Prompt(uid=text, messages=(Message("user", (Part(text),)),), answers=tuple(answers))
        for text in texts or TEXTS
        for _ in range(num)
    ]


def data(*, num: int = 2) -> list[Prompt]:
    """Give prompts to a run, each with a recorded image."""
    return asked(*(f"p{i}" for i in range(num)), answers=[Outcome(image=picture(1))])


def picture(seed: int = 0, side: int = 32, frames: int = 0) -> Tensor:
    """Draw uint8 pixels: (3, side, side), or (frames, 3, side, side)."""
    shape = (frames, 3, side, side) if frames else (3, side, side)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@per_outcome
def redness(prompt: Prompt, outcome: Outcome) -> float:
    """Measure the mean of the red channel."""
    return float(outcome.image[0].float().mean() / 255)


def sd3_times(num_steps: int) -> Tensor:
    """Compute SD3.5's schedule by its rule, in float64: evenly from 1 down, shifted by 3, 0 at the end."""
    even = torch.linspace(1, SMALLEST, num_steps, dtype=torch.float64)
    return torch.cat([shift_times(even, 3.0), torch.zeros(1, dtype=torch.float64)])


def unshift_times(times: Tensor, shift: float) -> Tensor:
    """Undo `shift_times`."""
    return times / (shift - (shift - 1) * times)


def scheduler_of(times: Tensor) -> Any:
    """Build a scheduler of diffusers that steps through these (S + 1,) times.

    A pipeline resets the times of its scheduler: call it with `sigmas=times[:-1].tolist()` as well.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=times[:-1].tolist())
    return scheduler


@dataclass(frozen=True)
class Normal:
    """Data of independent N(mean, std^2) dimensions, whose flow is known."""

    mean: float = 0.5
    std: float = 0.3

    def moments(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Give mean and variance of x_t = (1 - t) x_0 + t noise."""
        return (1 - time) * self.mean, (1 - time).square() * self.std**2 + time.square()

    def velocity(self, latents: Tensor, time: Tensor) -> Tensor:
        """Give E[noise - x_0 | x_t]: both are linear in how far x_t is from its mean."""
        time = along(time, latents)
        centre, variance = self.moments(time)
        away = (latents - centre) / variance
        return time * away - (self.mean + (1 - time) * self.std**2 * away)


class Known:
    """What an engine needs of a policy, with the flow of `Normal` for a network. A prompt's text is its mean;
    the empty text has the mean 0."""

    pipe = None
    device = torch.device("cpu")
    precision = torch.float64
    outputs: Set[str] = frozenset()
    negative_prompt = ""
    stages = {"transformer": 0.0}
    trained = {"transformer": None}

    def __init__(self, *, likelihood: str = "diffusion.transition", std: float = 0.3) -> None:
        self.likelihood = make("likelihood", likelihood)
        self.std, self.evaluations, self.largest, self.family = std, 0, 0, self

    def latent_shape(self, pipe: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        return 1, height, width

    def frames_per_latent(self, pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def sigmas(self, pipe: Any, num_steps: int, shape: tuple[int, ...]) -> Tensor:
        return sd3_times(num_steps)

    def condition(self, request: Request, *, negative: bool = False) -> dict[str, Tensor]:
        mean = 0 if negative else float(request.text or 0)
        return {"mean": torch.tensor(mean, dtype=torch.float64)}

    def passes(self, guidance: float) -> int:
        return 1 if guidance == 1 else 2

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        self.evaluations += len(latents) * conditioning.passes
        self.largest = max(self.largest, len(latents))
        means = [float(conditioning.conditions[i]["mean"]) for i in conditioning.which.tolist()]
        led, plain = (
            torch.stack(
                [
                    Normal(mean, self.std).velocity(row[None], time[None])[0]
                    for mean, row, time in zip(shown, latents, sigma, strict=True)
                ]
            )
            for shown in (means, [0.0] * len(means))
        )
        return plain + conditioning.guidance * (led - plain)

    def decode(self, latents: Tensor) -> Tensor:
        grey = (latents.clamp(0, 1) * 255).round().to(torch.uint8)
        return grey.expand(-1, 3, *grey.shape[2:])
