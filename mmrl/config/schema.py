"""Configuration schema: frozen dataclasses, and strict conversion of plain values into them.

A field that holds pieces declares their kind once, as metadata of its type: `Annotated[tuple[Piece, ...],
Kind("metric")]`. `held_fields` walks over them, so that checking and making need no list of fields.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import Enum, EnumType
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from mmrl.config.loading import ConfigError, UnknownKey, expand_all, read, without_stages
from mmrl.config.plain import check_finite
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, Steps, bounds_of, marks

FORMS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "left out",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    dict: "a mapping",
    Mapping: "a mapping",
}


@dataclass(frozen=True)
class Piece:
    """A name with options: `{name: clip, epsilon_high: 0.28}`, or just `clip`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """Mark of a field that holds pieces: their kind and, for checks, when they run."""

    name: str
    on: str = ""


@dataclass(frozen=True)
class Scheduled:
    """Mark of a field that holds a number of the type `wanted`, or the schedule that gives it."""

    wanted: Any


@dataclass(frozen=True)
class Rollout:
    """Settings of rollouts. The first engine takes the policy, each next one wraps the one before."""

    engine: Annotated[tuple[Piece, ...], Kind("engine")]  # the first samples from the policy
    policy: str = ""  # a name in `references` when another policy than the learner rolls out
    num_prompts: PositiveInt = 32  # groups per update, over all processes
    num_generations: PositiveInt = 8  # rollouts per prompt
    max_staleness: Annotated[int, Range(0, 1)] = 0  # steps that rollouts may be older; 1: made while learning
    max_rounds: PositiveInt = 1  # calls of the sampler per update: after dropped groups, hints, budgets


@dataclass(frozen=True)
class Learn:
    """Settings of the optimizer and of its updates."""

    learning_rate: Annotated[Any, Scheduled(NonNegativeFloat)] = 1e-6  # of the optimizer, at every step
    optimizer: Annotated[Piece, Kind("optimizer")] = Piece("adamw")  # moves the trained weights
    num_iterations: NonNegativeInt = 1  # passes over one collection; 0: samplers observe, nothing is learned
    minibatches: PositiveInt = 1  # optimizer steps per pass
    micro_batch_steps: PositiveInt = 16384  # steps in memory at once
    max_grad_norm: NonNegativeFloat = 1.0  # 0: no limit
    on_nonfinite: Literal["stop", "skip"] = "stop"  # after a loss or gradient that is NaN or infinite
    max_skipped: NonNegativeInt = 10  # updates that may be skipped in a run
    on_no_learning: Literal["stop", "warn"] = "stop"  # after twelve first steps that move no weight


@dataclass(frozen=True)
class Evaluation:
    """Settings of `mmrl evaluate`, and of a training run every `eval_steps`.

    An empty engine or list of rewards is that of the training.
    """

    data: Annotated[Piece | None, Kind("data")] = None  # held-out prompts; none: no evaluation
    engine: Annotated[tuple[Piece, ...], Kind("engine")] = ()  # empty: the first of the training
    rewards: Annotated[tuple[Piece, ...], Kind("reward")] = ()  # empty: those of the training
    metrics: Annotated[tuple[Piece, ...], Kind("metric")] = (Piece("mean"),)  # numbers of the rewards
    correct: str = ""  # the reward of 0 or 1 that says which answers are correct; "": that of most weight
    num_prompts: NonNegativeInt = 0  # 0: all of them
    num_generations: PositiveInt = 1  # answers per prompt
    confidence: Annotated[float, Range(0, 1, above=True, below=True)] = 0.95  # of the bootstrap intervals


@dataclass(frozen=True)
class Report:
    """Files, dashboards and warnings of a run, besides `metrics.jsonl`."""

    logging_steps: PositiveInt = 1  # steps between lines of metrics.jsonl
    log_completions: bool = True  # rows with their rewards and advantages, as parquet
    # Collections whose rows get thumbnails: the first, the last and some between.
    media_log_steps: NonNegativeInt = 5
    # Dashboards. One that is named in a file must be installed.
    trackers: Annotated[tuple[Piece, ...], Kind("tracker")] = (Piece("tensorboard", {"required": False}),)
    visualizations: Annotated[tuple[Piece, ...], Kind("visualization")] = ()  # images in the HTML report
    # Warnings on the console and at the head of the HTML report.
    checks: Annotated[tuple[Piece, ...], Kind("check", on="training")] = (
        Piece("logprob_mismatch", {"tolerance": 0.05}),
        Piece("effective_samples"),
    )
    # Checks of the first step at no cost; `mmrl doctor` runs all of them.
    startup_checks: Annotated[tuple[Piece, ...], Kind("check", on="start")] = (
        Piece("rewards_apply"),
        Piece("zero_variance_groups"),
        Piece("sampling_params"),
        Piece("gradient_flow"),
        Piece("importance_correction"),
    )


