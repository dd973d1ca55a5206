"""Visualizations of a report: grids of images, and trajectories with their turning points."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import visualization
from mmrl.core.reward_table import Measured
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.image_io import to_pil
from mmrl.reporting.thumbnails import data_uri

WIDTH, HEIGHT = 60, 130  # size of a step in the turning-point chart without labels, in SVG units
LINE = 12  # height of a line of labels, in SVG units
GAIN_COLOUR, LOSS_COLOUR, TURN_COLOUR, TEXT_COLOUR = "#0f6fbf", "#d9622b", "#1d2733", "#566575"


def displayed_image(outcome: Outcome) -> Tensor | None:
    """Return the image of an outcome, or the middle frame of its video."""
    return outcome.image if outcome.video is None else outcome.video[len(outcome.video) // 2]


def data_url(image: Tensor, side: int) -> str:
    """Encode an image (3, height, width) uint8 as a data URL for `<img>`, at most `side` pixels a side.

    Images that fit are stored losslessly in their own size; the page enlarges them.
    """
    from PIL import Image

    pil, buffer = to_pil(image), io.BytesIO()
    form = "png" if max(pil.size) <= side else "jpeg"
    if form == "png":
        pil.save(buffer, form, optimize=True)
    else:
        pil.thumbnail((side, side), Image.Resampling.LANCZOS)
        pil.save(buffer, form, quality=85)
    return data_uri(buffer.getvalue(), f"image/{form}")


def image_row(outcomes: Sequence[Outcome], side: int, labels: Sequence[str] = ()) -> str:
    """Return an HTML row of the images of outcomes, at most `side` pixels wide each, with labels below.

    The row is at most as wide as the page. Outcomes without an image are left out.
    """
    images = [image for outcome in outcomes if (image := displayed_image(outcome)) is not None]
    below = [f"<small>{label}</small>" for label in labels] or [""] * len(images)
    cells = "".join(
        f"<div style='flex:0 1 {side}px;min-width:0;text-align:center'><img alt='' style='width:100%;"
        f"display:block;image-rendering:pixelated' src='{data_url(image, side)}'>{label}</div>"
        for image, label in zip(images, below, strict=True)
    )
    return f"<div style='display:flex;gap:2px'>{cells}</div>"


def figure(caption: str, inside: str) -> str:
    """Wrap HTML in a `<figure>` with a caption of plain text."""
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{inside}</figure>"


@visualization
def image_grid(
    measured: Mapping[str, Measured],
    *,
    num: PositiveInt = 6,
    per_prompt: PositiveInt = 6,
    side: PositiveInt = 96,
) -> str:
    """Show images of several models for the same prompts: one line per model, with mean rewards.

    `measured` maps model names to evaluations. A video is shown by its middle frame. The source images of an
    edit are shown above its results.

    Args:
        num: Maximum number of prompts, evenly spaced in the order of the evaluation.
        per_prompt: Maximum number of images per prompt and model.
        side: Width of an image in pixels.
    """
    rows = [row for evaluation in measured.values() for row in evaluation.rollouts]
    shown = {r.prompt.uid: r.prompt for r in rows if displayed_image(r.outcomes[-1]) is not None}
    prompts: list[Prompt] = list(shown.values())
    chosen = [prompts[i * len(prompts) // num] for i in range(num)] if len(prompts) > num else prompts
    figures = []
    for prompt in chosen:
        sources = [Outcome(image=m.load().pixels[0]) for m in prompt.media if m.kind == "image"]
        lines = f"<small><b>source</b></small>{image_row(sources, side)}" if sources else ""
        for name, evaluation in measured.items():
            outcomes = [row.outcomes[-1] for row in evaluation.rollouts if row.prompt.uid == prompt.uid]
            if outcomes:
                table = evaluation.table
                places = [i for i, uid in enumerate(table.uids) if uid == prompt.uid]
                means = {reward: float(table.at_end(reward)[places].nanmean()) for reward in table.scored}
                label = "  ".join([name, *(f"{reward} {mean:.2f}" for reward, mean in means.items())])
                images = image_row(outcomes[:per_prompt], side)
                lines += f"<small><b>{html.escape(label)}</b></small>{images}"
        figures.append(figure(prompt.text, lines))
    return f"<h2>Held-out images</h2><div class=grid>{''.join(figures)}</div>"


@dataclass(frozen=True)
class CreditedTrajectory:
    """A trajectory with outcomes and rewards of its K prefixes, and the credits of its K - 1 steps."""

    title: str
    outcomes: Sequence[Outcome]
    rewards: list[float]
    credits: list[float]

    @property
    def steps(self) -> list[tuple[float, float, bool]]:
        """For each step: the reward gain, the credit, and whether they differ (a turning point)."""
        added = [after - before for before, after in pairwise(self.rewards)]
        return [
            (gain, credit, abs(gain - credit) > 1e-9)
            for gain, credit in zip(added, self.credits, strict=True)
        ]

    @property
    def digits(self) -> int:
        """Number of decimals in labels: two, or more if all gains and credits are small."""
        largest = max((abs(value) for step in self.steps for value in step[:2]), default=0.0)
        return max(2, 1 - math.floor(math.log10(largest))) if largest > 1e-6 else 2


@visualization
def turning_points(
    measured: Mapping[str, Measured],
    *,
    advantage: tuple[Callable, ...],
    num: PositiveInt = 4,
    side: PositiveInt = 96,
) -> str:
    """Show trajectories: the image and reward of every prefix, and the reward gain of every step.

    A step is marked as a turning point if its credit differs from its gain. The trajectories with the most
    turning points come first. Evaluations without prefix rollouts show nothing.

    Args:
        advantage: Advantage functions, in order, up to the one that turns rewards of prefixes into credits of
            steps.
        num: Maximum number of trajectories.
        side: Width of an image in pixels.
    """
    paths = [path for name, run in measured.items() for path in credited(name, run, advantage)]
    paths.sort(key=lambda path: -sum(turn for _, _, turn in path.steps))  # stable: ties in evaluation order
    if not paths:
        return ""
    figures = []
    for path in paths[:num]:
        labels = [f"{reward:.{path.digits}f}" for reward in path.rewards]
        complete = all(displayed_image(outcome) is not None for outcome in path.outcomes)
        row = image_row(path.outcomes, side, labels) if complete else ""
        # A narrow page scrolls sideways, so that numbers stay legible.
        wide = f"<div style='min-width:{WIDTH * len(labels)}px'>{row}{bar_chart(path, side)}</div>"
        figures.append(figure(path.title, wide))
    note = (
        "<p class=note>Under each image: the reward, had the noise ended there. Bars: what a step added, "
        "blue where it rose and orange where it fell. "
        f"<b style='color:{TURN_COLOUR}'>Framed</b>: a turning point, credited with everything gained from "
        "before it to the end.</p>"
    )
    return f"<h2>Turning points</h2>{note}<div class=rows>{''.join(figures)}</div>"


def credited(name: str, measured: Measured, chain: tuple[Callable, ...]) -> list[CreditedTrajectory]:
    """Apply advantage functions to an evaluation's rewards; rows with missing rewards are left out."""
    table = measured.table.select(measured.table.mine)  # the rows of this process, as in `rollouts`
    if not len(table) or table.ends.shape[1] < 2:
        return []
    for piece in chain[:-1]:
        table = piece(table)
    credit = chain[-1](table)
    if table.values.shape[1] != 1:
        raise ValueError(f"`advantage` must leave one reward, but left {table.names}; put `total` first")
    whole = table.valid[:, 0].all(-1) & table.present.all(-1)  # (N,)
    return [
        CreditedTrajectory(f"{row.prompt.text}  ({name})", row.outcomes, rewards.tolist(), credits.tolist())
        for row, rewards, credits, usable in zip(
            measured.rollouts, table.values[:, 0], credit.values[:, 0], whole, strict=True
        )
        if usable
    ]


