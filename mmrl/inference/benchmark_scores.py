"""Metrics with bootstrap intervals, from another evaluation toolkit's per-sample scores."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, EvaluateConfig, Piece
from mmrl.core.protocols import Engine
from mmrl.core.reward_table import Measured
from mmrl.core.rng import Stream
from mmrl.core.types import Trajectory
from mmrl.reporting.metrics import describe_lengths
from mmrl.runtime.distributed import Processes
from mmrl.training.evaluate import Evaluator
from mmrl.training.score import score

SCORE = "score"  # key of the number in a score that is a mapping, as in lmms-eval


def with_scores(row: Trajectory, values: Mapping[str, Any], target: Any, key: str = SCORE) -> Trajectory:
    """Add the scores of a sample to its rollout: numbers as recorded rewards, other values as logged text.

    Args:
        row: The rollout.
        values: Scores by metric: numbers, mappings with a number under `key`, or anything else.
        target: The correct answer, for reports.
        key: Key of the number in a mapping.
    """
    last, numbers, others = row.outcomes[-1], dict[str, float](), dict[str, str]()
    for name, value in values.items():
        number = value.get(key) if isinstance(value, Mapping) else value
        if isinstance(number, int | float) and math.isfinite(number):
            numbers[name] = float(number)
        if number is not value or not isinstance(number, int | float):
            text = isinstance(value, str)
            others[name] = value if text else json.dumps(value, default=str, ensure_ascii=False)
    shown = target if isinstance(target, str) else json.dumps(target, default=str, ensure_ascii=False)
    outcome = replace(last, recorded={**last.recorded, **numbers})
    return replace(
        row,
        prompt=replace(row.prompt, target=shown),
        outcomes=(*row.outcomes[:-1], outcome),
        logged={**row.logged, **others},
    )


def summarize(
    rollouts: Sequence[Trajectory],
    totals: Mapping[str, float],
    averaged: Collection[str],
    engine: Engine,
    config: Config | EvaluateConfig,
) -> tuple[Measured, tuple[str, ...]]:
    """Aggregate the scores of rollouts to metrics, with bootstrap intervals over prompts.

    The metric NAME is the toolkit's own total. If it is the mean of the scores, it has an interval. If not,
    it has none, and NAME/mean is the mean of the scores with its interval.

    Args:
        rollouts: Results of `with_scores`.
        totals: The toolkit's totals by metric.
        averaged: Names of totals that are known to be means; others are compared with the mean.
        engine: Engine that sampled the rollouts.
        config: Configuration with the seed, the confidence level and the name of the judging reward.

    Returns: The evaluation, and the names of totals without an interval.
    """
    rows = tuple(rollouts)
    names = dict.fromkeys(name for row in rows for name in row.outcomes[-1].recorded)
    pieces = Pieces(Stream(config.seed, purpose="evaluate"))
    rewards = [
        pieces.make("reward", Piece("precomputed", {"key": name, "label": name}), place=f"rewards[{i}]")
        for i, name in enumerate(names)
    ]
    table, metric = score(rewards, rows), pieces.make("metric", Piece("mean"))
    wanted = config.evaluation
    evaluator = Evaluator(
        (), Processes(), pieces.stream, engine, rewards, [metric], confidence=wanted.confidence
    )
    means, draws = metric(table), evaluator.resample(table)
    units = evaluator.units(table, draws)
    intervals = {name: evaluator.interval(drawn, units[name]) for name, drawn in draws.items()}
    metrics, ranges = dict[str, float](), dict[str, tuple[float, float]]()
    for name in dict.fromkeys((*totals, *means)):
        total, mean = totals.get(name), means.get(name, math.nan)
        if total is not None:
            metrics[name] = total
        # If all scores are 0, a total in percent equals their mean, but its interval is 100 times wider.
        equal = total is not None and mean != 0 and math.isclose(total, mean, rel_tol=1e-6)
        is_mean = equal or name in averaged
        if name in means and not is_mean:
            metrics[f"{name}/mean"] = mean
        if name in means:
            ranges[name if is_mean else f"{name}/mean"] = intervals[name]
    missing = tuple(name for name in totals if name not in ranges)
    metrics |= describe_lengths(table)
    return Measured(metrics, ranges, rows, table, wanted.correct), missing
