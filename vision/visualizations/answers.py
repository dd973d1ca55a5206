"""Visualizations of answers: spans in videos, preference pairs with scores, and hallucinated objects."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import visualization
from mmrl.core.reward_table import Measured
from mmrl.core.tensor import linspace_indices
from mmrl.core.types import Outcome, Prompt
from mmrl.reporting.thumbnails import data_uri, sound_of_prompt
from mmrl.vision.benchmarks.chair import Scene
from mmrl.vision.benchmarks.time_spans import Span, parse_span

HEIGHT, SIDE = 84, 120  # height of a video frame and side of an image, in pixels
COLOURS = ("#0f6fbf", "#c2571a", "#7a4fb5", "#5b6b7b")
GOOD, BAD = "#2b8a3e", "#b3261e"


@visualization
def film_strip(measured: Mapping[str, Measured], *, num: PositiveInt = 6, frames: PositiveInt = 16) -> str:
    """Show videos as film strips, with the target span and the answered spans as bars below.

    Args:
        measured: Maps the name of each model to its evaluation; the first answer to each prompt is shown.
        num: Number of prompts, evenly spaced in the order of the evaluation.
        frames: Number of frames per strip.
    """
    answers = {name: _answers(evaluation) for name, evaluation in measured.items()}
    prompts = {uid: prompt for rows in answers.values() for uid, (prompt, _) in rows.items()}
    strips = []
    for uid, prompt in _evenly_spaced([*prompts.items()], num):
        pixels, duration = prompt.media[0].load().pixels, prompt.target.duration
        width = max(1, round(pixels.shape[-1] * HEIGHT / pixels.shape[-2]))
        shown = pixels[linspace_indices(len(pixels), frames)]
        images = "".join(f"<img alt='' src='{_jpeg(frame, width, HEIGHT, quality=80)}'>" for frame in shown)
        bars = [_bar("true", prompt.target.spans, duration, GOOD, "")]
        rows_of = [(name, rows[uid][1][0].text or "") for name, rows in answers.items() if uid in rows]
        for (name, text), colour in zip(rows_of, cycle(COLOURS)):
            span = parse_span(text)
            bars.append(_bar(name, [span] if span else [], duration, colour, f"no span in {text!r}"))
        query = html.escape(str(prompt.columns.get("query", prompt.text)))
        strips.append(
            f"<figure><figcaption>{query}</figcaption><div class=film>"  # so bars are as wide as the frames
            f"<div class=frames>{images}</div>{''.join(bars)}</div>{_player(prompt)}</figure>"
        )
    return f"<h2>Held-out videos</h2><div class=rows>{''.join(strips)}</div>"


def _bar(name: str, spans: Sequence[Span], duration: float, colour: str, note: str) -> str:
    """Draw spans on a bar that represents the whole video; without spans the caption is `note`."""
    blocks = "".join(
        f"<span style='position:absolute;top:2px;bottom:2px;border-radius:3px;background:{colour};"
        f"left:{100 * start / duration:.2f}%;width:{100 * (end - start) / duration:.2f}%'></span>"
        # An answered span may exceed the video, so clip it.
        for start, end in ([min(max(0.0, t), duration) for t in span] for span in spans)
    )
    times = ", ".join(f"{start:g} to {end:g} s" for start, end in spans) or html.escape(note)
    return (
        f"<div style='position:relative;height:16px;background:#f1f4f7;margin-top:3px'>{blocks}</div>"
        f"<small><b style='color:{colour}'>{html.escape(name)}</b> {times}</small>"
    )


@visualization
def pairs(measured: Mapping[str, Measured], *, num: PositiveInt = 12) -> str:
    """Show images with the chosen and the rejected answer of a preference pair and their scores.

    A pair consists of two answers to one prompt that record `preferred` and `score`, as with
    `vision.preference_pairs`. Prompts without a pair are skipped. At most `num` pairs per model are shown.
    """
    parts = []
    for name, evaluation in measured.items():
        complete = [
            (prompt, answers)
            for prompt, answers in _answers(evaluation).values()
            if len(answers) > 1 and all({"preferred", "score"} <= set(a.recorded) for a in answers)
        ]
        figures = []
        for prompt, answers in _evenly_spaced(complete, num):
            better, worse = sorted(answers, key=lambda answer: -answer.recorded["preferred"])[:2]
            ratios = {key: prompt.columns.get(key) for key in ("h_pos", "h_neg")}
            notes = [f"{key} {value:.2f}" for key, value in ratios.items() if value is not None]
            notes += ["reversed"] if prompt.columns.get("flipped") else []
            lines = "".join(
                f"<p><b style='color:{colour}'>{side}</b> {answer.recorded['score']:.3f}<br>"
                f"{html.escape(answer.text or '')}</p>"
                for side, colour, answer in (("chosen", GOOD, better), ("rejected", BAD, worse))
            )
            figures.append(_figure(prompt, f"{lines}<small>{', '.join(notes)}</small>"))
        if figures:
            parts.append(f"<h2>Pairs: {html.escape(name)}</h2><div class=grid>{''.join(figures)}</div>")
    return "".join(parts)


@visualization
def captions(measured: Mapping[str, Measured], *, num: PositiveInt = 12) -> str:
    """Show images with their objects and each model's first caption; hallucinated objects are struck out.

    At most `num` images are shown, all with annotated objects, as in `vision.closed_vocabulary`.
    """
    answers = {name: _answers(evaluation) for name, evaluation in measured.items()}
    scenes: dict[str, tuple[Prompt, Scene]] = {}
    for rows in answers.values():
        for uid, (prompt, _) in rows.items():
            match prompt.target:
                case Scene() as scene:
                    scenes[uid] = prompt, scene
    figures = []
    for uid, (prompt, scene) in _evenly_spaced([*scenes.items()], num):
        lines = "".join(
            f"<p><b>{html.escape(name)}</b><br>{marked(scene, rows[uid][1][0].text or '')}</p>"
            for name, rows in answers.items()
            if uid in rows
        )
        truth = html.escape(", ".join(sorted(scene.objects)))
        figures.append(_figure(prompt, f"<figcaption>{truth}</figcaption>{lines}"))
    return f"<h2>Held-out images</h2><div class=grid>{''.join(figures)}</div>" if figures else ""


def marked(scene: Scene, text: str) -> str:
    """Convert a caption to HTML, with the words for absent objects struck out."""
    wrong = {m.word for m in scene.ontology.mentions(text) if m.name not in scene.objects}
    if not wrong:
        return html.escape(text)
    # Try longer phrases first, so that a phrase is matched before its words. The text may have plurals.
    pattern = "|".join(rf"\b{re.escape(word)}(?:e?s)?\b" for word in sorted(wrong, key=len, reverse=True))
    pieces = re.split(f"({pattern})", text, flags=re.IGNORECASE)
    # `re.split` returns unmatched text and matches in alternation.
    return "".join(
        f"<s style='color:{BAD}'>{html.escape(piece)}</s>" if i % 2 else html.escape(piece)
        for i, piece in enumerate(pieces)
    )


def _answers(evaluation: Measured) -> dict[str, tuple[Prompt, list[Outcome]]]:
    """Group the answers of an evaluation by prompt, in their original order."""
    groups: dict[str, tuple[Prompt, list[Outcome]]] = {}
    for row in evaluation.rollouts:
        groups.setdefault(row.prompt.uid, (row.prompt, []))[1].append(row.outcomes[-1])
    return groups


def _evenly_spaced(items: Sequence[Any], num: int) -> Sequence[Any]:
    """Choose `num` evenly spaced items, or all if there are fewer."""
    # Use integer arithmetic, so that no item is repeated.
    return [items[i * len(items) // num] for i in range(num)] if len(items) > num else items


def _figure(prompt: Prompt, words: str) -> str:
    pixels = getattr(prompt.media[0].load(), "pixels", None) if prompt.media else None
    image = "" if pixels is None else _jpeg(pixels[0], SIDE, SIDE, quality=85)
    return (
        f"<figure class=beside><img alt='' width={SIDE} height={SIDE} src='{image}'>"
        f"<div>{words}{_player(prompt)}</div></figure>"
    )


def _player(prompt: Prompt) -> str:
    """Return an element that plays the sound of a prompt; empty without a sound."""
    sound = sound_of_prompt(prompt)
    return f"<audio controls preload=none src='{data_uri(sound, 'audio/wav')}'></audio>" if sound else ""


def _jpeg(pixels: Tensor, width: int, height: int, quality: int) -> str:
    """Resize an image (3, h, w) uint8 and encode it as a data URL of a JPEG file."""
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=quality)
    return data_uri(buffer.getvalue())
