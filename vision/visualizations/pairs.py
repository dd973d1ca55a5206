"""Visualizations of captions: preference pairs with scores, and hallucinated objects in captions."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import visualization
from mmrl.core.reward_table import Measured
from mmrl.core.types import Outcome, Prompt, Rollouts
from mmrl.vision.benchmarks.chair import Scene
from mmrl.vision.visualizations.film_strip import embedded_jpeg, evenly_spaced

SIDE = 120  # pixels of an image in the report
GOOD, BAD = "#2b8a3e", "#b3261e"


@visualization
def pairs(measured: Mapping[str, Measured], *, num: PositiveInt = 12) -> str:
    """Show images with the chosen and the rejected answer of a preference pair and their scores.

    A pair is two answers to one prompt that record `preferred` and `score`, as `vision.preference_pairs`
    reads them; other rows are skipped. `num` pairs of every evaluation are shown, at equal distances.
    """
    parts = []
    for name, evaluation in measured.items():
        complete = [
            (prompt, answers)
            for prompt, answers in _answers(evaluation.rollouts).values()
            if len(answers) > 1 and all({"preferred", "score"} <= set(a.recorded) for a in answers)
        ]
        figures = "".join(_pair(prompt, answers) for prompt, answers in evenly_spaced(complete, num))
        if figures:
            parts.append(f"<h2>Pairs: {html.escape(name)}</h2><div class=grid>{figures}</div>")
    return "".join(parts)


@visualization
def captions(measured: Mapping[str, Measured], *, num: PositiveInt = 12) -> str:
    """Show images with their objects and every model's first caption; hallucinated objects are struck out.

    Images are those with known objects, as from `vision.closed_vocabulary`; others are skipped. `num` images
    are shown, at equal distances.
    """
    answers = {name: _answers(evaluation.rollouts) for name, evaluation in measured.items()}
    scenes: dict[str, tuple[Prompt, Scene]] = {}
    for rows in answers.values():
        for uid, (prompt, _) in rows.items():
            match prompt.target:
                case Scene() as scene:
                    scenes[uid] = prompt, scene
    figures = []
    for uid, (prompt, scene) in evenly_spaced([*scenes.items()], num):
        lines = "".join(
            f"<p><b>{html.escape(name)}</b><br>{marked(scene, rows[uid][1][0].text or '')}</p>"
            for name, rows in answers.items()
            if uid in rows
        )
        truth = html.escape(", ".join(sorted(scene.objects)))
        figures.append(_figure(prompt, f"<figcaption>{truth}</figcaption>{lines}"))
    return f"<h2>Held-out images</h2><div class=grid>{''.join(figures)}</div>" if figures else ""


def marked(scene: Scene, text: str) -> str:
    """Convert a caption to HTML in which words for absent objects are struck out."""
    wrong = {m.word for m in scene.ontology.mentions(text) if m.name not in scene.objects}
    if not wrong:
        return html.escape(text)
    # The longest first, so that a phrase wins over its words; mentions are singular, the text may be plural.
    pattern = "|".join(rf"\b{re.escape(word)}(?:e?s)?\b" for word in sorted(wrong, key=len, reverse=True))
    pieces = re.split(f"({pattern})", text, flags=re.IGNORECASE)
    # `re.split` alternates between other text and matches.
    return "".join(
        f"<s style='color:{BAD}'>{html.escape(piece)}</s>" if i % 2 else html.escape(piece)
        for i, piece in enumerate(pieces)
    )


def _answers(rollouts: Rollouts) -> dict[str, tuple[Prompt, list[Outcome]]]:
    """Group the answers by prompt, in order."""
    groups: dict[str, tuple[Prompt, list[Outcome]]] = {}
    for row in rollouts:
        groups.setdefault(row.prompt.uid, (row.prompt, []))[1].append(row.outcomes[-1])
    return groups


def _pair(prompt: Prompt, answers: Sequence[Outcome]) -> str:
    better, worse = sorted(answers, key=lambda answer: -answer.recorded["preferred"])[:2]
    ratios = {key: prompt.columns.get(key) for key in ("h_pos", "h_neg")}
    notes = [f"{key} {value:.2f}" for key, value in ratios.items() if value is not None]
    notes += ["reversed"] if prompt.columns.get("flipped") else []
    lines = "".join(
        f"<p><b style='color:{colour}'>{side}</b> {answer.recorded['score']:.3f}<br>"
        f"{html.escape(answer.text or '')}</p>"
        for side, colour, answer in (("chosen", GOOD, better), ("rejected", BAD, worse))
    )
    return _figure(prompt, f"{lines}<small>{', '.join(notes)}</small>")


def _figure(prompt: Prompt, words: str) -> str:
    image = embedded_jpeg(prompt.media[0].load().pixels[0], SIDE, SIDE, quality=85) if prompt.media else ""
    return (
        f"<figure class=beside><img alt='' width={SIDE} height={SIDE} src='{image}'>"
        f"<div>{words}</div></figure>"
    )
