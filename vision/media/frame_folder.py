"""Videos that are folders of numbered images, such as TVQA's in MVBench."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mmrl.core.types import Frames, Media
from mmrl.data.media import MediaError, read_image
from mmrl.data.media_root import MediaRoot
from mmrl.data.video import FrameSampling, sample_times

ENDINGS = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class FrameFolder:
    """Loads the sampled frames of a folder with `rate` images per second, whose names sort by time."""

    media: MediaRoot
    name: str
    sampling: FrameSampling
    rate: float = 3.0

    def files(self) -> list[str]:
        """List the images; raises `MediaError` for a folder that is missing, outside of the root or empty."""
        folder = (self.media.root / self.name).resolve()
        inside = folder.is_relative_to(self.media.root.resolve()) and folder.is_dir()
        names = sorted(f.name for f in folder.iterdir() if f.suffix.lower() in ENDINGS) if inside else []
        if not names:
            raise MediaError(f"there is no folder of images '{self.name}' in '{self.media.root}'")
        return [f"{self.name}/{name}" for name in names]

    def __call__(self) -> Frames:
        files, sampling = self.files(), self.sampling
        duration = len(files) / self.rate
        begin, end = sampling.start or 0.0, min(duration, sampling.end or duration)
        if begin >= end:
            raise MediaError(f"'{self.name}' lasts {duration:.2f} s; there is nothing from {begin:.2f} s on")
        times = sample_times(begin, end, sampling)
        images = [
            self._image(files[min(int(time * self.rate), len(files) - 1)], len(times)) for time in times
        ]
        if len({image.shape for image in images}) > 1:
            raise MediaError(f"the images of '{self.name}' differ in size")
        return Frames(torch.stack(images), torch.tensor(times, dtype=torch.float64), duration)

    def _image(self, name: str, count: int) -> torch.Tensor:
        """Read an image as (3, height, width) uint8, within the pixel limits of a video of `count` frames."""
        import numpy

        path = self.media.locate(name)
        image = read_image(path, str(path))
        limits = (self.sampling.max_pixels, self.sampling.total_pixels // count)
        limit = min((limit for limit in limits if limit), default=image.width * image.height)
        shrink = min(1.0, math.sqrt(limit / (image.width * image.height)))
        if shrink < 1:
            image = image.resize((max(1, int(image.width * shrink)), max(1, int(image.height * shrink))))
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()


def video_or_folder(media: MediaRoot, name: str, sampling: FrameSampling) -> Media:
    """Return a video file, or a folder of images, as a video that is decoded at its first use."""
    if not (media.root / name).is_dir():
        media.locate(name)
        return media.video(name, sampling)
    folder = FrameFolder(media, name, sampling)
    folder.files()
    return Media("video", name, folder)
