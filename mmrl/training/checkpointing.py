"""Saving a run and going on with it: the model folder, the state behind it, which checkpoints are kept."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmrl.config.loading import read
from mmrl.config.schema import Config, ConfigError, as_plain, as_yaml, parse
from mmrl.core.protocols import Stateful
from mmrl.reporting.model_card import essence, write_card
from mmrl.runtime import checkpoint
from mmrl.runtime.checkpoint import CheckpointError
from mmrl.runtime.content_hash import of_prompts, of_tensors, of_weights
from mmrl.runtime.files import LOCK, check_free, remove, write_whole
from mmrl.runtime.fsdp import gathered, taken_up, whole
from mmrl.runtime.hub import push
from mmrl.runtime.watchdog import ProcessFailed
from mmrl.training import nonfinite

if TYPE_CHECKING:
    from mmrl.runtime.distributed import Processes
    from mmrl.training.trainer import Run

CONFIG = "config.yaml"
T = TypeVar("T")


@dataclass
class Best:
    """The checkpoint where `metric_for_best_model` was best. Step 0 is none."""

    step: int = 0
    value: float = math.nan

    def see(self, step: int, value: float, greater_is_better: bool) -> None:
        """Compare a checkpoint with the best so far; the first of equals stays."""
        if math.isfinite(value) and (
            self.step == 0 or (value > self.value if greater_is_better else value < self.value)
        ):
            self.step, self.value = step, value


def save(run: Run, step: int) -> None:
    """Write `checkpoint-{step}`: a model folder that its library reads, and the state that makes the run go
    on exactly."""
    folder = run.folder / f"checkpoint-{step}"
    _see_best(run, step)
    state = whole(state_of(run, step), run.processes.world)
    with run.processes.agreeing(f"saving '{folder}'"), gathered(run.policy.module, run.processes.world):
        if run.processes.main:
            _write(run, step, state, folder)
            checkpoint.prune(run.folder, run.config.save_total_limit, step, keep=run.best.step)
    run.processes.wait()
    run.saved = step


def _write(run: Run, step: int, state: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint beside and give it its name; of one that cannot be written nothing is left."""
    from safetensors import SafetensorError

    beside = folder.with_name(f"{folder.name}.tmp")
    try:
        remove(beside)
        run.policy.save(beside / checkpoint.MODEL)
        write_card(run.config, step, run.reported, beside / checkpoint.MODEL)
        checkpoint.write_state(beside, state)
        for journal in (run.journal, run.warnings):
            journal.flush()
        checkpoint.publish(beside, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        before = [old.name for old in checkpoint.checkpoints(run.folder)]
        raise CheckpointError(
            f"cannot save '{folder}': {type(error).__name__}: {_line(error)}; mend that (room on the disk, "
            f"permissions), and the same command goes on from {before[0] if before else 'the beginning'}"
        ) from error


def _see_best(run: Run, step: int) -> None:
    name = run.config.metric_for_best_model
    if not name:
        return
    if name not in run.reported:
        near = difflib.get_close_matches(name, run.reported, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(run.reported))}"
        run.warn(f"'{name}' (metric_for_best_model) is not measured where checkpoints are written; {hint}")
        return
    run.best.see(step, run.reported[name], run.config.greater_is_better)


def state_of(run: Run, step: int) -> dict[str, Any]:
    """Give everything besides the model that has to survive."""
    return {
        "step": step,
        "inputs": run.inputs,
        "reported": run.reported,
        "optimizer": run.processes.state_of(run.optimizer),
        "references": {name: reference.state_dict() for name, reference in run.references.items()},
        "pieces": {place: thing.state_dict() for place, thing in _stateful(run).items()},
        "best": {"step": run.best.step, "value": run.best.value},
        "guard": {**nonfinite.state_of(run.guard), "micro_batch_steps": run.micro_batch_steps},
    }


def _stateful(run: Run) -> dict[str, Stateful]:
    return {
        place: thing
        for place, thing in run.pieces.made.items()
        if isinstance(thing, Stateful) and not place.startswith("references.")
    }


