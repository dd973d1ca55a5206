"""A sampler that selects prompts by difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import sampler
from mmrl.core.rng import Stream
from mmrl.core.tensor import linspace_indices
from mmrl.core.types import Prompt
from mmrl.data.row_prompts import chosen
from mmrl.samplers.sources import numbers_of
from mmrl.samplers.uniform import Uniform


@sampler
class SelectedByDifficulty(Uniform):
    """Select prompts of suitable difficulty once, and draw only from them (Time-R1, arXiv 2503.13377).

    The difficulty is the score of an untrained model from 0 (never solved) to 1 (always solved), such as the
    IoU of its answer. Selected prompts come once per epoch.

    Args:
        by: Column with the score.
        rule: `gaussian_03` draws prompts with a score above 0 in proportion to exp(-(score - 0.3)^2 / (2
            0.2^2)), without replacement. `0070_all` takes scores in (0, 0.7], evenly spaced in sorted order.
        num_selected: Number of prompts (the paper: 2500); all suitable ones if there are fewer.
        shuffle: Reshuffle every epoch; false: in the order of the data.
    """

    def __init__(
        self,
        data: Sequence[Prompt],
        *,
        stream: Stream,
        by: str,
        rule: Literal["gaussian_03", "0070_all"] = "gaussian_03",
        num_selected: PositiveInt = 2500,
        shuffle: bool = True,
    ) -> None:
        scores = torch.tensor(numbers_of(data, by, "selected_by_difficulty"), dtype=torch.float64)
        gaussian = rule == "gaussian_03"
        suits = (scores > 0) & (gaussian | (scores <= 0.7))
        if not suits.any():
            raise ConfigError(
                f"sampler 'selected_by_difficulty': no prompt has a '{by}' above 0"
                f"{'' if gaussian else ' and up to 0.7'}; they are from {float(scores.min()):g} to "
                f"{float(scores.max()):g}"
            )
        if gaussian:
            weights = torch.where(suits, (-((scores - 0.3) ** 2) / (2 * 0.2**2)).exp(), 0.0)
            num, generator = min(num_selected, int(suits.sum())), stream.fixed("selected_by_difficulty")
            selected = torch.multinomial(weights, num, generator=generator)
        else:
            order = scores.argsort(stable=True)
            order = order[suits[order]]
            selected = order[linspace_indices(len(order), num_selected)]
        super().__init__(chosen(data, sorted(selected.tolist())), stream=stream, shuffle=shuffle)
