"""Evaluation of a policy on held-out prompts: metrics with bootstrap intervals over prompts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.core.episodes import join_episodes
from mmrl.core.protocols import Engine, Preparing
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.core.rng import Stream
from mmrl.core.tensor import group_index
from mmrl.core.types import Prompt, TrainerState
from mmrl.reporting.intervals import RESAMPLES, percentile_interval
from mmrl.reporting.metrics import describe_lengths
from mmrl.runtime.content_hash import of_prompts, of_weights
from mmrl.runtime.distributed import Processes
from mmrl.training.collect import in_order
from mmrl.training.score import RewardLog, score
from mmrl.training.unreadable import Unreadable

CHUNK = 64  # prompts answered at a time


@dataclass
class Evaluator:
    """Evaluator of a policy on fixed prompts, with the same random numbers in every evaluation."""

    data: Sequence[Prompt]
    processes: Processes
    stream: Stream
    engine: Engine
    rewards: Sequence[Bound]
    metrics: Sequence[Bound]
    num_generations: int = 1
    confidence: float = 0.95
    correct: str = ""
    prepare: Sequence[Preparing] = ()  # the run's samplers that add learned text to prompts
    unreadable: Unreadable = field(default_factory=Unreadable)
    noted: frozenset[str] = frozenset()  # names of the engine's per-step records that metrics read

    def agreed(self) -> Evaluator:
        """Check that all processes have the same prompts and weights, else raise on all; return self."""
        if self.processes.world > 1:
            self.processes.assert_equal(of_prompts(self.data) | {"weights": of_weights(self.engine.policy)})
        return self

    def measure(self, intervals: bool = True, state: TrainerState | None = None) -> Measured:
        """Answer and score every prompt, and compute the metrics, with bootstrap intervals if `intervals`.

        `state` is the training progress, for rewards.
        """
        rollouts, table, log = (), RewardTable.empty(), RewardLog(state or TrainerState())
        began = time.perf_counter()
        for at in range(0, len(self.data), CHUNK):
            chunk = list(self.data[at : at + CHUNK])  # a slice may build prompts lazily
            chunk = reduce(lambda chunk, piece: piece.prepare(chunk), self.prepare, chunk)
            prompts = [prompt for prompt in self.unreadable.rest(chunk) for _ in range(self.num_generations)]
            while prompts:
                order = [prompt.uid for prompt in prompts]
                mine, counts = self.processes.assign_prompts(prompts, table)
                with self.processes.fail_together("evaluating"), self.unreadable.catching():
                    with torch.no_grad(), self.processes.sampling(self.engine):
                        fresh = in_order(self.engine.rollout(mine), order) if mine else ()
                    fresh = fresh if counts else ()
                    local = score(self.rewards, fresh, notes=self.noted, rank=self.processes.rank, log=log)
                    fresh = log.onto(fresh)
                if not self.unreadable.agree(self.processes):
                    break
                prompts = self.unreadable.rest(prompts)
                if not self.unreadable.drops:
                    raise self.unreadable.error()
            if not prompts:
                continue
            self.processes.compare(self.engine)
            rollouts += fresh
            table = table.join(self.processes.gather(local, order))
        if not len(table):
            raise self.unreadable.error()
        seconds = time.perf_counter() - began
        whole = join_episodes(table)
        metrics = {name: value for metric in self.metrics for name, value in metric(whole).items()}
        metrics |= describe_lengths(table)
        metrics |= log.take(self.processes, metrics)
        metrics["seconds_per_prompt"] = seconds / len(self.data)  # for all answers to one prompt
        if torch.cuda.is_available():
            metrics["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated())
        samples = self.resample(whole) if intervals else {}
        units = self.units(whole, samples) if intervals else {}
        ranges = {name: self.interval(values, units[name]) for name, values in samples.items()}
        return Measured(metrics, ranges, rollouts, table, self.correct)

    def resample(self, table: RewardTable) -> dict[str, Tensor]:
        """Compute every metric on bootstrap samples: (RESAMPLES,) each, NaN if undefined in a sample.

        Prompts are drawn with replacement. Prompts with an equal tag `cluster` are drawn together, because
        they are not independent. Tables of the same prompts get the same draws.
        """
        rows_of = _rows_of_units(table)
        drawn: dict[str, Tensor] = {}
        generator = self.stream.fixed("bootstrap")
        for i in range(RESAMPLES):
            pick = torch.randint(len(rows_of), (len(rows_of),), generator=generator).tolist()
            sample = _of_groups(table, [rows_of[k] for k in pick])
            for metric in self.metrics:
                for name, value in metric(sample).items():
                    none = torch.full((RESAMPLES,), torch.nan, dtype=torch.float64)
                    drawn.setdefault(name, none)[i] = value  # stays NaN where a sample lacks the metric
        return drawn

    def units(self, table: RewardTable, names: Iterable[str]) -> dict[str, int]:
        """Count the independent units behind each metric: those that have a value of the metric, or else all.

        For a reward with `where`, for example, these are the prompts to which the reward applies.
        """
        rows_of, numbers = _rows_of_units(table), Counter[str]()
        for rows in rows_of:
            alone = _of_groups(table, [rows])
            named = {name: value for metric in self.metrics for name, value in metric(alone).items()}
            numbers.update(name for name, value in named.items() if not math.isnan(value))
        return {name: numbers[name] or len(rows_of) for name in names}

    def interval(self, drawn: Tensor, units: int, *, difference: bool = False) -> tuple[float, float]:
        """Compute the confidence interval of a metric from its bootstrap values over independent units.

        See `percentile_interval`. A `difference` of two metrics never gets Wilson's interval.
        """
        return percentile_interval(drawn, units, confidence=self.confidence, difference=difference)


def _rows_of_units(table: RewardTable) -> list[Tensor]:
    """Return the row indices of each independent unit: answers of a cluster of prompts, or of a prompt."""
    cluster = table.ids["cluster"][:, 0] if "cluster" in table.ids else torch.zeros_like(table.group)
    _, members = torch.unique(torch.where(cluster == 0, table.group, cluster), return_inverse=True)
    return [(members == unit).nonzero()[:, 0] for unit in range(int(members.max()) + 1)]


def _of_groups(table: RewardTable, units: Sequence[Tensor]) -> RewardTable:
    """Select the rows of resampled units (prompts or clusters); repeated units get new group ids."""
    sample = table.select(torch.cat(list(units)))
    sizes = torch.tensor([len(rows) for rows in units])
    # With its old group id, a prompt drawn twice would form one larger group and count once.
    number = torch.arange(len(units)).repeat_interleave(sizes)
    columns = {"group": number}
    if "cluster" in table.ids:
        columns = {"group": group_index([number, sample.group]), "cluster": number}
    wide = {name: column[:, None].expand_as(sample.ends) for name, column in columns.items()}
    return sample.replace(ids={**sample.ids, **wide})
