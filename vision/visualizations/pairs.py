"""Captions beside their pictures: pairs of answers with their scores, and what models say of held-out
pictures, wrong objects marked."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import visualization
from mmrl.core.reward_table import Measured
from mmrl.core.types import Outcome, Prompt, Rollouts
from mmrl.vision.benchmarks.chair import Scene

SIDE = 120  # pixels of a picture in the report
GOOD, BAD = "#2b8a3e", "#b3261e"


@visualization
def pairs(measured: Mapping[str, Measured], *, num: PositiveInt = 12) -> str:
    """Show pictures with the better and the worse answer of a pair, their scores, and how the pair came to
    be.

    A pair is two answers to one prompt that record `preferred` and `score`, as `vision.preference_pairs`
    reads them; other rows are passed over. The `num` pairs of every evaluation stand at equal distances.
    """
    parts = []
    for name, one in measured.items():
        found = _spread([both for both in _answers(one.rollouts).values() if _is_pair(both)], num)
        figures = "".join(_pair(prompt, outcomes) for prompt, outcomes in found)
        if figures:
            parts.append(f"<h2>Pairs: {html.escape(name)}</h2><div class=grid>{figures}</div>")
    return "".join(parts)


@visualization
def captions(measured: Mapping[str, Measured], *, num: PositiveInt = 12) -> str:
    """Show pictures with what is in them and the first caption of every model; objects that are not there
    are marked.

    Pictures are those of which the target knows what is there, as of `vision.closed_vocabulary`; others are
    passed over.
    """
    said = {name: _answers(one.rollouts) for name, one in measured.items()}
    prompts = {uid: prompt for rows in said.values() for uid, (prompt, _) in rows.items()}
    known = [uid for uid, prompt in prompts.items() if _scene(prompt)]
    figures = []
    for uid in _spread(known, num):
        scene = _scene(prompts[uid])
        lines = "".join(
            f"<p><b>{html.escape(name)}</b><br>{marked(scene, rows[uid][1][0].text or '')}</p>"
            for name, rows in said.items()
            if uid in rows
        )
        truth = html.escape(", ".join(sorted(scene.objects)))
        figures.append(_figure(prompts[uid], f"<figcaption>{truth}</figcaption>{lines}"))
    return f"<h2>Held-out pictures</h2><div class=grid>{''.join(figures)}</div>" if figures else ""


def _scene(prompt: Prompt) -> Scene | None:
    match prompt.target:
        case Scene() as scene:
            return scene
    return None


def marked(scene: Scene, text: str) -> str:
    """Write a caption as HTML in which the words for objects that are not in the scene are struck out."""
    wrong = {m.word for m in scene.ontology.mentions(text) if m.name not in scene.objects}
    if not wrong:
        return html.escape(text)
    pattern = "|".join(rf"\b{re.escape(word)}(?:e?s)?\b" for word in sorted(wrong, key=len, reverse=True))
    pieces = re.split(f"({pattern})", text, flags=re.IGNORECASE)
    # Every other piece is what the pattern found.
    return "".join(
        f"<s style='color:{BAD}'>{html.escape(piece)}</s>" if i % 2 else html.escape(piece)
        for i, piece in enumerate(pieces)
    )


def _answers(rollouts: Rollouts) -> dict[str, tuple[Prompt, list[Outcome]]]:
    """Gather the answers to every prompt, in order."""
    found: dict[str, tuple[Prompt, list[Outcome]]] = {}
    for row in rollouts:
        found.setdefault(row.prompt.uid, (row.prompt, []))[1].append(row.outcomes[-1])
    return found


def _is_pair(found: tuple[Prompt, Sequence[Outcome]]) -> bool:
    return len(found[1]) > 1 and all({"preferred", "score"} <= set(one.recorded) for one in found[1])


def _spread(things: list, num: int) -> list:
    """Choose things at equal distances."""
    return [things[i * len(things) // num] for i in range(num)] if len(things) > num else things


def _pair(prompt: Prompt, outcomes: Sequence[Outcome]) -> str:
    better, worse = sorted(outcomes, key=lambda one: -one.recorded["preferred"])[:2]
    told = {key: prompt.columns.get(key) for key in ("h_pos", "h_neg")}
    how = [f"{key} {value:.2f}" for key, value in told.items() if value is not None]
    how += ["reversed"] if prompt.columns.get("flipped") else []
    lines = "".join(
        f"<p><b style='color:{colour}'>{side}</b> {one.recorded['score']:.3f}<br>"
        f"{html.escape(one.text or '')}</p>"
        for side, colour, one in (("chosen", GOOD, better), ("rejected", BAD, worse))
    )
    return _figure(prompt, f"{lines}<small>{', '.join(how)}</small>")


def _figure(prompt: Prompt, words: str) -> str:
    picture = _encoded(prompt.media[0].load().pixels[0]) if prompt.media else ""
    return (
        f"<figure class=beside><img alt='' width={SIDE} height={SIDE} src='{picture}'>"
        f"<div>{words}</div></figure>"
    )


def _encoded(picture: Tensor) -> str:
    """Encode a picture so that it stands inside the page."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).numpy()).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(
        buffer, "JPEG", quality=85
    )
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
