"""Stages: a run file with several runs, each of which continues from the model of an earlier run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from mmrl.config.evaluation import evaluation_of
from mmrl.config.gates import Gate, gates_of
from mmrl.config.loading import SHORTHANDS, ConfigError, change, merge, read
from mmrl.config.plain import lookup
from mmrl.config.schema import Config, convert, load

REFUSED = ("output_dir", "overwrite_output_dir", "stages")  # keys that only the whole file may have
T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """One run of a file; a file without `stages` is one stage without a name.

    Args:
        config: The configuration of the run, with an output folder of its own.
        name: Name in the file, or else the number of the stage from 1.
        place: Position in the file, such as `stages[1]`.
        begins: Index of the stage whose model this run continues from; None: the run starts from
            `policy.model`, or from the folder in `config.init_from`.
        keep_if: Conditions on the run's last evaluation that must hold before another stage starts.
    """

    config: Config
    name: str = ""
    place: str = ""
    begins: int | None = None
    keep_if: tuple[Gate, ...] = ()

    @property
    def folder(self) -> Path:
        """The output folder of the run."""
        return Path(self.config.output_dir)


def load_stages(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> list[Stage]:
    """Read and check the stages of a run file; a stage merges its changes over the rest of the file.

    The override `max_steps=5` changes all stages; `stages.1.max_steps=5` or `stages.NAME.max_steps=5` changes
    one. Defaults of a stage after the first: `init_from` is the stage before, `init_references` is true, and
    `stage`, a part of all random seeds, is its index, so that it draws other prompts and noise. A stage that
    keeps the sampler of the stage before (`carry`) also keeps its `stage`.

    Raises:
        ConfigError: A stage is not a valid run; the error names the stage.
    """
    try:
        raw = read(source, [text for text in overrides if text.startswith("stages=")])
        listed = raw.pop("stages", None)
        if listed:
            return _stages(raw, listed, [text for text in overrides if not text.startswith("stages=")])
    except ConfigError as error:
        at = "" if isinstance(source, Mapping) else f"{source}: "
        raise ConfigError(f"{at}{error}") from error
    return [Stage(load(source, overrides))]


def on_each(places: Sequence[str], work: Callable[[int], T]) -> list[T]:
    """Call a function with each stage's index; errors name the stage, unless all raise the same one."""
    results: list[T] = []
    errors: dict[int, ConfigError] = {}
    for i in range(len(places)):
        try:
            results.append(work(i))
        except ConfigError as error:
            errors[i] = error
    if not errors:
        return results
    first, error = next(iter(errors.items()))
    if len({str(error) for error in errors.values()}) == 1 and len(errors) == len(places):
        raise error  # all stages raise it, so a key that they share is wrong
    raise ConfigError(_at(places[first], str(error))) from error


def _at(place: str, text: str) -> str:
    """Prefix the key at the start of an error (or else the whole text) with a stage's path, `stages[1]`."""
    keys = "|".join(field.name for field in fields(Config))
    longer = re.sub(rf"^('?)({keys})\b", rf"\1{place}.\2", text)
    return longer if longer != text else f"{place}: {text}"


def _stages(raw: dict[str, Any], listed: Any, overrides: Sequence[str]) -> list[Stage]:
    """Create the stages from their list in the file, the rest of the file (`raw`) and the overrides."""
    listed = [dict(stage) for stage in convert(listed, list[dict[str, Any]], "stages")]
    names = _names(listed)
    places = [f"stages[{i}]" for i in range(len(names))]
    common, own = _parted(overrides, names)
    gates = on_each(places, lambda i: _gates(listed[i], own[i], f"{places[i]}.keep_if"))
    whole = on_each(places, lambda i: change(_over(raw, listed[i], common), own[i]))
    top = change(raw, common)
    home = Path(str(top.get("output_dir") or Config.output_dir))
    begins = [
        _complete(whole[: i + 1], names, {*listed[i], *(text.partition("=")[0] for text in own[i])})
        for i in range(len(names))
    ]
    for i, stage in enumerate(whole):
        stage["output_dir"] = str(home / (f"{i + 1}-{names[i]}" if names[i] != str(i + 1) else names[i]))
        if (start := begins[i]) is not None:
            stage["init_from"] = whole[start]["output_dir"]
    configs = on_each(places, lambda i: load(whole[i]))
    stages = [Stage(*parts) for parts in zip(configs, names, places, begins, gates, strict=True)]
    for stage in stages:
        for gate in stage.keep_if:
            _check_gate(gate, stage, stages)
    return stages


def _gates(stage: dict[str, Any], own: list[str], place: str) -> tuple[Gate, ...]:
    """Remove `keep_if` from a stage and from the stage's overrides, and return the parsed gates."""
    changes = [text for text in own if re.match(r"keep_if\b", text)]
    own[:] = [text for text in own if text not in changes]
    return gates_of(change({"keep_if": stage.pop("keep_if", None) or {}}, changes)["keep_if"], place)


