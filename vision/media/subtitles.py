"""Subtitles of videos in SubRip files (.srt)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mmrl.data.dataset_io import read_text_file
from mmrl.data.fields import RowError

CLOCK = r"(\d{1,3}):(\d\d):(\d\d)[,.](\d{1,3})"
TIMES = re.compile(rf"^\s*{CLOCK}\s*-->\s*{CLOCK}[^\n]*$", re.MULTILINE)
MARKUP = re.compile(r"<[^<>]*>")  # such as <font color="white">


def read_subtitles(path: Path) -> list[tuple[float, float, str]]:
    """Read (start, end, text) of every subtitle of a file, in seconds; raises `RowError` without any."""
    parts = TIMES.split(read_text_file(path).replace("\r\n", "\n"))
    subtitles = []
    for at in range(1, len(parts), 9):  # `split` yields 8 numbers, then a text
        hours = [int(value) for value in parts[at : at + 8]]
        start, end = (h * 3600 + m * 60 + s + int(ms) / 1000 for h, m, s, ms in (hours[:4], hours[4:]))
        words = MARKUP.sub("", parts[at + 8].split("\n\n")[0])  # up to the blank line
        subtitles.append((start, end, " ".join(words.split())))
    if not subtitles:
        raise RowError(f"'{path}' holds no subtitles; wanted SubRip (.srt)")
    return subtitles


def subtitles_at(subtitles: Sequence[tuple[float, float, str]], times: Sequence[float]) -> str:
    """Join the subtitles that are shown at any of these times, one per line (Video-MME, arXiv 2405.21075)."""
    shown = [text for start, end, text in subtitles if text and any(start <= time < end for time in times)]
    return "\n".join(shown)
