"""Tiny checkpoints of families that write images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.core.rng import Stream
from mmrl.vision.builders.tiny_image_writers import TinyChameleon, TinyEmu3, TinyJanus

OPTIONS: dict[str, Any] = {"width": 32, "layers": 2, "codes": 16, "init": 0.3, "vocab_size": 300}


def write(builder: Any, folder: Path) -> None:
    """Write a model of random weights."""
    builder(stream=Stream(0), **OPTIONS).build(folder)


WRITERS: dict[str, Callable[[Path], None]] = {
    "chameleon": partial(write, partial(TinyChameleon, side=16)),
    "emu3": partial(write, TinyEmu3),
    "janus": partial(write, partial(TinyJanus, side=16)),
}
