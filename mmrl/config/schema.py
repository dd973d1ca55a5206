"""Configuration schema: frozen dataclasses, and strict conversion of plain values into them.

A field with pieces declares their kind as metadata of its type: `Annotated[tuple[Piece, ...],
Kind("metric")]`. `held_fields` iterates over these fields, so that checks need no list of them.
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

from mmrl.config.loading import ConfigError, UnknownKey, expand_all, import_modules, read, without_stages
from mmrl.config.plain import check_finite, to_yaml
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, Steps, bounds_of, marks

FORMS = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "left out",
    list: "a list", tuple: "a list", Sequence: "a list", dict: "a mapping", Mapping: "a mapping",
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A configurable component: a name with options, `{name: clip, epsilon_high: 0.28}`, or `clip` alone."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """Type annotation of a field with pieces: their kind and, for checks, the stage at which they run."""

    name: str
    on: str = ""


@dataclass(frozen=True)
class Scheduled:
    """Type annotation of a field with a number of type `wanted`, or a schedule of such numbers."""

    wanted: Any


@dataclass(frozen=True)
class Rollout:
    """Settings of rollouts. The first engine samples from the policy; each other wraps the previous one."""

    engine: Annotated[tuple[Piece, ...], Kind("engine")]  # engines, from the innermost to the outermost
    policy: str = ""  # name in `references` of the policy that samples; empty: the trained policy
    num_prompts: PositiveInt = 32  # prompts (groups) per update, over all processes
    num_generations: PositiveInt = 8  # rollouts per prompt
    max_staleness: NonNegativeInt = 0  # lag in steps between the sampling weights and the trained weights
    max_rounds: PositiveInt = 1  # maximum sampling rounds per update, to replace dropped groups or show hints


@dataclass(frozen=True)
class Learn:
    """Settings of the optimizer and of its updates."""

    learning_rate: Annotated[Any, Scheduled(NonNegativeFloat)] = 1e-6  # a number or a schedule
    optimizer: Annotated[Piece, Kind("optimizer")] = Piece("adamw")  # updates the trained weights
    num_iterations: NonNegativeInt = 1  # passes over the rollouts of a step; 0: only samplers are updated
    minibatches: PositiveInt = 1  # optimizer steps per pass
    micro_batch_steps: PositiveInt = 16384  # maximum steps (tokens, denoising steps) in memory at once
    max_grad_norm: NonNegativeFloat = 1.0  # gradients are clipped to this norm; 0: no clipping
    on_nonfinite: Literal["stop", "skip"] = "stop"  # reaction to a loss or gradient that is NaN or infinite
    max_skipped: NonNegativeInt = 10  # maximum updates that a run may skip before it fails
    on_no_learning: Literal["stop", "warn"] = "stop"  # reaction if the first twelve steps change no weight


@dataclass(frozen=True)
class Evaluation:
    """Settings of `mmrl evaluate`, and of the evaluations that a training run makes every `eval_steps`.

    If the list of engines or rewards is empty, the engine or rewards of the training are used.
    """

    data: Annotated[Piece | None, Kind("data")] = None  # held-out prompts; null: no evaluation
    engine: Annotated[tuple[Piece, ...], Kind("engine")] = ()  # empty: the first engine of the training
    rewards: Annotated[tuple[Piece, ...], Kind("reward")] = ()  # empty: the rewards of the training
    metrics: Annotated[tuple[Piece, ...], Kind("metric")] = (Piece("mean"),)  # statistics of the rewards
    correct: str = ""  # name of the 0/1 reward that marks correct answers; "": the reward of largest weight
    num_prompts: NonNegativeInt = 0  # prompts to answer; 0: all
    num_generations: PositiveInt = 1  # answers per prompt
    confidence: Annotated[float, Range(0, 1, above=True, below=True)] = 0.95  # level of bootstrap intervals


@dataclass(frozen=True)
class Report:
    """Files, dashboards and warnings of a run, besides `metrics.jsonl`."""

    logging_steps: PositiveInt = 1  # steps between lines of metrics.jsonl
    log_completions: bool = True  # write rollouts with rewards and advantages to parquet files
    # Number of training steps, evenly spaced over the run, whose rollouts get thumbnails in the report.
    media_log_steps: NonNegativeInt = 5
    # Dashboards. The package of a dashboard must be installed, except that of the default, TensorBoard.
    trackers: Annotated[tuple[Piece, ...], Kind("tracker")] = (Piece("tensorboard", {"required": False}),)
    visualizations: Annotated[tuple[Piece, ...], Kind("visualization")] = ()  # images in the HTML report
    # Checks during training, which print warnings on the console and at the top of the HTML report.
    checks: Annotated[tuple[Piece, ...], Kind("check", on="training")] = (
        Piece("logprob_mismatch", {"tolerance": 0.05}),
        Piece("effective_samples"),
    )
    # Checks of the first step that need no extra computation; `mmrl doctor` runs all checks.
    startup_checks: Annotated[tuple[Piece, ...], Kind("check", on="start")] = (
        Piece("rewards_apply"),
        Piece("zero_variance_groups"),
        Piece("sampling_params"),
        Piece("gradient_flow"),
        Piece("importance_correction"),
    )


@dataclass(frozen=True)
class Config:
    """Configuration of a training run."""

    policy: Annotated[Piece, Kind("policy")]  # the model to train
    data: Annotated[Piece, Kind("data")]  # prompts to train on
    rollout: Rollout
    advantage: Annotated[tuple[Piece, ...], Kind("advantage")]  # turn rewards into advantages, in order
    objective: Annotated[Piece, Kind("objective")]  # computes the loss from advantages
    # Each reward may have `weight` and `label`. No reward is needed if advantages do not depend on rewards.
    rewards: Annotated[tuple[Piece, ...], Kind("reward")] = ()
    # Samplers choose the prompts of a step. The first reads the data; every other wraps the previous one.
    sampler: Annotated[tuple[Piece, ...], Kind("sampler")] = (Piece("uniform"),)
    group_filter: Annotated[Piece, Kind("group_filter")] = Piece("keep_all")  # drops groups after scoring
    # Other policies that the objective reads, by name: `{ref: frozen}`.
    references: Annotated[Mapping[str, Piece], Kind("reference")] = field(default_factory=dict)
    metrics: Annotated[tuple[Piece, ...], Kind("metric")] = ()  # further metrics of every step
    learn: Learn = Learn()
    evaluation: Evaluation = Evaluation()
    report: Report = Report()
    max_steps: PositiveInt = 1000  # steps of the whole run
    num_train_epochs: NonNegativeFloat = 0.0  # passes over the data; above 0 it replaces `max_steps`
    until: Annotated[Piece | None, Kind("stop_rule")] = None  # ends the run early, by a metric
    init_from: str = ""  # run or model folder of initial weights, not for the reference `frozen`
    init_references: bool = False  # whether the reference `frozen` starts from `init_from` too
    # State to restore from the checkpoint in `init_from`, besides the weights.
    carry: tuple[Literal["optimizer", "references", "sampler", "advantage"], ...] = ()
    save_steps: Steps = 100  # steps between checkpoints; below 1: fraction of the run; 0: only at its end
    save_total_limit: NonNegativeInt = 2  # number of latest checkpoints to keep; 0: all
    metric_for_best_model: str = ""  # the checkpoint with the best value of this metric is kept too
    greater_is_better: bool = True  # whether larger values of `metric_for_best_model` are better
    push_to_hub: bool = False  # upload the best model (or else the last) at the end of the run
    hub_model_id: str = ""  # `owner/name`, or `name` in your own account
    hub_private_repo: bool = True  # whether a new repository is private
    # Steps between evaluations; below 1: fraction of the run; 0: only after the last step.
    eval_steps: Steps = 0
    eval_on_start: bool = False  # evaluate before the first step too, if there is evaluation data
    ddp_timeout: Annotated[float, Range(1)] = 1800.0  # seconds a process waits for another before all fail
    seed: int = 0  # seed of all random streams
    stage: NonNegativeInt = 0  # number of the stage; changes random numbers of training, not of evaluation
    imports: tuple[str, ...] = ()  # modules to import first, which add model families, media or pieces
    output_dir: str = "runs/unnamed"  # folder for all files of the run
    overwrite_output_dir: bool = False  # delete an existing run in `output_dir`


@dataclass(frozen=True)
class EvaluateConfig:
    """An evaluation without training, of one model or of several `settings` of it."""

    policy: Annotated[Piece, Kind("policy")]  # the model to measure
    evaluation: Evaluation
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # {name: {dotted key: value}}
    cost_metrics: Annotated[tuple[Piece, ...], Kind("cost")] = (Piece("operations"),)  # costs besides seconds
    target_metric: str = ""  # the metric that is plotted against costs; empty: the first metric
    greater_is_better: bool = True  # whether larger values of `target_metric` are better
    imports: tuple[str, ...] = ()  # modules to import first, which add model families, media or pieces
    output_dir: str = "runs/evaluation"  # folder for the results
    seed: int = 0  # seed of all random streams


@dataclass(frozen=True)
class BuildConfig:
    """A data set or model folder to build."""

    build: Annotated[Piece, Kind("builder")]  # the builder
    output: str  # folder for the result
    seed: int = 0  # seed of all random streams
    imports: tuple[str, ...] = ()  # modules to import first, which add model families, media or pieces


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Return the type annotations of a configuration dataclass, by field."""
    return typing.get_type_hints(kind, include_extras=True)


