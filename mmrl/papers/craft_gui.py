"""CRAFT-GUI (arXiv 2508.11360): screen actions from short tasks to long ones, and a reward for arguments.

Title: CRAFT-GUI: Curriculum-Reinforced Agent For GUI Tasks
Formula: stage k draws from pool k, and a share `earlier` from the pools before it; the reward of an argument
is 1 inside of the box, an IoU or the F1 of words.
Our reading: each stage keeps 20% of earlier pools, the ends of the pools, and the terms of the reward.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any

import torch

from mmrl.config.loading import ConfigError, nearest
from mmrl.config.ranges import Ascending, NonNegativeFloat, PositiveFloat, Probability
from mmrl.config.registry import reward, sampler
from mmrl.core.answers import word_f1
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.data.row_prompts import chosen
from mmrl.rewards.adapters import per_outcome
from mmrl.samplers.candidates import evenness
from mmrl.samplers.sources import column_of, numbers_of
from mmrl.samplers.uniform import Uniform
from mmrl.vision.benchmarks.boxes import box_iou
from mmrl.vision.rewards.gui import (
    action_of,
    box_of,
    is_inside,
    is_near,
    own_action,
    parse_action,
    position_of,
    type_of,
)


@sampler
class Pools:
    """Draw from named pools of prompts, in shares that change from stage to stage.

    Pools are the values of a column (domains), or ranges of a number (difficulty). Inside a pool every prompt
    comes once per epoch of the pool. CRAFT-GUI's curriculum (arXiv 2508.11360) is `by` the steps of the
    recorded trajectory with `edges: [3, 7]`; our reading: each stage keeps 20% of earlier pools. A cascade of
    domains is `earlier: 0`. A pool with fewer prompts than its share of a draw leaves the rest to the others.

    Args:
        by: Column that tells pools apart.
        pools: Their names, in order: without `edges` the values of the column.
        edges: Upper ends of all pools but the last, ascending; a pool has the numbers above the end before
            it and up to its own.
        stages: Weight of every pool at each stage, such as [{easy: 1}, {easy: 1, hard: 3}]; a pool that is
            not named has none. Null: stage k is pool k, and `earlier` is divided among the pools before it
            by their sizes.
        earlier: Share of earlier pools in a stage, where `stages` is null.
        stage: The current stage, from 0; mostly a schedule, such as
            {name: sliding_window, stop: 2, every: 100, roll_back: false}. Between two whole numbers shares
            are interpolated; beyond the last stage it is the last.
    """

    def __init__(
        self,
        data: Sequence[Prompt],
        *,
        stream: Stream,
        by: str,
        pools: tuple[str, ...],
        edges: Annotated[tuple[float, ...], Ascending()] | None = None,
        stages: tuple[Mapping[str, NonNegativeFloat], ...] | None = None,
        earlier: Probability = 0.2,
        stage: NonNegativeFloat = 0.0,
    ) -> None:
        self.stream, self.stage = stream, stage
        inside: dict[str, list[int]] = {name: [] for name in pools}
        for place, name in enumerate(_named(data, by, pools, edges)):
            inside[name].append(place)
        for name, places in inside.items():
            if not places:
                raise ConfigError(
                    f"sampler 'pools': the pool '{name}' is empty: no prompt has a '{by}' for it; there are "
                    f"{', '.join(f'{n}: {len(p)}' for n, p in inside.items())}"
                )
        self.pools = {n: Uniform(chosen(data, places), stream=stream) for n, places in inside.items()}
        self.stages = [self._given(weights, i) for i, weights in enumerate(stages or ())]
        self.stages = self.stages or [self._built(i, earlier) for i in range(len(pools))]

    def _given(self, weights: Mapping[str, float], number: int) -> list[float]:
        """Turn the weights of a stage into shares of all pools."""
        for name in weights:
            if name not in self.pools:
                hint = nearest(name, self.pools) or f"there are {', '.join(self.pools)}"
                raise ConfigError(f"sampler 'pools': stages[{number}]: no pool is called '{name}'; {hint}")
        total = sum(weights.values())
        if not total:
            raise ConfigError(
                f"sampler 'pools': the weights of stages[{number}] sum to 0, so there is nothing to draw; "
                "give a pool a weight above 0"
            )
        return [weights.get(name, 0.0) / total for name in self.pools]

    def _built(self, number: int, earlier: float) -> list[float]:
        """Share a stage between its own pool and earlier ones."""
        sizes = [len(pool.data) for pool in self.pools.values()]
        before = sum(sizes[:number])
        shares = [earlier * size / before if i < number else 0.0 for i, size in enumerate(sizes)]
        shares[number] = 1.0 - sum(shares)
        return shares

    @property
    def shares(self) -> dict[str, float]:
        """The share of every pool at the current stage."""
        at = min(self.stage, len(self.stages) - 1)
        low, part = self.stages[math.floor(at)], at % 1
        high = self.stages[math.ceil(at)]
        mixed = [(1 - part) * a + part * b for a, b in zip(low, high, strict=True)]
        return dict(zip(self.pools, mixed, strict=True))

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw every pool's share, `num_generations` entries each; no prompt twice."""
        shares = self.shares
        # One random offset for all ends: a pool gets its share of a draw, rounded down or up, and on average
        # exactly its share. Rounded before, because shares may sum to 0.9999999999999999.
        offset = torch.rand((), generator=self.stream.generator("pools"), dtype=torch.float64).item()
        sums = accumulate(shares.values(), initial=0.0)
        ends = [math.floor(round(total * num_prompts, 9) + offset) for total in sums]
        wanted = {
            name: min(ends[i + 1] - ends[i], len(self.pools[name].data)) for i, name in enumerate(shares)
        }
        missing = num_prompts - sum(wanted.values())
        for name in sorted(shares, key=lambda name: -shares[name]):
            room = len(self.pools[name].data) - wanted[name] if shares[name] else 0
            wanted[name] += min(room, missing)
            missing -= min(room, missing)
        return [
            prompt for name, pool in self.pools.items() for prompt in pool.draw(wanted[name], num_generations)
        ]

    def pop_metrics(self) -> Mapping[str, float]:
        """Report the share of every pool, and how even they are."""
        shares = self.shares
        named = {f"sampler/share/{name}": share for name, share in shares.items()}
        return {"sampler/entropy": evenness(torch.tensor(list(shares.values()))), **named}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in every pool."""
        return {name: pool.state_dict() for name, pool in self.pools.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position in every pool; new pools start at 0."""
        for name in self.pools.keys() & state.keys():
            self.pools[name].load_state_dict(state[name])


