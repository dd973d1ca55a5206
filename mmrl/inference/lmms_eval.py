"""Evaluation with lmms-eval: a model class for lmms-eval, and conversion of its scores to mmrl's metrics."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mmrl.config.loading import ConfigError, nearest
from mmrl.config.ranges import NonNegativeInt
from mmrl.core.progress import advance
from mmrl.core.reward_table import Measured
from mmrl.core.types import Prompt, Trajectory
from mmrl.data.messages import ReadMedia
from mmrl.inference.benchmark_model import BenchmarkModel, prompt_from, sampling_of
from mmrl.inference.benchmark_scores import SCORE, summarize, with_scores
from mmrl.inference.sources import ModelSource, resolve
from mmrl.runtime.files import write_whole
from mmrl.training.evaluate import CHUNK

# Keys of a logged sample that are not metrics.
LOGGED = (
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "token_counts", "doc_hash"),
    "input_media",
)
GENERATES = "generate_until"  # the only request type that mmrl answers
THINKING = '[["<think>", "</think>"], ["<analysis>", "</analysis>"]]'  # tags of thoughts; lmms-eval's default
RESULTS = "lmms_eval.json"


@dataclass(frozen=True)
class Options:
    """Options of `mmrl evaluate --with lmms_eval`, with the names of lmms-eval's command line."""

    task: str  # names of tasks, groups and tags, separated by commas
    include_path: str = ""  # folder with further tasks
    limit: NonNegativeInt = 0  # number of documents per task; 0: all
    num_fewshot: NonNegativeInt | None = None  # examples before every question; null: as the task says
    gen_kwargs: str = ""  # generation kwargs that replace those of the tasks: "max_new_tokens=64,top_p=0.9"


def prepare(source: ModelSource, options: Options) -> Callable[[Path], Iterable[tuple[str, Measured]]]:
    """Check options and model without loading model or data; return a function that runs the evaluation.

    The function runs lmms-eval in this process, which loads the tasks before the model. It yields the name
    and the metrics of each task, and prints which totals have no interval. Its argument is the output folder,
    where `lmms_eval.json` gets everything that lmms-eval returns except for its samples.

    `prepare` raises ConfigError for unknown tasks. The function raises it for tasks whose data cannot be
    read, and for requests other than `generate_until`.
    """
    _check_installed()
    model, tasks = model_class()(source=source), _task_manager(options)

    def evaluate(folder: Path) -> Iterator[tuple[str, Measured]]:
        results = _results(model, tasks, options, folder)
        samples = results.pop("samples")
        write_whole(folder / RESULTS, json.dumps(results, default=str, indent=2))
        for task, logged in samples.items():
            key = results["configs"][task].get("score_key", SCORE)
            rows, totals = scored_rows(task, logged, results["results"][task], model.rows, key)
            averaged = {name for name in totals if name.partition(",")[0] in tasks.averaged[task]}
            measured, missing = summarize(rows, totals, averaged, model.model.engine, source.config)
            if missing:
                print(f"{task}: no interval for {', '.join(missing)}, which are not means of the scores")
            yield task, measured

    return evaluate


def _results(model: Any, tasks: Any, options: Options, folder: Path) -> dict[str, Any]:
    """Run `simple_evaluate`; raise ConfigError if the code of a task fails."""
    evaluator = importlib.import_module("lmms_eval.evaluator")
    retried = importlib.import_module("tenacity").RetryError
    args = argparse.Namespace(
        output_path=str(folder), process_with_media=True, reasoning_tags=THINKING, agentic_trace_mode="basic"
    )
    try:
        return evaluator.simple_evaluate(
            model=model,
            tasks=options.task.split(","),
            task_manager=tasks,
            limit=options.limit or None,
            num_fewshot=options.num_fewshot,
            gen_kwargs=options.gen_kwargs or None,
            bootstrap_iters=0,
            cli_args=args,
        )
    except retried as error:  # lmms-eval gave up after retries
        cause = error.last_attempt.exception()
        raise ConfigError(f"a task of '{options.task}' failed: {type(cause).__name__}: {cause}") from error


def scored_rows(
    task: str,
    samples: Sequence[Mapping[str, Any]],
    results: Mapping[str, Any],
    rows: Mapping[tuple[str, Any], Trajectory],
    score_key: str = SCORE,
) -> tuple[list[Trajectory], dict[str, float]]:
    """Add the scores that lmms-eval logged to the rollouts, and read its totals.

    A task with several filters logs every document once per filter; its metrics are called METRIC,FILTER. A
    document that was answered several times has the first answer, with the score of the document.

    Args:
        task: Name of the task.
        samples: The logged samples of the task.
        results: The task's totals: `{"METRIC,FILTER": value}`, with standard errors and the alias.
        rows: Rollouts by task and document id.
        score_key: Key of the number in scores that are mappings.

    Returns: One rollout per document, and the totals by metric.
    """
    keyed = {name: value for name, value in results.items() if "," in name}
    filters = list(dict.fromkeys(name.partition(",")[2] for name in keyed))
    several = len(filters) > 1
    totals = {
        name if several else name.partition(",")[0]: float(value)
        for name, value in keyed.items()
        if "_stderr" not in name and isinstance(value, int | float)
    }
    scored: dict[Any, Trajectory] = {}
    seen: dict[Any, int] = defaultdict(int)
    for sample in samples:
        number = sample["doc_id"]
        row = scored.get(number) or rows[task, number]
        suffix = f",{filters[seen[number]]}" if several else ""
        seen[number] += 1
        values = {f"{name}{suffix}": value for name, value in sample.items() if name not in LOGGED}
        answer = sample["filtered_resps"][0]
        if answer != row.outcomes[-1].text:
            values[f"filtered{suffix}"] = answer if isinstance(answer, str) else [str(answer)]
        scored[number] = with_scores(row, values, sample["target"], score_key)
    return list(scored.values()), totals