def held_fields(config: Any, place: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield (annotation, value, dotted name) of the fields that hold pieces or schedules."""
    hints = hints_of(type(config))
    for name, value in vars(config).items():
        mark = next(iter(marks(hints[name], Kind | Scheduled)), None)
        if mark and value is not None:
            yield mark, value, place + name
        elif dataclasses.is_dataclass(value):
            yield from held_fields(value, f"{place}{name}.")


def each(value: Any, place: str) -> list[tuple[Piece, str]]:
    """List the pieces in the value of a field, each with its dotted path: `rewards[0]`, `references.ref`."""
    match value:
        case Piece():
            return [(value, place)]
        case Mapping():
            return [(piece, f"{place}.{key}") for key, piece in value.items()]
    return [(piece, f"{place}[{i}]") for i, piece in enumerate(value)]


# Hooks that add hints to errors about unknown keys; `misplaced.py` appends one.
LOCATE: list[Callable[[UnknownKey, Mapping[str, Any], type], ConfigError]] = []


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), kind: type = Config) -> Any:
    """Read and check a configuration: a YAML file or a mapping of the same form, with its includes."""
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
    """Convert plain mappings to a configuration dataclass; raises `ConfigError` with all faulty keys.

    With `part`, required keys may be missing and become None. A value of None becomes an empty list or
    mapping for keys of these types, and the default for other keys. `~` and `$NAME` in paths are expanded.
    """
    raw = expand_all(without_stages(raw))
    errors: list[ConfigError] = []
    parsed = _parse(raw, kind, "", part, errors)
    if errors:
        errors = [next((f(e, raw, kind) for f in LOCATE if type(e) is UnknownKey), e) for e in errors]
        raise ConfigError(";\n  ".join(map(str, errors))) if errors[1:] else errors[0]
    import_modules(getattr(parsed, "imports", None) or ())
    return parsed


def _parse(raw: Mapping[str, Any], kind: type, place: str, part: bool, errors: list | None) -> Any:
    """Convert a mapping to `kind`; append all faults to `errors`, or raise the first if `errors` is None."""
    hints, prefix, faults = hints_of(kind), f"{place}." if place else "", []
    values, hint = {}, f"there are {', '.join(hints)}"
    for key, value in raw.items():
        wanted = hints.get(key)
        if wanted is None:
            faults.append(UnknownKey(f"there is no key '{prefix}{key}'", f"{prefix}{key}", hints, hint))
            continue
        match value, kind.__dataclass_fields__[key].default:
            case None, default:
                value = _emptied(wanted, default)
            # A mapping without a name sets options of the default piece.
            case Mapping(), Piece(name, options) | (Piece(name, options),) if "name" not in value:
                value = {"name": name, **options, **value}
        if dataclasses.is_dataclass(wanted) and wanted is not Piece and isinstance(value, Mapping):
            values[key] = _parse(value, hints[key], prefix + key, part, faults)
            continue
        try:
            values[key] = convert(value, wanted, prefix + key)
        except ConfigError as error:
            values[key] = faults.append(error)
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing and not part:
        verb = "s are" if len(missing) > 1 else " is"
        keys = ", ".join(f"'{prefix}{name}'" for name in missing)
        faults.append(ConfigError(f"{keys}: the required key{verb} missing"))
    if errors is not None:
        errors += faults
    elif faults:
        raise faults[0]
    return None if faults else kind(**dict.fromkeys(missing), **values)


def _emptied(wanted: Any, default: Any) -> Any:
    """Return the value of a key that is null in the file: an empty list or mapping, or else its default."""
    if empty := empty_of(wanted):
        return empty()
    if dataclasses.is_dataclass(default) and not isinstance(default, Piece):
        return {}
    return None if default is dataclasses.MISSING else default


def empty_of(wanted: Any) -> type | None:
    """Return `list` or `dict` for a type annotation of a list or mapping; None for any other type."""
    if typing.get_origin(wanted) is Annotated:
        return empty_of(typing.get_args(wanted)[0])
    origin = typing.get_origin(wanted) or wanted
    return dict if origin in (dict, Mapping) else list if origin in (list, tuple, Sequence) else None


def parse_some(raw: Mapping[str, Any], kind: type) -> Any:
    """Parse a partial configuration, such as a variant; ignore policy options without a policy name."""
    return parse({k: v for k, v in raw.items() if k != "policy" or not is_part(raw)}, kind, part=True)


def is_part(raw: Mapping[str, Any]) -> bool:
    """Whether a file is only part of a configuration, such as a variant: it names no policy.

    It can still have options for the policy of a run: `policy: {likelihood: ...}`.
    """
    policy = raw.get("policy") or {}
    return isinstance(policy, Mapping) and "name" not in policy


def convert(value: Any, wanted: Any, place: str) -> Any:
    """Convert a plain value to the type `wanted` and check its range; `place` is its key, for errors."""
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
        # Compare types, too, because True equals 1.
        if not any(value == member and type(value) is type(member) for member in allowed):
            raise ConfigError(f"'{place}' must be one of {', '.join(map(repr, allowed))}, not {value!r}")
        return value if origin is Literal else wanted(value)
    check_finite(value, place)
    one_piece = inner[:1] == (Piece,) and type(value) not in (list, tuple)
    match [value] if one_piece else value:  # one piece is a list of one
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
    # Exact types, because bool is a subclass of int.
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
    """Convert `clip` or `{name: clip, epsilon_high: 0.28}` to a `Piece`; `place` is its key, for errors."""
    match value:
        case Piece():
            return value
        case str():
            return Piece(value)
        case {"name": str(name), **options}:
            return Piece(name, {str(key): option for key, option in options.items()})
        case Mapping() if value and all(str(key).isdigit() for key in value):
            listed = place.rpartition("[")[0] or place
            raise ConfigError(f"'{listed}' is empty, so '{place}' cannot be changed; give the list")
    raise ConfigError(f"'{place}' must be a name, or a mapping with a name; not {value!r}")


def as_plain(value: Any) -> Any:
    """Convert a configuration to plain values; `parse` converts these to an equal configuration."""
    match value:
        case Piece(name=name, options=options):
            return {"name": name, **as_plain(options)} if options else name
        case Mapping():
            return {key: as_plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [as_plain(inner) for inner in value]
    return as_plain(vars(value)) if dataclasses.is_dataclass(value) else value


def as_yaml(config: Any) -> str:
    """Return a configuration as YAML text."""
    return to_yaml(as_plain(config))
