"""The turning-points figure: rewards of all prefixes of a trajectory, and what each step added."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import visualization
from mmrl.core.reward_table import Measured
from mmrl.core.types import Trajectory
from mmrl.diffusion.visualizations.image_grid import data_url, displayed_image, image_row

WIDTH, HEIGHT = 60, 130  # of one step in the chart, SVG units
GAIN_COLOUR, LOSS_COLOUR, TURN_COLOUR = "#2b8a3e", "#b3402a", "#0f6fbf"


@dataclass(frozen=True)
class CreditedTrajectory:
    """A trajectory with the reward of each of its K prefixes, and the credit of its K - 1 steps."""

    name: str
    row: Trajectory
    rewards: list[float]
    credits: list[float]

    @property
    def added(self) -> list[float]:
        """What each step added to the reward."""
        return [after - before for before, after in pairwise(self.rewards)]

    @property
    def turns(self) -> list[int]:
        """Indices of the steps whose credit is not what they added."""
        pairs = zip(self.added, self.credits, strict=True)
        return [i for i, (added, credit) in enumerate(pairs) if abs(added - credit) > 1e-9]


@visualization
def turning_points(
    measured: Mapping[str, Measured],
    *,
    advantage: tuple[Callable, ...],
    num: PositiveInt = 4,
    side: PositiveInt = 96,
) -> str:
    """Trajectories with the image and reward of every prefix, and what each step added.

    A step whose credit is not what it added is marked as a turning point. Trajectories with most of them come
    first. Evaluations without prefix rollouts show nothing.

    Args:
        advantage: The pieces of the advantage chain up to the one that turns rewards of prefixes into credits
            of steps.
        num: Most trajectories.
        side: Width of an image, pixels.
    """
    paths = [path for name, run in measured.items() for path in _credited(name, run, advantage)]
    paths.sort(key=lambda path: -len(path.turns))
    if not paths:
        return ""
    figures = "".join(_figure(path, side) for path in paths[:num])
    note = (
        "<p class=note>Under each image: the reward, had the noise ended there. Bars: what a step added. "
        f"<b style='color:{TURN_COLOUR}'>Framed</b>: a turning point, credited with everything gained from "
        "before it to the end.</p>"
    )
    return f"<h2>Turning points</h2>{note}<div class=rows>{figures}</div>"


def _credited(name: str, measured: Measured, chain: tuple[Callable, ...]) -> list[CreditedTrajectory]:
    """Run the chain on the evaluation's rewards; rows with missing rewards are left out."""
    table = measured.table.select(measured.table.mine)
    if not len(table) or table.ends.shape[1] < 2:
        return []
    for piece in chain[:-1]:
        table = piece(table)
    credit = chain[-1](table)
    if table.values.shape[1] != 1:
        raise ValueError(f"`advantage` must leave one reward, but left {table.names}; put `total` first")
    whole = table.valid[:, 0].all(-1) & table.present.all(-1)
    return [
        CreditedTrajectory(name, row, table.values[i, 0].tolist(), credit.values[i, 0].tolist())
        for i, row in enumerate(measured.rollouts)
        if whole[i]
    ]


def _figure(path: CreditedTrajectory, side: int) -> str:
    images = [displayed_image(outcome) for outcome in path.row.outcomes]
    sources = [data_url(image, side) for image in images if image is not None]
    labels = [f"{reward:.2f}" for reward in path.rewards]
    row = image_row(sources, side, labels) if len(sources) == len(labels) else ""
    title = html.escape(f"{path.row.prompt.text}  ({path.name})")
    # A narrow page scrolls sideways, so that numbers stay legible.
    inside = f"<div style='min-width:{WIDTH * len(path.rewards)}px'>{row}{_bar_chart(path, side)}</div>"
    return f"<figure><figcaption>{title}</figcaption>{inside}</figure>"


def _bar_chart(path: CreditedTrajectory, side: int) -> str:
    """Draw a bar per step; a turning point also has a frame as high as its credit."""
    count = len(path.credits)
    reach = max(1e-9, *map(abs, [*path.added, *path.credits]))
    scale = 0.36 * HEIGHT / reach
    parts = [f"<line x1='0' x2='{count * WIDTH}' y1='{HEIGHT / 2}' y2='{HEIGHT / 2}' stroke='#dde3ea'/>"]
    for i, (added, credit) in enumerate(zip(path.added, path.credits, strict=True)):
        colour = GAIN_COLOUR if added >= 0 else LOSS_COLOUR
        parts.append(_bar(i, added * scale, f"fill='{colour}' fill-opacity='0.75'", 18))
        label = f"{added:+.2f}"
        if i in path.turns:
            style = f"fill='none' stroke='{TURN_COLOUR}' stroke-width='2' stroke-dasharray='4 2'"
            parts.append(_bar(i, credit * scale, style, 12))
            label = f"{added:+.2f} → {credit:+.2f}"
        weight = " font-weight='700'" if i in path.turns else ""
        parts.append(
            f"<text x='{(i + 0.5) * WIDTH:g}' y='{HEIGHT - 3}' text-anchor='middle' font-size='9'{weight} "
            f"fill='{TURN_COLOUR if i in path.turns else '#5b6b7b'}'>{label}</text>"
        )
    # Bars stand between the images above them, so the chart is narrower by one image.
    placement = f"width:{100 * count / (count + 1):.2f}%;margin-left:{50 / (count + 1):.2f}%"
    widest = f"max-width:{side * count}px"
    return (
        f"<div style='max-width:{side * (count + 1)}px'>"
        f"<svg role='img' viewBox='0 0 {count * WIDTH} {HEIGHT}' style='{placement};{widest}'>"
        f"{''.join(parts)}</svg></div>"
    )


def _bar(place: int, height: float, style: str, inset: float) -> str:
    top = HEIGHT / 2 - max(height, 0.0)
    return (
        f"<rect x='{place * WIDTH + inset:g}' y='{top:.2f}' width='{WIDTH - 2 * inset:g}' "
        f"height='{abs(height):.2f}' {style}/>"
    )