def bar_chart(path: CreditedTrajectory, side: int) -> str:
    """Draw an SVG chart with a bar per step; a turning point also gets a frame as high as its credit."""
    count = len(path.credits)
    # The longest bar takes 0.36 of the height on either side of the middle line; labels need the rest.
    scale = 0.36 * HEIGHT / max(1e-9, *(abs(value) for step in path.steps for value in step[:2]))

    def bar(index: int, height: float, style: str, inset: float) -> str:
        x, y = index * WIDTH + inset, HEIGHT / 2 - max(height * scale, 0.0)  # SVG's y grows downwards
        size = f"width='{WIDTH - 2 * inset:g}' height='{abs(height * scale):.2f}'"
        return f"<rect x='{x:g}' y='{y:.2f}' {size} {style}/>"

    def label(index: int, y: float, number: float, before: str, style: str) -> str:
        place = f"text-anchor='middle' font-size='11' x='{(index + 0.5) * WIDTH:g}' y='{y - 4:g}'"
        return f"<text {place} {style}>{before}{number:+.{path.digits}f}</text>"

    parts = [f"<line x1='0' x2='{count * WIDTH}' y1='{HEIGHT / 2}' y2='{HEIGHT / 2}' stroke='#dde3ea'/>"]
    for i, (added, credit, turn) in enumerate(path.steps):
        colour = GAIN_COLOUR if added >= 0 else LOSS_COLOUR
        parts.append(bar(i, added, f"fill='{colour}' fill-opacity='0.75'", 18))
        parts.append(label(i, HEIGHT, added, "", f"fill='{TEXT_COLOUR}'"))
        if turn:
            frame = f"fill='none' stroke='{TURN_COLOUR}' stroke-width='2' stroke-dasharray='4 2'"
            parts.append(bar(i, credit, frame, 12))
            # Put the credit on a separate line, because two numbers side by side are wider than a step.
            parts.append(label(i, HEIGHT + LINE, credit, "→ ", f"font-weight='700' fill='{TURN_COLOUR}'"))
    # Bars stand between the images above them, so the chart is narrower by one image.
    placement = f"width:{100 * count / (count + 1):.2f}%;margin-left:{50 / (count + 1):.2f}%"
    return (
        f"<div style='max-width:{side * (count + 1)}px'><svg role='img' "
        f"viewBox='0 0 {count * WIDTH} {HEIGHT + LINE}' style='{placement};max-width:{side * count}px'>"
        f"{''.join(parts)}</svg></div>"
    )
