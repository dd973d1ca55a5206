"""Saving and resuming of training runs: model folders, the trainer's state, the output folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.config.changes import BEST, MAY_CHANGE, UNTOLD, describe, differences, inside, may_change
from mmrl.config.loading import read
from mmrl.config.schema import Config, ConfigError, as_plain, as_yaml, parse
from mmrl.reporting.metrics import Journal, describe_measured
from mmrl.reporting.model_card import write_card
from mmrl.runtime import checkpoint
from mmrl.runtime.checkpoint import CheckpointError
from mmrl.runtime.content_hash import of_prompts, of_tensors
from mmrl.runtime.files import check_free, one_line, push, remove, write_whole
from mmrl.runtime.folders import MARK, check_owner, content, mark, mark_of
from mmrl.runtime.fsdp import gathered, whole
from mmrl.runtime.machine import describe_machine
from mmrl.runtime.stages import check_alone
from mmrl.runtime.watchdog import ProcessFailed
from mmrl.training.beginning import begin_from, together
from mmrl.training.record import Changes, changed_code, changed_defaults, changed_versions, name_of, record_of
from mmrl.training.trainer import Best, Run
from mmrl.training.unreadable import FILE, taken_out

CONFIG = "config.yaml"
CHANGES = "changes.jsonl"  # configuration keys that changed between resumes; never truncated
# Files and folders that a run writes, besides checkpoints.
WRITES = (
    CONFIG, CHANGES, "metrics.jsonl", "warnings.jsonl", "completions", "predictions", "evaluation.json",
    "report.html", "stages.json", FILE,
)  # fmt: skip

# ---- saving


def save(run: Run) -> None:
    """Write `checkpoint-{step}`: the model in its library's format, and the state for resuming."""
    folder = run.folder / f"checkpoint-{run.progress.step}"
    run.rank_checkpoint()  # first, because the saved state names the best checkpoint
    run.signal.compare(of_tensors(run.learner.trained), run.progress.step)
    state = whole(run.state_dict())  # gathered on process 0; every process takes part
    limit, best = run.config.save_total_limit, run.progress.best.step
    with run.processes.fail_together(f"saving '{folder}'"), run.whole_weights():
        if run.processes.main:
            _write(run, state, folder)
            checkpoint.prune(run.folder, limit, run.progress.step, best, run.report.warn)


