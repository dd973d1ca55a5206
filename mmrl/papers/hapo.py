"""HAPO (arXiv 2509.16591): uncertain tokens are sampled at a higher temperature than sure ones.

Title: From Uniform to Heterogeneous: Tailoring Policy Optimization to Every Token's Nature
Formula: T_t = T (1 + tau h_t), with the entropy h_t on a scale from -1 to 1.
Our reading: the scale is that of the entropies noted in the round before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.config.ranges import Probability, ShareBelowOne
from mmrl.config.registry import engine
from mmrl.core.entropy_scale import EntropyScale
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Prompt, Rollouts
from mmrl.vision.decoding.decoding import GenerationRequest, LogitsReader
from mmrl.vision.engines.generate import Generate


@engine(scope="vision", notes={"entropy"})
@dataclass(eq=False)
class WithEntropyTemperature:
    """Multiply the temperature of every token by 1 + tau h, h its entropy on HAPO's scale, -1 to 1.

    arXiv 2509.16591. The scale is that of `entropy_width`, over the round of rollouts before; in the first
    one there is none, and the temperature is that of the engine. Answers are learned from at the engine's
    temperature, as in the released code, so that metrics of how well the engine samples from the policy show
    a difference. Our reading: the round before is measured by the entropies that were noted, which are those
    after the change. It wraps `vision.generate`.

    Args:
        engine: The wrapped engine.
        tau: Largest relative change of the temperature.
        pivot: Quantile of the entropies whose tokens keep the temperature.
    """

    engine: Generate
    _: KW_ONLY
    tau: ShareBelowOne = 0.05
    pivot: Probability = 0.8
    notes: ClassVar[frozenset[str]] = frozenset()
    scale: EntropyScale | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order."""
        return self.engine.decode(prompts, self._begin if self.scale else None)

    def factor(self, entropy: Tensor) -> Tensor:
        """Return what the temperature of tokens of an entropy is multiplied by."""
        return (
            torch.ones_like(entropy)
            if self.scale is None
            else 1 + self.tau * self.scale(entropy).clamp(-1, 1)
        )

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Measure the entropies of a round."""
        if not len(table):
            return
        entropy = table.notes["entropy"][(table.ids["on_policy"] == 1).any(-1)]
        if (known := entropy[~entropy.isnan()]).numel():
            self.scale = EntropyScale.of(known, self.pivot)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": list(astuple(self.scale)) if self.scale else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scale."""
        self.scale = EntropyScale(*state["scale"]) if state["scale"] else None

    def _begin(self, rows: Sequence[GenerationRequest]) -> LogitsReader:
        return TemperedReader(self.engine.reader([row.encoded for row in rows]), self)


class TemperedReader:
    """Divides the logits of every row by a factor that depends on its entropy."""

    def __init__(self, reader: LogitsReader, settings: WithEntropyTemperature) -> None:
        self.reader, self.settings = reader, settings

    def read(self, token: Tensor | None) -> Tensor:
        """Read a token of every row, and return logits at its own temperature."""
        logits = self.reader.read(token)
        logp = (logits / (self.settings.engine.temperature or 1.0)).log_softmax(-1)
        entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)  # as `draw_tokens` notes it
        return logits / self.settings.factor(entropy)[:, None]

    def keep(self, rows: Tensor) -> None:
        """Continue with some rows."""
        self.reader.keep(rows)