def resume(run: Run) -> int:
    """Prepare the output folder, take up the last whole checkpoint in it, and give the step to go on with."""
    with run.processes.agreeing("opening the output folder"):
        if run.processes.main:
            _open_folder(run)
    run.processes.wait()
    run.inputs = _read_inputs(run)
    plain = json.dumps(as_plain(run.config), sort_keys=True, default=str)
    named = hashlib.sha256(plain.encode()).hexdigest()[:16]
    run.processes.same({"configuration": named, **run.inputs, "weights to begin with": run.begun})
    start = _take_up(run)
    run.saved = start
    if run.processes.main:
        run.journal.rewind(start)
        run.records = [run.heard(record) for record in run.journal.read()]
        run.warnings.rewind(start)
        run.raised = [one["text"] for one in run.warnings.read()]
        run.trackers.open(run.folder, as_plain(run.config), start, run.console.say)
    run.console.begin(start, run.records[0] if run.records else None)
    return start


def _take_up(run: Run) -> int:
    """Take up the latest checkpoint that is whole and fits, as process 0 sees it; 0 where there is none at
    all."""
    refused: list[str] = []
    processes = run.processes
    seen = [folder.name for folder in checkpoint.checkpoints(run.folder)] if processes.main else []
    for folder in (run.folder / name for name in processes.tell(seen)[0]):
        try:
            state, written = _as_one(processes, partial(_read_state, run, folder))
            processes.same({f"state in '{folder}'": written})
            processes.same(_as_one(processes, partial(_load, run, state, folder)))
        except CheckpointError as error:
            refused.append(error.args[0])
            run.console.say(f"{error.args[0]}; looking at the one before")
            continue
        _check_inputs(run, state, folder)
        run.console.say(f"going on from {folder}")
        return state["step"]
    with gathered(run.policy.module, run.processes.world):
        _name_weights(run)
    if refused:  # what was learned is not thrown away because a disk cannot be read for a moment
        raise CheckpointError(
            f"none of the {len(refused)} checkpoints of '{run.folder}' can be used, and nothing was changed: "
            f"{'; '.join(refused)}. Mend that and start again, name another output_dir, or set "
            "overwrite_output_dir=true to throw what is there away"
        )
    return 0


def _as_one(processes: Processes, work: Callable[[], T]) -> T:
    """Do a part of taking up a checkpoint on every process. Where process 0 cannot use it none does; where
    another one cannot, all fail."""
    error, result = None, None
    try:
        result = work()
    except CheckpointError as raised:
        error = raised
    except ProcessFailed:  # another process has the reason
        processes.known = False
    told = processes.tell(None if error is None else error.args[0])
    if told[0] is not None:
        raise CheckpointError(told[0]) from error
    failed = [rank for rank, one in enumerate(told) if one is not None]
    if failed:
        processes.disagree(failed, f"cannot take up what process 0 can: {told[failed[0]]}")
    return result


