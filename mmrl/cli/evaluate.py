"""Command `mmrl evaluate`: metrics of a model or of several settings of it."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.cli import completion
from mmrl.cli.command import OVERRIDES, argument, command, print_measured
from mmrl.config.changes import describe, differences
from mmrl.config.evaluation import evaluation_of
from mmrl.config.loading import ConfigError, change, read
from mmrl.config.schema import Config, EvaluateConfig, as_plain, hints_of, load, parse

if TYPE_CHECKING:
    from mmrl.core.reward_table import Measured
    from mmrl.inference.sources import ModelSource
    from mmrl.runtime.distributed import Processes

TOOLKITS = ("lmms_eval", "vlmeval")  # modules of mmrl.inference
# Files that an evaluation writes into its output folder.
WRITES = (
    "evaluation.json",
    "evaluation.html",
    "pareto.svg",
    *(f"predictions{s}" for s in ("", ".parquet", ".html")),
)


@command(
    argument(
        "config",
        help="a YAML file, or one that comes with mmrl, or the folder of a run or of a checkpoint",
        completer=completion.configs,
    ),
    OVERRIDES,
    argument(
        "--with",
        dest="toolkit",
        choices=TOOLKITS,
        help="evaluate on the benchmarks of another toolkit, whose options come as key=value: task=mmmu_val",
    ),
    examples=(
        "mmrl evaluate my_run.yaml policy.model=runs/my_run/checkpoint-200/model",
        "mmrl evaluate runs/my_run evaluation.num_generations=8",
        "mmrl evaluate runs/my_run --with lmms_eval task=mmmu_val limit=100",
    ),
)
def evaluate(given: argparse.Namespace) -> None:
    """Evaluate a model, or several `settings` of it; print a table and write it into `output_dir`.

    If the folder of a run is given, its configuration and the model of its last checkpoint, or of its last
    finished stage, are used. The results are then written to the subfolder `evaluation`, or `evaluation-2`
    for a second evaluation. An `output_dir` that contains another evaluation is an error. All answers are
    written to `predictions.parquet`, or with `settings` to one file per setting in `predictions/`.

    With `--with`, `config` can also be a model folder or hub id. Each benchmark gets a subfolder.
    """
    if given.toolkit:
        return _evaluate_with(given)
    from mmrl.build import load_evaluator
    from mmrl.pareto import check_settings, compare
    from mmrl.reporting.answers import THUMBNAILS, evaluation_file, write_predictions
    from mmrl.reporting.html import document, macros, metric_table, write_predictions_page
    from mmrl.reporting.metrics import write_measured
    from mmrl.reporting.pareto import show as show_settings
    from mmrl.runtime.distributed import Processes
    from mmrl.runtime.files import check_free
    from mmrl.runtime.folders import check_owner

    config, weights, own = _config_of(given.config, given.overrides)
    facts = {**as_plain(replace(config, output_dir="")), "weights": str(weights or "")}
    facts = json.loads(json.dumps(facts, default=str))
    record = _record_of(config, given)
    folder = _folder_of(Path(config.output_dir), facts, own=own)
    check_owner(folder, "evaluate", WRITES)
    check_free(folder)
    if isinstance(config, EvaluateConfig) and config.settings:
        check_settings(config)
        with _writing(folder, Processes(), facts, record):
            show_settings(compare(config, folder))
        return
    evaluator = load_evaluator(config, weights)
    processes, predictions = evaluator.processes, evaluation_file(folder)
    with _writing(folder, processes, facts, record):
        measured = evaluator.measure()
        with processes.fail_together("writing predictions"):
            options = {"notes": evaluator.noted, "policy": evaluator.engine.policy}
            write_predictions(predictions, measured, world=processes.world, images=THUMBNAILS, **options)
        if not processes.main:
            return
        write_measured(folder, measured)
        answers = write_predictions_page(predictions)
        head = ["<h1>Evaluation</h1>", macros().answers(answers.name)]
        page = document(folder.name, [*head, metric_table({folder.name: measured})])
        (folder / "evaluation.html").write_text(page)
    print_measured(measured)
    for warning in measured.table.absent.values():
        print(f"warning: {warning}")


def _evaluate_with(given: argparse.Namespace) -> None:
    """Evaluate a model on the benchmarks of another toolkit; write one subfolder per benchmark."""
    from mmrl.inference.sources import resolve
    from mmrl.reporting.answers import THUMBNAILS, evaluation_file, write_predictions
    from mmrl.reporting.html import document, macros, metric_table, write_predictions_page
    from mmrl.reporting.metrics import write_measured
    from mmrl.runtime.distributed import Processes
    from mmrl.runtime.files import check_free
    from mmrl.runtime.folders import check_owner

    toolkit = given.toolkit
    module, wanted, changes = toolkit_options(toolkit, given.overrides)
    source = _evaluated(resolve(given.config, changes))
    evaluate = module.prepare(source, wanted)
    named = any(text.startswith("output_dir=") for text in changes)
    home = Path(source.config.output_dir) if named else (source.run or Path("runs")) / toolkit
    facts = {**as_plain(source.config), "weights": str(source.weights or ""), toolkit: as_plain(wanted)}
    facts = json.loads(json.dumps({**facts, "output_dir": ""}, default=str))
    folder = _folder_of(home, facts, own=not named)
    check_owner(folder, "evaluate")
    check_free(folder)
    with _writing(folder, Processes(), facts, _record_of(source.config, given)):
        measured: dict[str, Measured] = {}
        for benchmark, result in evaluate(folder):
            measured[benchmark] = result
            inside = folder / benchmark
            inside.mkdir(exist_ok=True)
            write_predictions(evaluation_file(inside), result, images=THUMBNAILS)
            write_measured(inside, result)
            write_predictions_page(evaluation_file(inside))
        links = [macros().answers(f"{benchmark}/predictions.html") for benchmark in measured]
        page = document(folder.name, ["<h1>Evaluation</h1>", metric_table(measured), *links])
        (folder / "evaluation.html").write_text(page)
    for benchmark, result in measured.items():
        print(benchmark)
        print_measured(result)


def _evaluated(source: ModelSource) -> ModelSource:
    """Copy a model source, so that it samples with the settings of evaluations instead of rollouts."""
    config = evaluation_of(source.config)
    evaluation = config.evaluation
    if isinstance(source.config, Config):
        evaluation = replace(evaluation, data=evaluation.data or source.config.data)
    return replace(source, config=replace(config, evaluation=evaluation, output_dir=source.config.output_dir))


def toolkit_options(toolkit: str, overrides: Sequence[str]) -> tuple[Any, Any, list[str]]:
    """Split `key=value` texts into options of an external toolkit and overrides of the configuration.

    Returns the toolkit's module in `mmrl.inference`, its `Options`, and the overrides. Raises ConfigError for
    invalid options, and for a key that neither the toolkit nor a configuration has.
    """
    module = importlib.import_module(f"mmrl.inference.{toolkit}")
    options = hints_of(module.Options)
    own = [text for text in overrides if text.partition("=")[0] in options]
    changes = [text for text in overrides if text not in own]
    for key in (text.partition("=")[0] for text in changes):
        if "." not in key and key not in {**hints_of(Config), **hints_of(EvaluateConfig)}:
            raise ConfigError(f"there is no option '{key}' of {toolkit}; there are {', '.join(options)}")
    return module, parse(change({}, own), module.Options), changes


def _folder_of(folder: Path, facts: Mapping[str, Any], *, own: bool) -> Path:
    """Return an evaluation's output folder; a default folder (`own`) that is taken gets a number.

    Raises ConfigError if the user named a folder that contains another evaluation, or a part of one.
    """
    from mmrl.runtime.folders import content, mark_of

    tried = folder
    for number in count(2):
        record = mark_of(tried)
        changed = differences(record["of"], facts) if "of" in record and content(tried) else {}
        if not changed:
            break
        if not own:
            other = (
                "part of another evaluation, which did not finish"
                if "unfinished" in record
                else "another evaluation"
            )
            raise ConfigError(
                f"'{folder}' holds {other}: {describe(changed, 'there', 'here')}; name another "
                "output_dir, or delete that folder"
            )
        tried = folder.with_name(f"{folder.name}-{number}")
    if tried != folder:
        print(f"'{folder}' holds another evaluation; this one goes into '{tried}'")
    return tried


def _record_of(config: Config | EvaluateConfig, given: argparse.Namespace) -> dict[str, Any]:
    """Create an evaluation's record: configuration, code, machine, the arguments of the command."""
    from mmrl.runtime.machine import describe_machine
    from mmrl.training.record import record_of

    made = {"record": record_of(evaluation_of(config)), "machine": describe_machine()}
    toolkit = ["--with", given.toolkit] if given.toolkit else []
    return {**made, "command": [given.config, *toolkit, *given.overrides]}


