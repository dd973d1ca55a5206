"""Builder of questions about short sounds: which of two tones is higher, and where a beep is."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.core.types import Sound
from mmrl.data.dataset_io import write_rows
from mmrl.data.sound import as_wav

RATE = 16000
LOWEST, HIGHEST = 200.0, 1600.0  # Hz
ORDER, PLACES = ("first", "second"), ("begin", "middle", "end")


@dataclass(kw_only=True)
class Asked:
    """A question about a sound, and its answer."""

    question: str
    answer: str
    sound: Sound


@builder
@dataclass(kw_only=True)
class Tones:
    """Write questions about sounds of 0.6 seconds, half of them about two tones, half about a beep in noise.

    The tones are at least four semitones apart. `{train,test}.jsonl` are rows for `vision.conversations`.

    Args:
        train: Number of questions to learn from.
        test: Number of held-out questions.
    """

    stream: Stream
    train: PositiveInt = 600
    test: PositiveInt = 100

    def build(self, output: Path) -> dict[str, Any]:
        """Write the sounds and the rows; return their numbers."""
        counts: dict[str, Any] = {}
        for split, number in (("train", self.train), ("test", self.test)):
            (output / split).mkdir(parents=True, exist_ok=True)
            rows = []
            for i in range(number):
                draw = self.stream.generator("tones", split, i)
                asked = two_tones(draw) if i % 2 else beep(draw)
                name = f"{split}/{i}.wav"
                (output / name).write_bytes(as_wav(asked.sound, bits=16))
                rows.append(
                    {
                        "prompt": asked.question,
                        "audio": name,
                        "solution": asked.answer,
                        "completion": asked.answer,
                    }
                )
            counts[split] = write_rows(output / f"{split}.jsonl", rows)
        (output / "manifest.json").write_text(
            json.dumps({"source": "made by rules", "counts": counts}, indent=2) + "\n"
        )
        return counts


def two_tones(draw: torch.Generator) -> Asked:
    """Make a sound of two tones of 0.25 seconds with a pause between them."""
    octaves = math.log2(HIGHEST / LOWEST)
    low = float(torch.rand((), generator=draw)) * (octaves - 1 / 3)
    high = low + 1 / 3 + float(torch.rand((), generator=draw)) * (octaves - 1 / 3 - low)
    higher = int(torch.randint(2, (), generator=draw))
    first, second = (high, low) if higher == 0 else (low, high)
    pause = torch.zeros(RATE // 10)
    samples = torch.cat([tone(LOWEST * 2**first, 0.25), pause, tone(LOWEST * 2**second, 0.25)])
    return Asked(question="higher?", answer=ORDER[higher], sound=Sound(noisy(samples, draw), RATE))


def beep(draw: torch.Generator) -> Asked:
    """Make a noise of 0.6 seconds with a beep of 0.15 seconds in one of three places."""
    place = int(torch.randint(3, (), generator=draw))
    samples = torch.zeros(6 * RATE // 10)
    at = place * RATE // 5
    pitch = LOWEST * (HIGHEST / LOWEST) ** float(torch.rand((), generator=draw))
    samples[at : at + 3 * RATE // 20] = tone(pitch, 0.15)
    return Asked(question="where?", answer=PLACES[place], sound=Sound(noisy(samples, draw), RATE))


def tone(pitch: float, seconds: float) -> Tensor:
    """Make a tone that fades in and out."""
    times = torch.arange(round(seconds * RATE)) / RATE
    fade = (100 * torch.minimum(times, seconds - times)).clamp(0, 1)
    return 0.4 * fade * torch.sin(2 * math.pi * pitch * times)


def noisy(samples: Tensor, draw: torch.Generator) -> Tensor:
    """Add white noise."""
    return samples + 0.01 * torch.randn(samples.shape, generator=draw)