def _named(data: Sequence[Prompt], by: str, pools: Sequence[str], edges: Sequence[float] | None) -> list[str]:
    """Name the pool of every prompt."""
    if len(set(pools)) < max(len(pools), 1):
        what = "two pools have one name" if pools else "`pools` is empty"
        raise ConfigError(f"sampler 'pools': {what}; name each pool once: {list(pools)}")
    if edges is not None:
        if len(edges) != len(pools) - 1:
            raise ConfigError(
                f"sampler 'pools': {len(pools)} pools need {len(pools) - 1} `edges` between them, "
                f"not {len(edges)}"
            )
        return [pools[bisect_left(edges, value)] for value in numbers_of(data, by, "pools")]
    named = [str(value) for value in column_of(data, by, "pools")]
    strangers = list(dict.fromkeys(name for name in named if name not in pools))
    if strangers:
        raise ConfigError(
            f"sampler 'pools': the column '{by}' has the value '{strangers[0]}', which is none of the pools "
            f"{', '.join(pools)}; add a pool of that name, or set `edges` where the column is a number"
        )
    return named


ASKS = ("answer", "response")  # types of actions that answer a question, which only a judge can score


@reward(scope="vision", own_answer=own_action)
@per_outcome
def action_argument(
    prompt: Prompt, outcome: Outcome, *, threshold: PositiveFloat = 0.14, tag: str = "action"
) -> float | None:
    """Reward in [0, 1] for the argument of a screen action: the place of a click, or the typed text.

    Our reading of CRAFT-GUI (arXiv 2508.11360), whose terms are not published. A click on a target with a
    `bbox` earns 1 inside of it, or the IoU if the answer has a `bbox` too; with a `position` alone it earns 1
    within `threshold` of it. A text (`value`) earns the F1 of its words. An action without an argument earns
    1 for its type. Another type of action earns 0. None where the target answers a question, which is for a
    judge: give that to `http`.

    Args:
        threshold: Largest Euclidean distance of two clicks, in shares of the screen.
        tag: Name of the answer block's tag.
    """
    answered, target = parse_action(outcome.text or "", tag), action_of(prompt)
    if type_of(target) in ASKS:
        return None
    if answered is None or type_of(answered) != type_of(target):
        return 0.0
    point, truth, box, truth_box = (
        position_of(answered),
        position_of(target),
        box_of(answered),
        box_of(target),
    )
    if truth_box:
        if box:
            return box_iou(box, truth_box)
        return float(point is not None and is_inside(point, truth_box))
    if truth:
        return float(is_near(point, truth, threshold))
    if target.get("value") not in (None, ""):
        return word_f1(str(answered.get("value") or ""), str(target["value"]))
    return 1.0