def _check_installed() -> None:
    if importlib.util.find_spec("lmms_eval") is None:
        raise ConfigError(
            "lmms_eval is not installed beside mmrl; make an environment with both (`make lmms` in the "
            "repository, docs/howto/toolkits.md), and run `mmrl evaluate` there"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "lmms_eval runs in one process here; for several GPUs, list vision.vllm as the engine"
        )


def _task_manager(options: Options) -> Any:
    """Create a task manager of lmms-eval that refuses tasks with requests other than text generation."""
    tasks = importlib.import_module("lmms_eval.tasks")
    subtasks = importlib.import_module("lmms_eval.evaluator_utils").get_task_list
    retried = importlib.import_module("tenacity").RetryError
    mean = importlib.import_module("lmms_eval.api.metrics").mean
    if options.include_path and not Path(options.include_path).is_dir():
        raise ConfigError(f"include_path: there is no folder '{options.include_path}'")

    class Tasks(tasks.TaskManager):
        averaged: dict[str, set[str]] = {}  # task -> metrics that are sample means

        def load_task_or_group(self, task_list=None, task_type="chat"):
            try:
                loaded = super().load_task_or_group(task_list, task_type)
            except Exception as error:  # raised by the task's own code
                cause = error.last_attempt.exception() if isinstance(error, retried) else error
                text = f"lmms_eval cannot load '{options.task}': {type(cause).__name__}: {cause}"
                raise ConfigError(text) from error
            for output in subtasks(loaded):
                name, kind = output.task_name, output.task.OUTPUT_TYPE
                if kind != GENERATES:
                    raise ConfigError(f"the task '{name}' asks for `{kind}`; mmrl answers `{GENERATES}` only")
                how = output.task.aggregation()
                self.averaged[name] = {metric for metric in how if how[metric] is mean}
            return loaded

    manager = Tasks("WARNING", options.include_path or None, model_name="mmrl")
    for name in options.task.split(","):
        if name not in manager.all_tasks:
            hint = nearest(name, manager.all_tasks) or "`python -m lmms_eval tasks list` lists them"
            raise ConfigError(f"task: lmms_eval has no task '{name}'; {hint}")
    return manager


@cache
def model_class() -> type:
    """Create the model class, a subclass of lmms-eval's base class; requires lmms_eval."""
    base = importlib.import_module("lmms_eval.api.model").lmms
    instance = importlib.import_module("lmms_eval.api.instance")

    class Mmrl(base):
        """Model of lmms-eval that answers with the engine of a configuration of mmrl.

        Args:
            config: Configuration, run, checkpoint, model folder or hub id, as `mmrl evaluate` takes it.
            source: The same, already resolved.
            batch_size: Not read, like `max_batch_size` and `device`: the engine's own options count.
            overrides: Changes of the configuration, such as `policy.dtype`.
        """

        is_simple = False

        def __init__(
            self,
            config: str = "",
            source: ModelSource | None = None,
            batch_size: Any = None,
            max_batch_size: Any = None,
            device: Any = None,
            **overrides: Any,
        ) -> None:
            super().__init__()
            changes = [f"{name}={json.dumps(value)}" for name, value in overrides.items()]
            self.model = BenchmarkModel(source or resolve(config, changes))
            self.rows: dict[tuple[str, Any], Trajectory] = {}  # first rollout by task and document id

        def generate_until(self, requests):
            groups: dict[str, list[int]] = defaultdict(list)
            sampling = [sampling_of(request.args[2], f"task '{request.args[4]}'") for request in requests]
            for i, chosen in enumerate(sampling):
                groups[repr(chosen)].append(i)
            answers: dict[int, Any] = {}
            for members in groups.values():
                for at in range(0, len(members), CHUNK):
                    chunk = members[at : at + CHUNK]
                    make = [partial(self._prompt, requests[i].args) for i in chunk]
                    for i, row in zip(chunk, self.model.answer(*sampling[chunk[0]], make), strict=True):
                        self.rows.setdefault((requests[i].args[4], requests[i].args[3]), row)
                        tokens = instance.TokenCounts(output_tokens=row.length)
                        answers[i] = instance.GenerationResult(row.outcomes[-1].text, tokens)
                    advance("answering", len(answers), len(requests))
            return [answers[i] for i in range(len(requests))]

        def _prompt(self, args: Sequence[Any], read: ReadMedia) -> Prompt:
            _, messages, _, number, task, split = args
            return prompt_from(f"{task}/{number}", messages(self.task_dict[task][split][number]), read)

        def loglikelihood(self, requests):
            raise ConfigError(f"mmrl answers `{GENERATES}` only, not `loglikelihood`")

        def generate_until_multi_round(self, requests):
            raise ConfigError(f"mmrl answers `{GENERATES}` only, not `generate_until_multi_round`")

    return Mmrl


def manifest() -> Any:
    """Return the manifest by which lmms-eval's entry point `lmms_eval.models` finds the model `mmrl`."""
    registry = importlib.import_module("lmms_eval.models.registry_v2")
    return registry.ModelManifest("mmrl", chat_class_path=f"{__name__}.Mmrl")


def __getattr__(name: str) -> Any:
    """Return the model class by its name `Mmrl`, which lmms-eval looks up in this module."""
    if name == "Mmrl":
        return model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
