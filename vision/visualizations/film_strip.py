"""Visualization of temporal grounding: frames of a video, its true span, and answered spans."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import visualization
from mmrl.core.reward_table import Measured
from mmrl.core.types import Prompt, Trajectory
from mmrl.vision.benchmarks.time_spans import Span, parse_span

HEIGHT = 84  # pixels of a frame in the report
COLOURS = ("#0f6fbf", "#c2571a", "#7a4fb5", "#5b6b7b")


@visualization
def film_strip(measured: Mapping[str, Measured], *, num: PositiveInt = 6, frames: PositiveInt = 16) -> str:
    """Show videos as strips of `frames` frames, with the true and the answered spans as bars below.

    `measured` maps model names to evaluations; the first answer to each prompt is shown, for `num` prompts at
    equal distances in the order of the evaluation.
    """
    answers: dict[str, dict[str, Trajectory]] = {}
    for name, evaluation in measured.items():
        answers[name] = {}
        for row in evaluation.rollouts:
            answers[name].setdefault(row.prompt.uid, row)
    prompts = list({uid: row.prompt for rows in answers.values() for uid, row in rows.items()}.values())
    strips = []
    for prompt in evenly_spaced(prompts, num):
        texts = {
            name: rows[prompt.uid].outcomes[-1].text or ""
            for name, rows in answers.items()
            if prompt.uid in rows
        }
        strips.append(_strip(prompt, texts, frames))
    return f"<h2>Held-out videos</h2><div class=rows>{''.join(strips)}</div>"


def evenly_spaced(items: Sequence[Any], num: int) -> list[Any]:
    """Choose `num` items at equal distances, or all if there are fewer."""
    return [items[i * len(items) // num] for i in range(num)] if len(items) > num else list(items)


def embedded_jpeg(pixels: Tensor, width: int, height: int, quality: int) -> str:
    """Encode an image (3, h, w) uint8, resized, as a data URL of a JPEG."""
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=quality)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _strip(prompt: Prompt, texts: Mapping[str, str], count: int) -> str:
    target, pixels = prompt.target, prompt.media[0].load().pixels
    width = max(1, round(pixels.shape[-1] * HEIGHT / pixels.shape[-2]))
    places = torch.linspace(0, len(pixels) - 1, min(count, len(pixels))).round().long().tolist()
    images = "".join(
        f"<img alt='' src='{embedded_jpeg(pixels[place], width, HEIGHT, quality=80)}'>" for place in places
    )
    bars = [_bar("true", target.spans, target.duration, "#2b8a3e", "")]
    for i, (name, text) in enumerate(texts.items()):
        span = parse_span(text)
        note = "" if span else f"no span in {text!r}"
        bars.append(_bar(name, [span] if span else [], target.duration, COLOURS[i % len(COLOURS)], note))
    query = html.escape(str(prompt.columns.get("query", prompt.text)))
    return (
        f"<figure><figcaption>{query}</figcaption><div class=film>"  # as wide as the frames need
        f"<div class=frames>{images}</div>{''.join(bars)}</div></figure>"
    )


def _bar(name: str, spans: Sequence[Span], duration: float, colour: str, note: str) -> str:
    """Draw spans on a bar whose width is the duration of the video."""
    blocks = "".join(
        f"<span style='position:absolute;top:2px;bottom:2px;border-radius:3px;background:{colour};"
        f"left:{100 * start / duration:.2f}%;width:{100 * (end - start) / duration:.2f}%'></span>"
        for start, end in ([min(max(0.0, t), duration) for t in span] for span in spans)
    )
    times = ", ".join(f"{start:g} to {end:g} s" for start, end in spans) or html.escape(note)
    return (
        f"<div style='position:relative;height:16px;background:#f1f4f7;margin-top:3px'>{blocks}</div>"
        f"<small><b style='color:{colour}'>{html.escape(name)}</b> {times}</small>"
    )