def _check_gate(gate: Gate, stage: Stage, stages: Sequence[Stage]) -> None:
    """Raise `ConfigError` if a gate's metric is not measured, or if it compares two different evaluations."""
    before = None if stage.begins is None else stages[stage.begins]
    if gate.compares and before is None:
        raise ConfigError(
            f"'{stage.place}.keep_if' compares with the stage before, and '{stage.name}' begins from none; "
            "write a number in place of `previous`"
        )
    for one in (before, stage) if gate.compares else (stage,):
        if one is None:
            continue
        if one.config.evaluation.data is None:
            raise ConfigError(
                f"'{stage.place}.keep_if' reads {gate.of}, but stage '{one.name}' has no evaluation; set "
                "evaluation.data"
            )
        best = one.config.metric_for_best_model
        if best and best != gate.of:
            raise ConfigError(
                f"'{stage.place}.keep_if' reads {gate.of}, but stage '{one.name}' hands on the checkpoint "
                f"with the best {best} (metric_for_best_model), of which only that is known; name the same "
                "metric"
            )
    if gate.compares and before and _evaluates(before.config) != _evaluates(stage.config):
        raise ConfigError(
            f"'{stage.place}.keep_if' compares with stage '{before.name}', whose evaluation is another one; "
            "give both the same `evaluation`, with its rewards and engine, or write a number in place of "
            "`previous`"
        )


def _evaluates(config: Config) -> tuple[Any, ...]:
    """Return everything besides the weights that determines the results of a stage's evaluation."""
    return evaluation_of(config).evaluation, config.seed


def _parted(overrides: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Split overrides into a list for all stages, and one list per stage with `stages.NAME.` removed."""
    numbers = {str(i): i for i in range(len(names))}
    index = {name: i for i, name in enumerate(names) if not name.isdigit()} | numbers
    common: list[str] = []
    own: list[list[str]] = [[] for _ in names]
    for text in overrides:
        which, _, rest = text.removeprefix("stages.").partition(".")
        if not text.startswith("stages."):
            common.append(text)
        elif which in index and rest.partition("=")[0] not in REFUSED:
            own[index[which]].append(rest)
        else:
            raise ConfigError(
                f"the override '{text}' must read stages.NAME.key=value with one of {', '.join(index)}, and "
                f"with another key than {', '.join(REFUSED)}"
            )
    return common, own


def _names(listed: Sequence[dict[str, Any]]) -> list[str]:
    """Pop the name of every stage (default: its number); names become parts of folder names."""
    names: list[str] = []
    for i, stage in enumerate(listed):
        place = f"stages[{i}]"
        name = convert(stage.pop("name", None) or str(i + 1), str, f"{place}.name")
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ConfigError(
                f"'{place}.name' must be made of letters, digits, '-', '_' and '.', not {name!r}"
            )
        if name in names:
            raise ConfigError(f"'{place}.name' is '{name}', as that of stages[{names.index(name)}]")
        for key in REFUSED:
            if key in stage:
                raise ConfigError(f"'{place}.{key}' belongs to the whole file; put it at its top")
        names.append(name)
    return names


def _over(raw: dict[str, Any], stage: dict[str, Any], common: Sequence[str]) -> dict[str, Any]:
    """Merge a stage over the rest of the file, and then the `common` overrides over the result."""
    stage = dict(stage)
    for one, other in (("max_steps", "num_train_epochs"), ("num_train_epochs", "max_steps")):
        if stage.get(one) and other not in stage:  # `max_steps` and `num_train_epochs` exclude each other
            stage[other] = None
    shorthands = {key: stage.pop(key) for key in SHORTHANDS if stage.get(key) is not None}
    merged = merge(raw, stage)
    for key, value in shorthands.items():
        merged = SHORTHANDS[key](value, merged, stage, complete=False)  # False: apply no defaults of TRL
    return change(merged, common)


def _complete(stages: Sequence[dict[str, Any]], names: Sequence[str], given: set[str]) -> int | None:
    """Fill in the defaults of the last of `stages`, and return the index of the stage that it continues.

    Args:
        stages: Plain configurations of the stages up to the one that is completed.
        names: Names of all stages.
        given: The keys that the stage itself sets.
    """
    stage, i = stages[-1], len(stages) - 1
    wanted = stage.get("init_from") if "init_from" in given or i == 0 else names[i - 1]
    if "init_from" in given and wanted in names[i:]:
        raise ConfigError(f"'stages[{i}].init_from' is '{wanted}', which is no stage before that one")
    if i == 0:
        if not stage.get("init_from") and "carry" not in given:
            stage.pop("carry", None)  # the file sets it for all stages, but no stage precedes this one
        return None
    # A sampler carried over keeps its shuffled order, so it needs the `stage` (random stream) that drew it.
    goes_on = "sampler" in (stage.get("carry") or ())
    stage.setdefault("stage", stages[-2].get("stage", 0) if goes_on else i)
    stage.setdefault("init_references", True)
    if wanted not in names:
        return None
    begins = names.index(wanted)
    policies = [lookup(stages[k], "policy.name") for k in (begins, i)]
    if policies[0] != policies[1]:
        raise ConfigError(
            f"'stages[{i}].policy' is '{policies[1]}', but it begins from the weights of '{wanted}', whose "
            f"policy is '{policies[0]}'; name the same policy, or another `init_from`"
        )
    return begins
