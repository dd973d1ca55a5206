"""Training of the stages of a run file in order; resumes where the last command stopped.

A stage is an ordinary run in its own folder. It starts from the checkpoint of an earlier stage, which is read
from disk even if the same process trained it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mmrl.config.loading import ConfigError, read
from mmrl.config.schema import Config, as_plain, convert
from mmrl.config.stages import Stage, on_each
from mmrl.core.reward_table import Measured
from mmrl.reporting.console import Console
from mmrl.reporting.metrics import describe_measured
from mmrl.runtime.checkpoint import checkpoints
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import check_free, locked, remove
from mmrl.runtime.folders import check_owner
from mmrl.runtime.stages import RECORD, StageRecord, begun, read_stages, write_stages
from mmrl.training.checkpointing import CONFIG, check_output_folder
from mmrl.training.loop import train
from mmrl.training.trainer import Run

MACHINE = ("seconds_per_prompt", "memory_bytes")  # suffixes of metrics that depend on the machine
LENGTH = ("max_steps", "num_train_epochs", "until")  # configuration keys that determine the length of a stage


def train_stages(
    stages: Sequence[Stage], build: Callable[[Config], Run], *, quiet: bool = False
) -> Measured | None:
    """Train every unfinished stage; return the last stage's evaluation, or None after a stop.

    Args:
        stages: The stages of a run file, checked by `check_stage_folders`.
        build: Builds a run from a configuration.
        quiet: Print nothing between the stages.
    """
    home, final = stages[0].folder.parent, None
    processes = Processes(stages[0].config.ddp_timeout)
    console = Console(home.name, 0, quiet or not processes.main)
    with locked(home, processes):
        records = _open(stages, processes)
        for i, stage in enumerate(stages):
            if records[i].checkpoint:
                continue
            console.say(f"stage {i + 1} of {len(stages)}: {stage.name}")
            run = build(_ready(stage, stages, records))
            if not train(run):
                console.say(f"stopped in stage {stage.name}; the same command goes on from here")
                return None
            (record,) = _told([_finished(stage, run)], processes)
            refused = _refused(stage, record, records, console)
            records[i] = record if not refused else records[i]
            with processes.fail_together(f"writing '{home / RECORD}'"):
                if processes.main:
                    write_stages(home, records)
                    write_report(home)
            if refused:
                raise StageRefused(refused)
            final = run.final if processes.main else None
            del run  # the next stage needs its memory
            gc.collect()
            torch.cuda.empty_cache()
    console.say(f"all {len(stages)} stages are finished; report: {home / 'report.html'}")
    return final


class StageRefused(RuntimeError):
    """Raised if the evaluation of a trained stage fails its `keep_if`, so that no stage may start from it."""


def _refused(stage: Stage, record: StageRecord, records: Sequence[StageRecord], console: Console) -> str:
    """Return why `keep_if` refuses a stage, "" if it passes; print the metrics of all stages.

    A refused stage stays unfinished in the stage record, so the same command evaluates it again.
    """
    before = records[stage.begins].metrics if stage.begins is not None else {}
    reasons = [reason for gate in stage.keep_if if (reason := gate.refusal(record.metrics, before))]
    if not reasons:
        return ""
    for one in (*(one for one in records if one.checkpoint), record):
        numbers = ", ".join(f"{gate.of} {one.metrics.get(gate.of, math.nan):.6g}" for gate in stage.keep_if)
        console.say(f"  {one.folder}: {numbers}")
    return (
        f"stage '{stage.name}' is not kept, and the stages after it do not begin: {'; '.join(reasons)}. "
        f"Change keep_if, or change the stage and remove '{stage.folder}'; stages before it stay as they are"
    )


def write_report(home: Path, output: Path | None = None) -> Path:
    """Write a page that compares all started stages."""
    from mmrl.reporting.html import write_comparison

    return write_comparison(begun(home), output or home / "report.html", stages=True)


def check_stage_folders(stages: Sequence[Stage]) -> None:
    """Raise `ConfigError` if a stage cannot start or resume in its folder, before anything is loaded."""
    home = stages[0].folder.parent
    check_owner(home, "train", [RECORD])
    check_free(home)
    if (home / CONFIG).exists():
        raise ConfigError(f"'{home}' holds a run that is no stage; name another output_dir")
    records = _records(stages)

    def check(i: int) -> None:
        stage = stages[i]
        start = None if stage.begins is None else records[stage.begins]
        if start is None or start.checkpoint:
            check_output_folder(_ready(stage, stages, records))

    on_each([stage.place for stage in stages], check)


def _open(stages: Sequence[Stage], processes: Processes) -> list[StageRecord]:
    """Write the record of the stages on process 0, and return it on every process."""
    home, records = stages[0].folder.parent, []
    with processes.fail_together(f"opening '{home}'"):
        if processes.main:
            records = _records(stages)
            if stages[0].config.overwrite_output_dir:  # remove folders before writing the record
                for record in read_stages(home):
                    remove(home / record.folder)
            write_stages(home, records)
    return _told(records, processes)


def _told(records: Sequence[StageRecord], processes: Processes) -> list[StageRecord]:
    """Broadcast the stage records of process 0 to every process."""
    shared = processes.all_gather_object([asdict(record) for record in records])[0]
    return [convert(record, StageRecord, RECORD) for record in shared]


def _ready(stage: Stage, stages: Sequence[Stage], records: Sequence[StageRecord]) -> Config:
    """Return the configuration of a stage, with `init_from` set to the checkpoint that it starts from."""
    if stage.begins is None:
        return stage.config
    start = stages[stage.begins].folder / records[stage.begins].checkpoint
    if checkpoints(stage.folder) and (stage.folder / CONFIG).exists():
        before = Path(read(stage.folder / CONFIG).get("init_from") or "")
        if before.parts[-2:] == start.parts[-2:]:  # same checkpoint, moved since
            start = before
    return replace(stage.config, init_from=str(start))


def _length(stage: Stage) -> dict[str, Any]:
    plain = as_plain(stage.config)
    return {key: plain[key] for key in LENGTH}


def _finished(stage: Stage, run: Run) -> StageRecord:
    """Create the record of a finished stage, with its best checkpoint if one was chosen."""
    best, taken = run.progress.best, run.progress.step
    metrics = describe_measured(run.final) if run.final else {}
    if best.step:  # not the final evaluation, which measured later weights
        metrics = {stage.config.metric_for_best_model: best.value}
    metrics = {k: v for k, v in metrics.items() if math.isfinite(v) and not k.endswith(MACHINE)}
    folder, checkpoint = stage.folder.name, f"checkpoint-{best.step or taken}"
    return StageRecord(stage.name, folder, checkpoint, taken, _length(stage), metrics)


def _records(stages: Sequence[Stage]) -> list[StageRecord]:
    """Match the stages with the saved records in their folder; return one record per stage.

    A stage whose length changed counts as unfinished. Raises `ConfigError` if the folder has other stages, or
    a stage that started from a checkpoint that is missing or will change.
    """
    home = stages[0].folder.parent
    fresh = [StageRecord(stage.name, stage.folder.name) for stage in stages]
    if stages[0].config.overwrite_output_dir:
        return fresh
    before = read_stages(home)
    began = {folder.name for folder in begun(home)}
    for i, record in enumerate(before):
        if record.folder in began and (i >= len(stages) or record.folder != fresh[i].folder):
            raise ConfigError(
                f"'{home}' holds '{record.folder}' as stage {i + 1}, and the file has "
                f"{repr(fresh[i].folder) if i < len(stages) else 'no such stage'}; name another output_dir, "
                "or set overwrite_output_dir=true to throw all stages there away"
            )
    matched = []
    for i, stage in enumerate(stages):
        saved = before[i] if i < len(before) else fresh[i]
        whole = saved.checkpoint and (stage.folder / saved.checkpoint).is_dir()
        matched.append(saved if whole and dict(saved.length) == _length(stage) else fresh[i])
    for stage in stages:
        start = stage.begins
        if start is not None and stage.folder.name in began and not matched[start].checkpoint:
            raise ConfigError(
                f"'{stage.folder}' began from '{stages[start].folder}', which is not as it was then: its "
                f"checkpoint is gone, or one of {', '.join(LENGTH)} changed; put that back, remove "
                f"'{stage.folder}', or set overwrite_output_dir=true to throw all stages there away"
            )
    return matched
