"""An engine that records how much answers to prompts with hints rely on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.data.hints import TAG, without_hint
from mmrl.vision.decoding.decoding import GenerationRequest, LogitsReader
from mmrl.vision.engines.derived_answers import ForcedPrefixReader
from mmrl.vision.engines.generate import Generate

KEY = "hint_reliance"


@engine
class WithHintReliance:
    """Record how much less likely the answers to prompts with hints are without them (HiLL).

    arXiv 2604.00698. It is the mean log-probability of the answer's tokens given the bare prompt minus that
    given the prompt with its hint, below 0 where the answer relies on the hint; both are of the whole
    distribution at the engine's temperature. The advantage `best_hint` reads it as a label: `{name:
    precomputed, key: hint_reliance, label: hint_reliance, weight: 0}` among the rewards. Both passes read
    token by token, so that they take about as long as sampling those answers twice. It wraps
    `vision.generate`.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Generate) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, and record the reliance of hinted answers."""
        rows = self.engine.rollout(prompts)
        hinted = [row for row in rows if TAG in row.prompt.tags]
        bare = self.mean_logp([without_hint(row.prompt) for row in hinted], hinted)
        given = self.mean_logp([row.prompt for row in hinted], hinted)
        found = iter([a - b for a, b in zip(bare, given, strict=True)])
        return tuple(recorded(row, next(found)) if TAG in row.prompt.tags else row for row in rows)

    def mean_logp(self, prompts: Sequence[Prompt], rows: Sequence[Trajectory]) -> list[float]:
        """Return the mean log-probability of each row's tokens as the answer to a prompt."""
        readers: list[ScoringReader] = []
        answers = iter([row.steps.ids for row in rows])

        def begin(asked: Sequence[GenerationRequest]) -> LogitsReader:
            reader = self.engine.reader([request.encoded for request in asked])
            device = self.policy.core.get_input_embeddings().weight.device
            tokens = [next(answers).to(device) for _ in asked]  # requests are in the order of the prompts
            readers.append(ScoringReader(reader, tokens, self.engine.temperature or 1.0))
            return readers[-1]

        self.engine.decode(prompts, begin)  # nothing but the tokens of the answers can be drawn
        return [value for reader in readers for value in reader.means()]


class ScoringReader(ForcedPrefixReader):
    """Forces rows to be given answers, and adds up the log-probabilities of their tokens."""

    def __init__(self, reader: LogitsReader, answers: Sequence[Tensor], temperature: float) -> None:
        super().__init__(reader, answers)
        self.temperature = temperature
        self.rows = torch.arange(len(answers), device=self.forced.device)  # those that are still read
        self.lengths = torch.tensor([len(answer) for answer in answers], dtype=torch.float64)
        self.sums = torch.zeros(len(answers), dtype=torch.float64)

    def read(self, token: Tensor | None) -> Tensor:
        """Read a token, add up the log-probability of the next one, and force it."""
        place = self.length
        forced = super().read(token)
        if place < self.forced.shape[1]:
            wanted = self.forced[:, place]
            logp = (self.logits / self.temperature).log_softmax(-1).gather(1, wanted.clamp(min=0)[:, None])
            self.sums[self.rows.cpu()] += torch.where(wanted >= 0, logp[:, 0], 0.0).double().cpu()
        return forced

    def keep(self, rows: Tensor) -> None:
        """Continue with some rows."""
        super().keep(rows)
        self.rows = self.rows[rows]

    def means(self) -> list[float]:
        """Return the mean log-probability of every answer."""
        return (self.sums / self.lengths).tolist()


def recorded(row: Trajectory, reliance: float) -> Trajectory:
    """Record the reliance of the last outcome of a row."""
    answer = replace(row.outcomes[-1], recorded={**row.outcomes[-1].recorded, KEY: reliance})
    return replace(row, outcomes=(*row.outcomes[:-1], answer))
