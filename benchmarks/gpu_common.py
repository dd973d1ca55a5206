"""What the parts of `python -m benchmarks.gpu` share: the device, claims, times, and small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUESTION = "What is shown here?"
Figures = dict[str, Any]


class Skipped(Exception):
    """A part cannot run here; its words say what is missing."""


@dataclass(frozen=True)
class Claim:
    """A number that has to be at most, or at least, a threshold."""

    name: str
    value: float
    threshold: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether it holds; not for NaN."""
        return self.value >= self.threshold if self.at_least else self.value <= self.threshold

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.name} {self.value:.4g} {sign} {self.threshold:.4g}"


PartOf = Callable[[bool], tuple[Figures, list[Claim]]]


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Measure the median time of a call, in seconds."""
    from benchmarks.grpo_step import seconds_of

    call()
    return median(seconds_of(call) for _ in range(repeats))


def device_seconds(call: Callable[[], object]) -> float:
    """Measure a call without the time to launch its kernels: as a graph on a GPU; NaN elsewhere."""
    if DEVICE.type != "cuda":
        return float("nan")
    with torch.cuda.stream(torch.cuda.Stream()):  # a call before the capture, as torch asks for
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds(graph.replay, 20)


def bandwidth(toy: bool) -> float:
    """Measure bytes a second that the device reads: of a sum, of floats because one of integers is slow."""
    x = torch.zeros(1 << (22 if toy else 30), dtype=torch.uint8, device=DEVICE).view(torch.float32)
    return x.nbytes / seconds(x.sum, 5)


def relative(found: Tensor, expected: Tensor) -> float:
    """Give the largest difference, relative to the largest number."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def question(uid: str) -> Any:
    """Make a prompt of words."""
    from mmrl.core.types import Message, Part, Prompt

    return Prompt(uid, (Message("user", (Part(QUESTION),)),))


def small_model(folder: Path, **options: Any) -> Path:
    """Write a small Qwen2.5-VL with random weights that are large enough for confident answers."""
    from mmrl.core.rng import Stream
    from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl

    path = folder / "small"
    sizes = {"width": 128, "layers": 4, "heads": 4, "init": 0.06, "max_pixels": 1024 * 28 * 28, **options}
    TinyQwen2_5Vl(stream=Stream(0), **sizes).build(path)
    return path