@dataclass(frozen=True)
class Config:
    """A training run."""

    policy: Annotated[Piece, Kind("policy")]  # the model that learns
    data: Annotated[Piece, Kind("data")]  # prompts to train on
    rollout: Rollout
    rewards: Annotated[tuple[Piece, ...], Kind("reward")]  # each may have `weight` and `label`
    advantage: Annotated[tuple[Piece, ...], Kind("advantage")]  # from rewards to advantages, in this order
    objective: Annotated[Piece, Kind("objective")]  # from advantages to the loss
    # Choose the prompts of a step. The first takes the data, each next one wraps the one before.
    sampler: Annotated[tuple[Piece, ...], Kind("sampler")] = (Piece("uniform"),)
    group_filter: Annotated[Piece, Kind("group_filter")] = Piece("keep_all")  # drops groups after scoring
    # Policies that the objective compares with, by name: `{ref: frozen}`.
    references: Annotated[Mapping[str, Piece], Kind("reference")] = field(default_factory=dict)
    metrics: Annotated[tuple[Piece, ...], Kind("metric")] = ()  # further numbers of every step
    learn: Learn = Learn()
    evaluation: Evaluation = Evaluation()
    report: Report = Report()
    max_steps: PositiveInt = 1000  # steps of the whole run
    num_train_epochs: NonNegativeFloat = 0.0  # passes over the data, in place of `max_steps`; 0: that one
    until: Annotated[Piece | None, Kind("stop_rule")] = None  # ends the run by a metric, before `max_steps`
    init_from: str = ""  # a run or model folder to take the first weights from; `frozen` stays `policy.model`
    init_references: bool = False  # whether `frozen` begins at `init_from` too
    # What goes on from the checkpoint of `init_from` besides its weights.
    carry: tuple[Literal["optimizer", "references", "sampler", "advantage"], ...] = ()
    save_steps: Steps = 100  # steps between checkpoints; below 1: a share of the run; 0: only at its end
    save_total_limit: NonNegativeInt = 2  # latest checkpoints that are kept; 0: all
    metric_for_best_model: str = ""  # its best checkpoint is kept besides the latest
    greater_is_better: bool = True  # of that metric
    push_to_hub: bool = False  # the best model, or else the last, when the run ends
    hub_model_id: str = ""  # owner/name, or a name of your own
    hub_private_repo: bool = True  # whether a repository that is made is private
    # Steps between evaluations; below 1: a share of the run; 0: only after the last step.
    eval_steps: Steps = 0
    eval_on_start: bool = False  # evaluates before the first step too, where there is evaluation data
    ddp_timeout: Annotated[float, Range(1)] = 1800.0  # seconds a process waits for another before all fail
    seed: int = 0  # of every random stream
    stage: NonNegativeInt = 0  # stages draw other prompts and noise in training, and evaluate with the same
    output_dir: str = "runs/unnamed"  # folder of everything that the run writes
    overwrite_output_dir: bool = False  # throw away the run that is there


@dataclass(frozen=True)
class EvaluateConfig:
    """An evaluation without training, of one model or of several `settings` of it."""

    policy: Annotated[Piece, Kind("policy")]  # the model to measure
    evaluation: Evaluation
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # setting to its changes
    cost_metrics: Annotated[tuple[Piece, ...], Kind("cost")] = (Piece("operations"),)  # besides seconds
    target_metric: str = ""  # the metric that is plotted against costs; empty: the first
    greater_is_better: bool = True  # that metric
    output_dir: str = "runs/evaluation"  # folder of what is measured
    seed: int = 0  # of every random stream


