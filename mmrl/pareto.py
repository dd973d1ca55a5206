"""Comparison of several settings of a model on the same prompts: quality, costs and Pareto front."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.build import load_evaluator
from mmrl.config.binding import Bound, Pieces
from mmrl.config.consistency import check_evaluation
from mmrl.config.loading import ConfigError, nearest
from mmrl.config.schema import EvaluateConfig
from mmrl.config.sweep import settings_of
from mmrl.core.protocols import Engine
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts
from mmrl.reporting.answers import THUMBNAILS, setting_file, write_predictions
from mmrl.reporting.html import write_predictions_page
from mmrl.reporting.pareto import SettingResult, SettingsComparison, draw, page, plain, spell_row
from mmrl.training.evaluate import CHUNK, Evaluator

WARM = 8  # number of prompts of the warm-up before timing
SECONDS = "seconds"


def check_settings(config: EvaluateConfig) -> dict[str, EvaluateConfig]:
    """Check all settings and cost metrics without loading anything."""
    check_evaluation(config)
    settings = settings_of(config)
    for name, setting in settings.items():
        try:
            check_evaluation(setting)
        except ConfigError as error:
            raise ConfigError(f"settings.{name}: {error}") from error
    return settings


def compare(config: EvaluateConfig, folder: Path) -> SettingsComparison:
    """Evaluate the settings one after another, with one model in memory at a time.

    `evaluation.json` is written after each setting, `pareto.svg` and `evaluation.html` at the end.
    """
    import matplotlib  # noqa: F401  a missing package must fail before the evaluation, not after it

    settings = check_settings(config)
    meters = Pieces(Stream(config.seed)).make_field(config, "cost_metrics")
    for setting in settings.values():
        check_evaluation(setting).require_packages()
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, SettingResult] = {}
    first: Resampled | None = None
    for name, setting in settings.items():
        evaluator = load_evaluator(setting)
        result, costs = measure(evaluator, meters, setting_file(folder, name))
        first = first or result
        rows[name] = describe(evaluator, result, first, config.settings[name], costs)
        metric = config.target_metric or next(iter(result.values))
        if metric not in result.values:
            hint = nearest(metric, result.values) or f"there are {', '.join(result.values)}"
            raise ConfigError(f"target_metric: no metric is called '{metric}'; {hint}")
        prompts = len(set(result.uids))
        compared = SettingsComparison(rows, metric, config.greater_is_better, prompts)
        if evaluator.processes.main:
            write_predictions_page(setting_file(folder, name))
            (folder / "evaluation.json").write_text(json.dumps(plain(compared), indent=2))
            print(f"{name}: {spell_row(rows[name])}", flush=True)
    if evaluator.processes.main:
        (folder / "pareto.svg").write_text(draw(compared, compared.costs))
        plots = [draw(compared, [cost]) for cost in compared.costs]
        (folder / "evaluation.html").write_text(page(folder.name, compared, plots))
    return compared


@dataclass(frozen=True)
class Resampled:
    """The metrics of one setting, and their bootstrap distribution."""

    uids: tuple[str, ...]
    values: Mapping[str, float]
    draws: Mapping[str, Tensor]  # values of each metric on bootstrap samples of the prompts
    units: Mapping[str, int]  # number of independent units (resampled by the bootstrap)


def measure(
    evaluator: Evaluator, meters: Sequence[Bound], predictions: Path
) -> tuple[Resampled, dict[str, float]]:
    """Answer all prompts and measure the time, then the cost metrics on the first `CHUNK` prompts.

    The answers to all prompts are written to the file `predictions`.
    """
    engine, unshard = TimedEngine(evaluator.engine), evaluator.processes.unshard
    some = [prompt for prompt in evaluator.data[:CHUNK] for _ in range(evaluator.num_generations)]
    with torch.no_grad(), unshard(engine.policy.module):
        engine.rollout(some[: WARM * evaluator.num_generations])  # the first calls compile and allocate
    engine.seconds.clear()
    measured = replace(evaluator, engine=engine).measure(intervals=False)
    with evaluator.processes.fail_together("writing predictions"):
        options = {"notes": evaluator.noted, "policy": evaluator.engine.policy}
        world = evaluator.processes.world
        write_predictions(predictions, measured, world=world, images=THUMBNAILS, **options)
    with torch.no_grad(), unshard(engine.policy.module), ExitStack() as stack:
        metered = [stack.enter_context(meter(evaluator.engine)) for meter in meters]
        evaluator.engine.rollout(some)
    prompts = len({prompt.uid for prompt in some})
    costs = {name: amount / prompts for amounts in metered for name, amount in amounts.items()}
    draws = evaluator.resample(measured.table)
    values = {name: float(measured.metrics[name]) for name in draws}
    costs[SECONDS] = statistics.median(engine.seconds)  # the median is robust to interrupted calls
    return Resampled(measured.table.uids, values, draws, evaluator.units(measured.table, draws)), costs


class TimedEngine:
    """Wrapper of an engine that records the seconds per prompt of every rollout call."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy, self.notes = engine, engine.policy, engine.notes
        self.seconds: list[float] = []

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Call the wrapped engine, and record the seconds per prompt."""
        began = time.perf_counter()
        rows = self.engine.rollout(prompts)
        self.seconds.append((time.perf_counter() - began) / len({prompt.uid for prompt in prompts}))
        return rows


def describe(
    evaluator: Evaluator,
    result: Resampled,
    first: Resampled,
    changes: Mapping[str, Any],
    costs: Mapping[str, float],
) -> SettingResult:
    """Return the metrics and their differences to the first setting, with bootstrap intervals.

    All settings share the resampled prompts, so differences are paired.
    """
    if result.uids != first.uids:
        raise ValueError(
            f"settings are compared prompt by prompt, but the first answered {len(first.uids)} rows and "
            f"another {len(result.uids)}, or other ones; use the same wrappers of engines in all settings"
        )
    values, draws, units = result.values, result.draws, result.units
    quality = {name: (values[name], *evaluator.interval(drawn, units[name])) for name, drawn in draws.items()}
    difference = {
        # Paired: prompts that are hard for both settings add no variance to the difference.
        name: (
            values[name] - first.values[name],
            *evaluator.interval(drawn - first.draws[name], units[name], difference=True),
        )
        for name, drawn in draws.items()
        if name in first.draws
    }
    return SettingResult(changes, quality, difference, costs)
