"""Grids of pictures: what models made of the same prompts."""

from __future__ import annotations

import html
from collections.abc import Mapping

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import visualization
from mmrl.core.reward_table import Measured
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.html_images import embedded, shown, strip


@visualization
def image_grid(
    measured: Mapping[str, Measured],
    *,
    num: PositiveInt = 6,
    per_prompt: PositiveInt = 6,
    side: PositiveInt = 96,
) -> str:
    """Show the first pictures that every model made of a prompt, one line a model, with the model's mean
    rewards for that prompt.

    `measured` holds evaluations by the name of a model. The `num` prompts stand at equal distances in the
    order they were asked; pictures are `side` pixels wide at most, videos show their middle frame.
    """
    prompts: dict[str, Prompt] = {}
    for one in measured.values():
        prompts |= {row.prompt.uid: row.prompt for row in one.rollouts if shown(row.outcomes[-1]) is not None}
    listed = list(prompts.values())
    chosen = [listed[i * len(listed) // num] for i in range(num)] if len(listed) > num else listed
    figures = "".join(_figure(prompt, measured, per_prompt, side) for prompt in chosen)
    return f"<h2>Held-out pictures</h2><div class=grid>{figures}</div>"


def _figure(prompt: Prompt, measured: Mapping[str, Measured], per_prompt: int, side: int) -> str:
    lines = []
    for name, one in measured.items():
        made = [row.outcomes[-1] for row in one.rollouts if row.prompt.uid == prompt.uid]
        if made:
            sources = _sources(made[:per_prompt], side)
            words = html.escape(f"{name}  {_rewards(one, prompt.uid)}")
            lines.append(f"<small><b>{words}</b></small>{strip(sources, side)}")
    return f"<figure><figcaption>{html.escape(prompt.text)}</figcaption>{''.join(lines)}</figure>"


def _sources(made: list[Outcome], side: int) -> list[str]:
    return [embedded(picture, side) for outcome in made if (picture := shown(outcome)) is not None]


def _rewards(one: Measured, uid: str) -> str:
    """Average every reward over the answers to one prompt."""
    rows = [i for i, name in enumerate(one.table.uids) if name == uid]
    means = {name: float(one.table.at_end(name)[rows].nanmean()) for name in one.table.scored}
    return "  ".join(f"{name} {mean:.2f}" for name, mean in means.items())