@dataclass(frozen=True)
class BuildConfig:
    """A data set or model folder to build."""

    build: Annotated[Piece, Kind("builder")]  # what is built
    output: str  # the folder to write
    seed: int = 0  # of every random stream


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Resolve the annotations of a configuration dataclass."""
    return typing.get_type_hints(kind, include_extras=True)


def held_fields(config: Any, place: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Walk over the fields of a configuration that hold pieces: the mark, the value and the dotted name."""
    hints = hints_of(type(config))
    for name, value in vars(config).items():
        mark = next(iter(marks(hints[name], Kind | Scheduled)), None)
        if mark and value is not None:
            yield mark, value, place + name
        elif dataclasses.is_dataclass(value):
            yield from held_fields(value, f"{place}{name}.")


def each(value: Any, place: str) -> list[tuple[Piece, str]]:
    """The pieces in the value of a field with the place of each: `rewards[0]`, `references.ref`."""
    match value:
        case Piece():
            return [(value, place)]
        case Mapping():
            return [(piece, f"{place}.{key}") for key, piece in value.items()]
    return [(piece, f"{place}[{i}]") for i, piece in enumerate(value)]


# Says where an unknown key belongs. `misplaced.py`, which reads this file, puts its function here.
LOCATE: list[Callable[[UnknownKey, Mapping[str, Any], type], ConfigError]] = []


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), kind: type = Config) -> Any:
    """Read and check a configuration: a file, or a mapping of the same form, which may `include` files."""
    try:
        raw = read(source, overrides)
        if raw.get("max_steps") and raw.get("num_train_epochs"):
            steps, epochs = raw["max_steps"], raw["num_train_epochs"]
            raise ConfigError(
                f"'max_steps' is {steps} and 'num_train_epochs' is {epochs}; leave one out, or set it to null"
            )
        return parse(raw, kind)
    except ConfigError as error:
        place = "" if isinstance(source, Mapping) else f"{source}: "
        raise ConfigError(f"{place}{error}") from error


def parse(raw: Mapping[str, Any], kind: type, *, part: bool = False) -> Any:
    """Convert plain mappings into a configuration dataclass; an error names the key.

    Of a `part` required keys may be absent, and are then None. A list or mapping that is None is empty; for
    any other key None stands for its default. `~` and `$NAME` in paths are expanded; all errors are reported.
    """
    raw = expand_all(without_stages(raw))
    errors: list[ConfigError] = []
    parsed = _parse(raw, kind, "", part, errors)
    if errors:
        told = [next((locate(e, raw, kind) for locate in LOCATE if type(e) is UnknownKey), e) for e in errors]
        raise ConfigError(";\n  ".join(map(str, told))) if told[1:] else told[0]
    return parsed


def _parse(raw: Mapping[str, Any], kind: type, place: str, part: bool, errors: list | None) -> Any:
    """Convert a mapping; with `errors`, those in it are collected, and the result is then None."""
    hints, prefix, found = hints_of(kind), f"{place}." if place else "", []
    values, there = {}, f"there are {', '.join(hints)}"
    for key, value in raw.items():
        wanted = hints.get(key)
        if wanted is None:
            found.append(UnknownKey(f"there is no key '{prefix}{key}'", f"{prefix}{key}", hints, there))
            continue
        match value, kind.__dataclass_fields__[key].default:
            case None, default:
                value = _emptied(wanted, default)
            # Options of the piece by default.
            case Mapping(), Piece(name, options) | (Piece(name, options),) if "name" not in value:
                value = {"name": name, **options, **value}
        if dataclasses.is_dataclass(wanted) and wanted is not Piece and isinstance(value, Mapping):
            values[key] = _parse(value, hints[key], prefix + key, part, found)
            continue
        try:
            values[key] = convert(value, wanted, prefix + key)
        except ConfigError as error:
            values[key] = found.append(error)
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing and not part:
        verb = "s are" if len(missing) > 1 else " is"
        keys = ", ".join(f"'{prefix}{name}'" for name in missing)
        found.append(ConfigError(f"{keys}: the required key{verb} missing"))
    if errors is not None:
        errors += found
    elif found:
        raise found[0]
    return None if found else kind(**dict.fromkeys(missing), **values)


def _emptied(wanted: Any, default: Any) -> Any:
    """Return what None stands for as the value of a key: an empty list or mapping, or else the default."""
    if empty := empty_of(wanted):
        return empty()
    if dataclasses.is_dataclass(default) and not isinstance(default, Piece):
        return {}
    return None if default is dataclasses.MISSING else default