@contextmanager
def _writing(
    folder: Path, processes: Processes, facts: Mapping[str, Any], record: Mapping[str, Any]
) -> Iterator[None]:
    """Lock an evaluation's output folder inside this context, and write its marker file.

    `facts` identify the evaluation; `record` documents configuration, code and machine.
    """
    from mmrl.runtime.files import locked
    from mmrl.runtime.folders import mark

    with locked(folder, processes):
        if processes.main:
            mark(folder, "evaluate", of=facts, unfinished=True, **record)
        yield
        if processes.main:
            mark(folder, "evaluate", of=facts, **record)


def _config_of(name: str, overrides: Sequence[str]) -> tuple[Config | EvaluateConfig, Path | None, bool]:
    """Return the configuration of a file or run folder, and the folder of the weights to load, if any.

    The third value is whether the output folder is mmrl's default.
    """
    from mmrl.inference.sources import resolve

    given = any(text.startswith("output_dir=") for text in overrides)
    if not Path(name).is_dir():
        if "rollout" not in read(name, overrides):
            return load(name, overrides, EvaluateConfig), None, False
        config = load(name, overrides, Config)
        home = config.output_dir if given else str(Path(config.output_dir) / "evaluation")
        return replace(config, output_dir=home), None, not given
    source = resolve(name, overrides)
    if source.run is None:
        raise ConfigError(
            f"'{name}' is no folder of a run, so it does not say what to ask; name a configuration, and this "
            f"folder as policy.model={name}"
        )
    print(f"model: {source.run / f'checkpoint-{source.step}'}")
    folder = source.config.output_dir if given else str(source.run / "evaluation")
    return replace(source.config, output_dir=folder), source.weights, not given
