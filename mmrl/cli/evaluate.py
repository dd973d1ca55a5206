"""The command that measures a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.command import CONFIG, OVERRIDES, command, print_measured
from mmrl.config.loading import read
from mmrl.config.schema import Config, EvaluateConfig, load


@command(
    CONFIG,
    OVERRIDES,
    examples=("mmrl evaluate my_run.yaml policy.model=runs/my_run/checkpoint-200/model",),
)
def evaluate(given: argparse.Namespace) -> None:
    """Measure one model or several `settings` of it; print a table and write it into `output_dir`."""
    from mmrl.build import load_evaluator
    from mmrl.pareto import compare
    from mmrl.reporting.html import document, metric_table
    from mmrl.reporting.metrics import write_measured
    from mmrl.reporting.pareto import show as show_settings

    trains = "rollout" in read(given.config, given.overrides)
    config = load(given.config, given.overrides, Config if trains else EvaluateConfig)
    folder = Path(config.output_dir)
    if not trains and config.settings:
        show_settings(compare(config, folder))
        return
    evaluator = load_evaluator(config)
    measured = evaluator.measure()
    if not evaluator.processes.main:
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_measured(folder, measured)
    page = document(folder.name, ["<h1>Evaluation</h1>", metric_table({folder.name: measured})])
    (folder / "evaluation.html").write_text(page)
    print_measured(measured)
    for warning in measured.table.absent.values():
        print(f"warning: {warning}")