def empty_of(wanted: Any) -> type | None:
    """Return what makes an empty value of a type annotation of a list or mapping; None for any other type."""
    if typing.get_origin(wanted) is Annotated:
        return empty_of(typing.get_args(wanted)[0])
    origin = typing.get_origin(wanted) or wanted
    return dict if origin in (dict, Mapping) else list if origin in (list, tuple, Sequence) else None


def parse_some(raw: Mapping[str, Any], kind: type) -> Any:
    """Convert a part of a configuration, such as a variant; a policy without a name is left out."""
    return parse({k: v for k, v in raw.items() if k != "policy" or not is_part(raw)}, kind, part=True)


def is_part(raw: Mapping[str, Any]) -> bool:
    """Whether a file names no policy, so that it is a part of a configuration, such as a variant.

    It may still give options of the policy that a run will name: `policy: {likelihood: ...}`.
    """
    policy = raw.get("policy") or {}
    return isinstance(policy, Mapping) and "name" not in policy


def convert(value: Any, wanted: Any, place: str) -> Any:
    """Convert a plain value to a type annotation and check it against its range."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        value = convert(value, inner[0], place)
        for bounds in bounds_of(wanted):
            if value not in bounds:
                raise ConfigError(f"'{place}' must be {bounds}, not {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, inner, place)
    if wanted is Piece:
        return as_piece(value, place)
    if origin is Literal or isinstance(wanted, EnumType):
        allowed = inner if origin is Literal else [member.value for member in typing.cast(type[Enum], wanted)]
        # Not `in`, because True equals 1.
        if not any(value == member and type(value) is type(member) for member in allowed):
            raise ConfigError(f"'{place}' must be one of {', '.join(map(repr, allowed))}, not {value!r}")
        return value if origin is Literal else wanted(value)
    check_finite(value, place)
    one_piece = inner[:1] == (Piece,) and type(value) not in (list, tuple)
    match [value] if one_piece else value:  # `sampler: uniform`
        case Mapping() if dataclasses.is_dataclass(wanted):
            return _parse(value, typing.cast(type, wanted), place, False, None)
        case Mapping() if origin in (dict, Mapping):
            return {str(key): convert(item, inner[1], f"{place}.{key}") for key, item in value.items()}
        case [*items] if origin in (list, tuple, Sequence) or wanted is tuple:
            # `tuple[int, int]` takes two members, `tuple[int, ...]` and `list[int]` any number.
            members = inner if len(inner) > 1 and inner[1] is not Ellipsis else (*inner, Any)[:1] * len(items)
            if len(members) != len(items):
                raise ConfigError(f"'{place}' must be a list of {len(members)}, not {value!r}")
            return tuple(convert(item, members[i], f"{place}[{i}]") for i, item in enumerate(items))
    form = "a mapping" if dataclasses.is_dataclass(wanted) else FORMS.get(origin or wanted)
    # Not isinstance, because bool is a subclass of int.
    if form and type(value) not in ((int, float) if wanted is float else (wanted,)):
        raise ConfigError(f"'{place}' must be {form}, not {value!r}")
    return float(value) if wanted is float else value


def _convert_union(value: Any, members: Sequence[Any], place: str) -> Any:
    errors = []
    for member in members:
        try:
            return convert(value, member, place)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def as_piece(value: Any, place: str) -> Piece:
    """Read `clip` or `{name: clip, epsilon_high: 0.28}`."""
    match value:
        case Piece():
            return value
        case str():
            return Piece(value)
        case {"name": str(name), **options}:
            return Piece(name, {str(key): option for key, option in options.items()})
    raise ConfigError(f"'{place}' must be a name, or a mapping with a name; not {value!r}")


def as_plain(value: Any) -> Any:
    """Convert a configuration back to plain values, which `parse` converts to the same configuration."""
    match value:
        case Piece(name=name, options=options):
            return {"name": name, **as_plain(options)} if options else name
        case Mapping():
            return {key: as_plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [as_plain(inner) for inner in value]
    return as_plain(vars(value)) if dataclasses.is_dataclass(value) else value


def as_yaml(config: Any) -> str:
    """Write the resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(as_plain(config)))
