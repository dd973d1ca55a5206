"""Evaluation with VLMEvalKit's questions and scoring, and answers of mmrl's engine."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt
from mmrl.core.progress import advance
from mmrl.core.reward_table import Measured
from mmrl.core.types import Prompt, Trajectory
from mmrl.data.messages import ReadMedia
from mmrl.inference.benchmark_model import BenchmarkModel, prompt_from
from mmrl.inference.benchmark_scores import summarize, with_scores
from mmrl.inference.sources import ModelSource
from mmrl.training.evaluate import CHUNK

SCORES = ("hit", "score")  # columns of VLMEvalKit's result files with the score of a sample
KEPT = (".tsv", ".csv", ".json", ".xlsx")  # result files that are kept; pickles are not


@dataclass(frozen=True)
class Options:
    """Options of `mmrl evaluate --with vlmeval`."""

    data: str  # names of data sets, separated by commas; or of TSV files in the folder $LMUData
    judge: str = "exact_matching"  # model that VLMEvalKit asks to compare answers, or exact_matching
    limit: NonNegativeInt = 0  # number of samples per data set; 0: all


def prepare(source: ModelSource, options: Options) -> Callable[[Path], Iterable[tuple[str, Measured]]]:
    """Check options and model without loading model or data; return a function that runs the evaluation.

    The function reads all data sets before it loads the model. It yields the name and metrics of each data
    set as soon as it is scored. The engine samples with its configured options. The function raises
    ConfigError for data sets that are unknown, have several turns, or cannot be scored by VLMEvalKit.
    """
    if importlib.util.find_spec("vlmeval") is None:
        raise ConfigError(
            "vlmeval is not importable; it is on no package registry: clone VLMEvalKit, add it to PYTHONPATH "
            "and install its requirements beside mmrl (docs/howto/toolkits.md)"
        )
    model = BenchmarkModel(source)

    def evaluate(folder: Path) -> Iterator[tuple[str, Measured]]:
        datasets = {name: _dataset(name) for name in options.data.split(",")}
        for name, dataset in datasets.items():
            yield name, _evaluate(model, name, dataset, options, folder / name)

    return evaluate


def _dataset(name: str) -> Any:
    """Read a data set of VLMEvalKit; raise ConfigError if it is unknown or has conversations."""
    os.environ["PRED_FORMAT"] = "tsv"  # VLMEvalKit's format of predictions
    try:
        dataset = importlib.import_module("vlmeval.dataset").build_dataset(name)
    except ImportError as error:
        raise ConfigError(f"a requirement of vlmeval is not installed: {error}") from error
    if dataset is None:
        raise ConfigError(f"data: vlmeval has no data set '{name}', and $LMUData no usable file '{name}.tsv'")
    if getattr(dataset, "TYPE", "") == "MT":
        raise ConfigError(
            f"data: '{name}' holds conversations of several turns; mmrl answers single questions"
        )
    return dataset


def _evaluate(model: BenchmarkModel, name: str, dataset: Any, options: Options, folder: Path) -> Measured:
    samples = dataset.data if not options.limit else dataset.data[: options.limit]
    video = {"video_llm": True} if dataset.MODALITY == "VIDEO" else {}
    asked: list[dict[str, Any]] = samples.to_dict("records")
    rows: list[Trajectory] = []
    for at in range(0, len(asked), CHUNK):
        chunk = asked[at : at + CHUNK]
        make = [partial(_prompt, dataset, name, samples.iloc[at + i], video) for i in range(len(chunk))]
        rows += model.answer({}, (), make)
        advance("answering", len(rows), len(asked))
    answered = samples.drop(columns=[column for column in ("image",) if column in samples])
    answered = answered.assign(prediction=[row.outcomes[-1].text for row in rows])
    # Score in a new folder: VLMEvalKit would unpickle and reuse the files of an earlier call.
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / f"mmrl_{name}.tsv"
        # VLMEvalKit's own writer quotes every cell: an unquoted carriage return in an answer ends the row.
        importlib.import_module("vlmeval.smp").dump(answered, str(file))
        try:
            returned = dataset.evaluate(str(file), model=options.judge, nproc=1)
        except NotImplementedError as error:
            raise ConfigError(f"data: vlmeval has no scoring for '{name}', only its questions") from error
        scores = _scores(Path(work))
        folder.mkdir(parents=True, exist_ok=True)
        for kept in [path for path in Path(work).iterdir() if path.suffix in KEPT]:
            shutil.copy(kept, folder)
    scored = [
        with_scores(row, scores.get(str(sample["index"]), {}), sample.get("answer"))
        for row, sample in zip(rows, asked, strict=True)
    ]
    measured, missing = summarize(scored, totals_of(returned), (), model.engine, model.source.config)
    if missing:
        print(f"{name}: no interval for {', '.join(missing)}, which are not means of the scores")
    return measured


def _prompt(dataset: Any, name: str, line: Any, video: Mapping[str, Any], read: ReadMedia) -> Prompt:
    """Create the prompt of a sample from VLMEvalKit's parts {"type", "value"}: text, images, videos."""
    parts = dataset.build_prompt(line, **video)
    return prompt_from(f"{name}/{line['index']}", [{"role": "user", "content": parts}], read)


def _scores(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the score of every sample from the result files in a folder, by the sample's index."""
    pandas = importlib.import_module("pandas")
    scores: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*_result*.tsv")):
        table = pandas.read_csv(path, sep="\t")
        for record in table.to_dict("records") if "index" in table else ():
            found = {name: record[name] for name in SCORES if name in record}
            scores.setdefault(str(record["index"]), {}).update(found)
    return scores


def totals_of(returned: Any) -> dict[str, float]:
    """Convert the result of VLMEvalKit's `evaluate`, a dictionary or a table, to totals by name.

    Totals of a table with several rows are prefixed by the row's texts, such as the split: `dev/Overall`.
    """
    if not isinstance(returned, Mapping) and not hasattr(returned, "to_dict"):
        return {}
    records: Sequence[Mapping[str, Any]] = (
        [returned] if isinstance(returned, Mapping) else returned.to_dict("records")
    )
    totals = {}
    for record in records:
        words = [str(value) for value in record.values() if isinstance(value, str)]
        prefix = "/".join(words) + "/" if len(records) > 1 and words else ""
        for name, value in record.items():
            if isinstance(value, int | float):
                totals[f"{prefix}{name}"] = float(value)
    return totals
