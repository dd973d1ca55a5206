"""The commands that measure a model, and compare two measurements answer by answer."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.command import CONFIG, OVERRIDES, argument, command, print_measured, print_table
from mmrl.config.loading import read
from mmrl.config.schema import Config, EvaluateConfig, load


@command(
    CONFIG,
    OVERRIDES,
    examples=("mmrl evaluate my_run.yaml policy.model=runs/my_run/checkpoint-200/model",),
)
def evaluate(given: argparse.Namespace) -> None:
    """Measure one model or several `settings` of it; print a table and write it into `output_dir`.

    Every answer lies in `predictions.parquet` there, or in a file of `predictions/` for each setting.
    """
    from mmrl.build import load_evaluator
    from mmrl.pareto import compare
    from mmrl.reporting.answers import THUMBNAILS, evaluation_file, write_predictions
    from mmrl.reporting.html import document, macros, metric_table, write_predictions_page
    from mmrl.reporting.metrics import write_measured
    from mmrl.reporting.pareto import show as show_settings

    trains = "rollout" in read(given.config, given.overrides)
    config = load(given.config, given.overrides, Config if trains else EvaluateConfig)
    folder = Path(config.output_dir)
    if not trains and config.settings:
        show_settings(compare(config, folder))
        return
    evaluator = load_evaluator(config)
    measured, processes = evaluator.measure(), evaluator.processes
    predictions = evaluation_file(folder)
    with processes.agreeing("writing predictions"):
        write_predictions(predictions, measured, world=processes.world, images=THUMBNAILS)
    if not processes.main:
        return
    write_measured(folder, measured)
    answers = write_predictions_page(predictions)
    fragments = ["<h1>Evaluation</h1>", macros().answers(answers.name), metric_table({folder.name: measured})]
    page = document(folder.name, fragments)
    (folder / "evaluation.html").write_text(page)
    print_measured(measured)
    for warning in measured.table.absent.values():
        print(f"warning: {warning}")


@command(
    argument("first", type=Path, help="the output_dir of an evaluation or a run, or a parquet file"),
    argument("second", type=Path, help="another one, which is called better or worse than the first"),
    argument("--by", help="the reward that the page orders by (default: the first that is only 0 and 1)"),
    argument("--output", type=Path, default=Path("compared.html"), help="the page to write (compared.html)"),
    examples=(
        "mmrl compare runs/base runs/tuned",
        "mmrl compare runs/a/predictions/step-000000.parquet runs/a --by short_answer",
    ),
)
def compare(given: argparse.Namespace) -> None:
    """Compare two evaluations answer by answer: what got better, what got worse, with p-values.

    Answers are joined on the uid of their prompt. A page shows both side by side.
    """
    from mmrl.reporting.html import write_compared_page
    from mmrl.reporting.html.predictions import change_rows, notes_on
    from mmrl.reporting.predictions import change_of, find_predictions, join, read_predictions

    paths = [given.first, given.second]
    joined = join(*(read_predictions(find_predictions(path)) for path in paths), by=given.by)
    changes, names = [change_of(joined, measure) for measure in joined.measures], [str(p) for p in paths]
    titles, rows = change_rows(changes, names)
    print_table(titles, *rows)
    for note in notes_on(joined, names):
        print(note)
    print(f"page: {write_compared_page(joined, changes, names, given.output)}")