def _check_inputs(run: Run, state: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with other data, or over another base model."""
    then = state.get("inputs", {})
    if not then:
        run.warn(f"'{folder}' does not tell what it was trained on, so that cannot be compared")
    for name in run.inputs:
        if name in then and then[name] != run.inputs[name]:
            raise ConfigError(
                f"the {name} of the run changed since '{folder}' was written: {then[name]} then, "
                f"{run.inputs[name]} now; put back what was there, or name another output_dir, or set "
                "overwrite_output_dir=true to throw the run away"
            )


def _read_inputs(run: Run) -> dict[str, str]:
    """Name the prompts of the run and of its evaluation by their content."""
    read = of_prompts(run.pieces.made["data"])
    if run.evaluator:
        read |= {f"{name} of the evaluation": its for name, its in of_prompts(run.evaluator.data).items()}
    return read


def _name_weights(run: Run) -> str:
    """Name the weights that learn, whole as they are for the moment, and note the others: those that
    checkpoints hold were just loaded, so where they differ the base model does."""
    learned = [p for p in run.policy.module.parameters() if p.requires_grad]
    # Buffers may move in training.
    base = of_weights(run.policy, [*learned, *run.policy.module.buffers()])
    run.inputs["base model"] = f"frozen weights {base[:16]}" if base else "no frozen weights"
    return of_tensors(learned) if run.processes.world > 1 else ""


def _read_state(run: Run, folder: Path) -> tuple[dict[str, Any], str]:
    """Read the state of a checkpoint, and name its content."""
    state = checkpoint.read_state(folder)
    _check_fit(run, state, folder)
    return state, hashlib.sha256((folder / checkpoint.STATE).read_bytes()).hexdigest()[:16]


def _check_fit(run: Run, state: Mapping[str, Any], folder: Path) -> None:
    """Refuse the checkpoint of another run before anything of it is taken up."""
    for what, wanted in (("references", run.references), ("pieces", _stateful(run))):
        found = state.get(what, {})
        missing, foreign = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        if missing or foreign:
            raise CheckpointError(
                f"'{folder}' is a checkpoint of another run: of {what} it lacks {missing or 'nothing'} and "
                f"has {foreign or 'nothing'} that this run does not"
            )


def _load(run: Run, state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Take a checkpoint up, and give what has to be the same on every process."""
    world = run.processes.world
    try:
        with gathered(run.policy.module, world, changed=True), run.processes.agreeing(f"loading '{folder}'"):
            run.policy.load(folder / checkpoint.MODEL)
            learned = _name_weights(run)
        run.processes.take_up(run.optimizer, state["optimizer"], run.trained)
        for name, reference in run.references.items():
            reference.load_state_dict(taken_up(state["references"][name], run.trained, world))
        for place, thing in _stateful(run).items():
            thing.load_state_dict(state["pieces"][place])
        run.reported = state["reported"]
        run.best.step, run.best.value = state["best"]["step"], state["best"]["value"]
        run.guard.skipped, run.guard.halved = state["guard"]["skipped"], state["guard"]["halved"]
        run.micro_batch_steps = state["guard"]["micro_batch_steps"]
        return {"step": state["step"], "weights taken up": learned, "base model": run.inputs["base model"]}
    except ProcessFailed:
        raise
    except (KeyError, ValueError, RuntimeError, TypeError, OSError) as error:
        raise CheckpointError(
            f"'{folder}' does not fit this run: {type(error).__name__}: {_line(error)[:300]}"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def hand_over(run: Run, measured: Mapping[str, float]) -> None:
    """Write what was measured at last into the card of the last checkpoint, name the best, and upload."""
    last = run.folder / f"checkpoint-{run.saved}"
    if last.is_dir():
        write_card(run.config, run.saved, {**run.reported, **measured}, last / checkpoint.MODEL)
    if run.best.step:
        name = run.config.metric_for_best_model
        run.console.say(f"best {name}: {run.best.value:.4g} at checkpoint-{run.best.step}")
    step = run.best.step or run.saved
    if run.config.push_to_hub:
        folder = run.folder / f"checkpoint-{step}" / checkpoint.MODEL
        run.console.say(f"uploaded: {push(run.config, folder, step)}")


# ---- the folder


def look(config: Config) -> None:
    """Refuse an output folder that is in use, or holds another run, before anything is loaded."""
    folder = Path(config.output_dir)
    check_free(folder)
    if not config.overwrite_output_dir:
        _check_same(config, folder)


def _check_same(config: Config, folder: Path) -> None:
    written = folder / CONFIG
    if written.exists() and essence(_read(written)) != essence(as_plain(config)):
        raise ConfigError(
            f"'{folder}' holds a run with another configuration (see its {CONFIG}); name another output_dir, "
            "or set overwrite_output_dir=true to throw that run away"
        )


def _open_folder(run: Run) -> None:
    written = run.folder / CONFIG
    if run.config.overwrite_output_dir:
        _empty(run.folder)
    checkpoint.tidy(run.folder)
    _check_same(run.config, run.folder)
    text = as_yaml(run.config)
    if not written.exists() or written.read_text(encoding="utf-8") != text:
        write_whole(written, text)


def _empty(folder: Path) -> None:
    """Throw a run away; its configuration goes last, so that the rest is still known to be a run where this
    process is killed meanwhile."""
    inside = {path.name: path for path in folder.iterdir() if path.name != LOCK} if folder.exists() else {}
    written = inside.pop(CONFIG, None)
    if inside and written is None:
        raise ConfigError(
            f"'{folder}' holds files but no run (it has no {CONFIG}), so it is not overwritten; name another "
            "output_dir"
        )
    for path in [*inside.values(), *([written] if written else [])]:
        remove(path)


def _read(written: Path) -> dict[str, Any]:
    """Read a configuration, with the defaults of keys that did not exist when it was written."""
    last = dataclasses.fields(Config)[-1].name
    try:
        raw = read(written)
        if last not in raw:
            raise ConfigError(f"it ends before '{last}'")
    except ConfigError as error:
        raise ConfigError(
            f"'{written}' is broken, so it is unknown which run is there: {_line(error)[:200]}. "
            "If it is this run, remove that file and start it again: it goes on from its last checkpoint; "
            "else name another output_dir"
        ) from error
    try:
        return as_plain(parse(raw, Config))
    except ConfigError:
        return raw
