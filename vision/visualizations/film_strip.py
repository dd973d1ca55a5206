"""Film strips: what a clip shows, when the event is, and when models say it is."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import visualization
from mmrl.core.reward_table import Measured
from mmrl.core.types import Frames, Prompt, Rollouts, Trajectory
from mmrl.vision.benchmarks.time_spans import Moments, Span, parse_span

HEIGHT = 84  # pixels of a frame in the report
COLOURS = ("#0f6fbf", "#c2571a", "#7a4fb5", "#5b6b7b")


@visualization
def film_strip(measured: Mapping[str, Measured], *, num: PositiveInt = 6, frames: PositiveInt = 16) -> str:
    """Show clips as strips of frames, the true span and the answered spans as bars underneath.

    `measured` holds evaluations by the name of a model; of each prompt its first answer is shown. The `num`
    prompts stand at equal distances in the order they were asked.
    """
    answers = {name: _first(one.rollouts) for name, one in measured.items()}
    prompts = list({uid: row.prompt for rows in answers.values() for uid, row in rows.items()}.values())
    chosen = [prompts[i * len(prompts) // num] for i in range(num)] if len(prompts) > num else prompts
    strips = []
    for prompt in chosen:
        said = {
            name: rows[prompt.uid].outcomes[-1].text or ""
            for name, rows in answers.items()
            if prompt.uid in rows
        }
        strips.append(_strip(prompt, said, frames))
    return f"<h2>Held-out clips</h2><div class=rows>{''.join(strips)}</div>"


def _first(rollouts: Rollouts) -> dict[str, Trajectory]:
    """Find the first answer to every prompt."""
    first: dict[str, Trajectory] = {}
    for row in rollouts:
        first.setdefault(row.prompt.uid, row)
    return first


def _strip(prompt: Prompt, said: Mapping[str, str], count: int) -> str:
    target: Moments = prompt.target
    shown = _pictures(prompt.media[0].load(), count)
    pictures = "".join(f"<img alt='' src='{picture}'>" for picture in shown)
    bars = [_bar("true", target.spans, target.duration, "#2b8a3e", "")]
    for i, (name, text) in enumerate(said.items()):
        span = parse_span(text)
        words = "" if span else f"no span in {text!r}"
        bars.append(_bar(name, [span] if span else [], target.duration, COLOURS[i % len(COLOURS)], words))
    asked = html.escape(str(prompt.columns.get("query", prompt.text)))
    return (
        f"<figure><figcaption>{asked}</figcaption><div class=film>"  # as wide as the frames need
        f"<div class=frames>{pictures}</div>{''.join(bars)}</div></figure>"
    )


def _bar(name: str, spans: Sequence[Span], duration: float, colour: str, words: str) -> str:
    """Draw spans of a clip as a line of the width of its strip."""
    blocks = "".join(
        f"<span style='position:absolute;top:2px;bottom:2px;border-radius:3px;background:{colour};"
        f"left:{100 * start / duration:.2f}%;width:{100 * (end - start) / duration:.2f}%'></span>"
        for start, end in ([min(max(0.0, t), duration) for t in span] for span in spans)
    )
    times = ", ".join(f"{start:g} to {end:g} s" for start, end in spans) or html.escape(words)
    return (
        f"<div style='position:relative;height:16px;background:#f1f4f7;margin-top:3px'>{blocks}</div>"
        f"<small><b style='color:{colour}'>{html.escape(name)}</b> {times}</small>"
    )


def _pictures(seen: Frames, count: int) -> list[str]:
    """Encode frames at equal distances as pictures that stand inside the page."""
    places = torch.linspace(0, len(seen.pixels) - 1, min(count, len(seen.pixels))).round().long()
    return [_encoded(seen.pixels[place]) for place in places.tolist()]


def _encoded(picture: Tensor) -> str:
    from PIL import Image

    image = Image.fromarray(picture.permute(1, 2, 0).numpy())
    width = max(1, round(image.width * HEIGHT / image.height))
    buffer = io.BytesIO()
    image.resize((width, HEIGHT), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