def _write(run: Run, state: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint under a temporary name and rename it; remove it if writing fails."""
    from safetensors import SafetensorError

    unfinished = folder.with_name(f"{folder.name}.tmp")
    model, progress = unfinished / checkpoint.MODEL, run.progress
    try:
        remove(unfinished)
        run.policy.save(model)
        for second in run.seconds.values():
            second.save(unfinished)
        write_card(run.config, progress.step, progress.reported, model)
        mark(unfinished, "train", **run.made_with)
        checkpoint.write_state(unfinished, state)
        for journal in (run.journal, run.report.warnings):
            journal.flush()  # before `publish`: a resume needs all earlier metrics
        checkpoint.publish(unfinished, folder, run.report.warn)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        before = [old.name for old in checkpoint.finished(run.folder)]
        raise CheckpointError(
            f"cannot save '{folder}': {one_line(error)}; mend that (room on the disk, permissions), and "
            f"the same command goes on from {before[0] if before else 'the beginning'}"
        ) from error


def write_model(run: Run, folder: Path) -> None:
    """Write the current model and its model card to a folder, in the format of its library."""
    with run.processes.fail_together(f"writing '{folder}'"), gathered(run.policy.module):
        if run.processes.main:
            run.policy.save(folder)
            write_card(run.config, run.progress.step, run.progress.reported, folder)


def publish(run: Run) -> None:
    """Update the last model card; print the best checkpoint; with `push_to_hub` upload it, or the last."""
    if not run.processes.main:
        return
    config, progress, say = run.config, run.progress, run.report.console.say
    measured = describe_measured(run.final) if run.final else {}
    last = run.folder / f"checkpoint-{progress.step}"
    if last.is_dir():
        write_card(config, progress.step, {**progress.reported, **measured}, last / checkpoint.MODEL)
    best = progress.best
    if best.step:
        say(f"best {config.metric_for_best_model}: {best.value:.4g} at checkpoint-{best.step}")
    step = best.step or progress.step
    if config.push_to_hub:
        say(f"uploaded: {push(config, run.folder / f'checkpoint-{step}' / checkpoint.MODEL, step)}")


# ---- resuming

OF_EVALUATION = " of the evaluation"
OF_DATA = ("prompts", "media")  # keys of the hashes that `of_prompts` returns


def resume(run: Run) -> int:
    """Prepare the output folder, load its last complete checkpoint, and return the next step."""
    processes = run.processes
    changed: Changes = {}
    text = as_yaml(run.config) if processes.main else ""
    with processes.fail_together("opening the output folder"):
        if processes.main:
            changed, run.made_with = _open_folder(run, text)
    changed, run.made_with = processes.all_gather_object([changed, run.made_with])[0]
    run.progress.inputs = inputs = of_prompts(run.pieces.made["data"])
    if run.evaluator:
        hashes = of_prompts(run.evaluator.data)
        inputs |= {f"{name}{OF_EVALUATION}": value for name, value in hashes.items()}
    plain = json.dumps(as_plain(run.config), sort_keys=True, default=str)
    configuration = hashlib.sha256(plain.encode()).hexdigest()[:16]
    processes.assert_equal(
        {"configuration": configuration, **inputs, "weights to begin with": processes.placed}
    )
    start = _load_latest(run, changed)
    if processes.main:
        _record(run, changed, start, text)
        # A run that was killed right after its last checkpoint has not yet pruned older checkpoints.
        limit, best = run.config.save_total_limit, run.progress.best.step
        checkpoint.prune(run.folder, limit, start, best, run.report.warn)
    run.report.begin(start)
    return start


def _record(run: Run, changed: Changes, start: int, text: str) -> None:
    """Record changed keys in `changes.jsonl`, then write the current configuration, whose YAML is `text`."""
    for key, (old, new) in changed.items():
        if not inside(key, *UNTOLD):
            Journal(run.folder, CHANGES).write({"step": start, "key": key, "old": old, "new": new})
            run.report.console.say(f"from step {start} on: {describe({key: (old, new)}, 'before', 'now')}")
    written = run.folder / CONFIG
    if written.read_text(encoding="utf-8") != text:
        write_whole(written, text)


def _load_latest(run: Run, changed: Changes) -> int:
    """Load the latest checkpoint that process 0 can use; return its step, or 0 without a checkpoint."""
    refused: list[str] = []
    processes, say = run.processes, run.report.console.say
    seen = [folder.name for folder in checkpoint.checkpoints(run.folder)] if processes.main else []
    for folder in (run.folder / name for name in processes.all_gather_object(seen)[0]):
        try:
            state, digest = together(processes, partial(_read_state, run, folder, changed))
            processes.assert_equal({f"state in '{folder}'": digest})
            processes.assert_equal(together(processes, partial(_load, run, state, folder)))
        except CheckpointError as error:
            refused.append(error.args[0])
            say(f"{error.args[0]}; looking at the one before")
            continue
        then = state.get("inputs", {})
        if not then:
            run.report.warn(f"'{folder}' does not record what it was trained on, so that cannot be compared")
        gone = taken_out(run.folder, run.pieces.made["data"])
        if gone:
            run.report.warn(
                f"{len(gone)} prompts that could not be read are no longer in the data: {', '.join(gone)}"
            )
        for name, now in run.progress.inputs.items():
            measured_anew = name.endswith(OF_EVALUATION) and any(inside(key, "evaluation") for key in changed)
            if then.get(name, now) != now and not (measured_anew or gone and name in OF_DATA):
                raise ConfigError(
                    f"the {name} of the run changed since '{folder}' was written: {then[name]} then, {now} "
                    "now; put back what was there, or name another output_dir, or set "
                    "overwrite_output_dir=true to throw the run away"
                )
        say(f"going on from {folder}")
        return state["step"]
    run.name_weights()  # stores the weight hashes that a later resume compares
    if refused:  # a disk may be unreadable for a moment: raise instead of training from scratch
        raise CheckpointError(
            f"none of the {len(refused)} checkpoints of '{run.folder}' can be used, and nothing was changed: "
            f"{'; '.join(refused)}. Mend that and start again, name another output_dir, or set "
            "overwrite_output_dir=true to throw what is there away"
        )
    if run.config.init_from:
        begin_from(run, checkpoint.model_folder(run.config.init_from))
    return 0


def _read_state(run: Run, folder: Path, changed: Changes) -> tuple[dict[str, Any], str]:
    """Read a checkpoint's state, and hash its JSON file; reset the state that depends on changed keys."""
    state = checkpoint.read_state(folder)
    if not checkpoint.of_run(folder):
        raise CheckpointError(f"'{folder}' is a checkpoint of another run")
    _start_afresh(run, state, changed)
    for what, wanted in run.stateful.items():
        names = set(state.get(what, {}))
        missing, foreign = sorted(set(wanted) - names), sorted(names - set(wanted))
        if missing or foreign:
            raise CheckpointError(
                f"'{folder}' is a checkpoint of another run: of {what} it lacks {missing or 'nothing'} and "
                f"has {foreign or 'nothing'} that this run does not"
            )
    return state, hashlib.sha256((folder / checkpoint.STATE).read_bytes()).hexdigest()[:16]


def _start_afresh(run: Run, state: dict[str, Any], changed: Changes) -> None:
    """Reset the state that depends on changed configuration keys: schedules, checks, best checkpoint."""
    pieces, now = state.get("pieces", {}), run.stateful["pieces"]
    for place in {*pieces, *now}:
        if inside(place, *MAY_CHANGE) and any(inside(key, place) or inside(place, key) for key in changed):
            pieces.pop(place, None)
            if place in now:
                pieces[place] = now[place].state_dict()
    if any(inside(key, *BEST) for key in changed):
        state["best"] = dataclasses.asdict(Best())
    if "learn.micro_batch_steps" in changed:
        state["guard"] |= {"halved": False, "micro_batch_steps": run.config.learn.micro_batch_steps}


def _load(run: Run, state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Load a checkpoint; return its step and hashes, which the caller compares between processes."""
    loading = run.processes.fail_together(f"loading '{folder}'")
    try:
        with run.whole_weights(changed=True) as loads, loading:
            if loads:
                run.policy.load(folder / checkpoint.MODEL)
                for second in run.seconds.values():
                    second.load(folder)
        trained = run.name_weights()
        run.load_state_dict(state)
    except ProcessFailed:  # a RuntimeError, but another process failed, not the checkpoint
        raise
    except (KeyError, ValueError, RuntimeError, TypeError, OSError) as error:
        raise CheckpointError(f"'{folder}' does not fit this run: {one_line(error, 300)}") from error
    base = run.progress.inputs["base model"]
    return {"step": state["step"], "weights taken up": trained, "base model": base}


# ---- the output folder


def check_output_folder(config: Config) -> None:
    """Raise `ConfigError` if the output folder is in use or has another run, before anything is loaded."""
    folder = Path(config.output_dir)
    _check_folder(config, folder)
    check_free(folder)
    check_alone(folder)
    if not config.overwrite_output_dir:
        _changes(config, folder, record_of(config), lambda text: None)
    if config.init_from and (config.overwrite_output_dir or not _begun(folder)):
        start = checkpoint.model_folder(config.init_from)
        if config.carry and not (start.parent / checkpoint.STATE).is_file():
            raise ConfigError(
                f"'carry' names {', '.join(config.carry)}, but '{config.init_from}' (init_from) has weights "
                "alone; name a run or a checkpoint of one"
            )
        if config.overwrite_output_dir and start.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"'init_from' is in '{folder}', which overwrite_output_dir=true empties; name another "
                "output_dir"
            )


def _check_folder(config: Config, folder: Path) -> None:
    """Raise `ConfigError` if a run must not write into a folder, or must not overwrite its content."""
    numbered = [path.name for path in checkpoint.checkpoints(folder)]
    owner = check_owner(folder, "train", [*WRITES, *numbered])
    unnumbered = (path for path in content(folder) if path.name not in numbered)
    others = [*numbered, *(path for path in unnumbered if mark_of(path).get("by") != "evaluate")]
    if config.overwrite_output_dir and others and not owner:
        raise ConfigError(
            f"'{folder}' holds files but no run (it has no {CONFIG}), so it is not overwritten; name another "
            "output_dir"
        )


def _open_folder(run: Run, text: str) -> tuple[Changes, dict[str, Any]]:
    """Prepare the output folder of a run; empty it if `overwrite_output_dir` is on.

    Args:
        text: The configuration of the run as YAML.

    Returns the keys that changed since the run began, and the record of the run.
    """
    folder, written = run.folder, run.folder / CONFIG
    _check_folder(run.config, folder)
    if run.config.overwrite_output_dir:
        # Remove the configuration and the marker file last: a killed removal leaves a recognisable run.
        for path in (*(path for path in content(folder) if path != written), written, folder / MARK):
            remove(path)
    record, begun = record_of(run.config), _begun(folder)
    saved = _known(folder) if begun else {"run": name_of(record)}
    changed = _changes(run.config, folder, record, run.report.warn)
    # Remove the files of a run that failed before its first step.
    for name in () if begun else ("completions", "warnings.jsonl", CHANGES):
        remove(folder / name)
    checkpoint.tidy(folder, run.report.warn)
    if not (begun and written.exists()):
        write_whole(written, text)
    record["run"] = saved.get("run", "")  # earlier versions did not write it
    mark(folder, "train", **record, machine=describe_machine())
    return changed, record


def _known(folder: Path) -> dict[str, Any]:
    """Read the record of a run from its output folder, or else from its last checkpoint."""
    record = mark_of(folder)
    if "run" not in record and (latest := checkpoint.finished(folder)):
        return mark_of(latest[0])
    return record


def _begun(folder: Path) -> bool:
    """Whether a folder's run has finished a step: it has a checkpoint or a line of metrics."""
    journal = Journal(folder).path
    return bool(checkpoint.checkpoints(folder)) or (journal.exists() and journal.stat().st_size > 0)


def _changes(config: Config, folder: Path, record: Mapping[str, Any], warn: Callable[[str], None]) -> Changes:
    """List the configuration keys that changed since the run in a folder began, with old and new values.

    Raises `ConfigError` if a key or the code of a piece must not change, or the written configuration is
    broken. `warn` gets a message if package versions changed. Returns {} if the run finished no step.
    """
    if not _begun(folder):
        return {}
    saved, changed = _known(folder), _changed_keys(config, folder / CONFIG)
    if "config" not in saved:  # the record of an earlier version
        return _check_fixed(folder, changed)
    changed = changed_defaults(saved, record, changed)
    free, fixed, explained = changed_code(saved, record)
    _check_fixed(folder, changed)
    if fixed:
        raise ConfigError(
            f"'{folder}' holds a run that was begun with other code of {', '.join(fixed)}; put that back, "
            f"name another output_dir, with init_from={folder} to go on from its weights with the code as it "
            "is now, or set overwrite_output_dir=true to throw that run away"
        )
    then, now = changed_versions(saved, record)
    if then or now:
        code = f"; the code of {', '.join(explained)} is another one" if explained else ""
        warn(
            f"'{folder}' was trained so far with {then or 'less'}, and goes on with {now or 'less'}: numbers "
            f"may differ from those of one version{code}"
        )
    return {**changed, **free}


def _check_fixed(folder: Path, changes: Changes) -> Changes:
    """Return the changed keys; raise `ConfigError` if one of them must not change."""
    fixed = {key: both for key, both in changes.items() if not may_change(key)}
    if fixed:
        raise ConfigError(
            f"'{folder}' holds a run with another configuration: {describe(fixed, 'there', 'here')}; name "
            f"another output_dir, with init_from={folder} to begin from its weights, or set "
            "overwrite_output_dir=true to throw that run away"
        )
    return changes


def _changed_keys(config: Config, written: Path) -> Changes:
    """List the differences between a configuration and the file that was written when the run began."""
    if not written.exists():
        return {}
    last = dataclasses.fields(Config)[-1].name
    try:
        raw = read(written)
        if last not in raw:
            raise ConfigError(f"it ends before '{last}'")
    except ConfigError as error:
        fault = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"'{written}' is broken, so it is unknown which run is there: {fault}. If it is this run, remove "
            "that file and start it again: it goes on from its last checkpoint; else name another output_dir"
        ) from error
    with suppress(ConfigError):  # new keys get their defaults
        raw = as_plain(parse(raw, Config))
    return differences(raw, as_plain(config))
