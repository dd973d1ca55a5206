"""Configuration: frozen dataclasses, and strict checks of what a file gives for them."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from mmrl.config.loading import ConfigError, read
from mmrl.config.ranges import (
    LARGEST,
    Ascending,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
)


@dataclass(frozen=True)
class Piece:
    """A name with options: `{name: clip, epsilon_high: 0.28}`, or just `clip`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """How rollouts are made. The first engine takes the policy, each next one wraps the one before."""

    engine: tuple[Piece, ...]
    policy: str = ""  # a name in `references` when another policy than the learner rolls out
    num_prompts: PositiveInt = 32  # groups per update, over all processes
    num_generations: PositiveInt = 8  # rollouts per prompt
    max_rounds: PositiveInt = 1  # how often to ask the sampler again: dropped groups, hints, budgets


@dataclass(frozen=True)
class Learn:
    """How weights move."""

    learning_rate: Any = 1e-6  # a number of at least 0, or a schedule
    optimizer: Piece = Piece("adamw")
    num_iterations: PositiveInt = 1  # passes over one collection
    minibatches: PositiveInt = 1  # optimizer steps per pass
    micro_batch_steps: PositiveInt = 16384  # steps held at once: the memory knob
    max_grad_norm: NonNegativeFloat = 1.0  # 0: no limit
    on_nonfinite: Literal["stop", "skip"] = "stop"  # what to do about a loss or gradient that is no number
    max_skipped: NonNegativeInt = 10  # updates that may be skipped in a run


@dataclass(frozen=True)
class Evaluation:
    """What `mmrl evaluate` does, and a training run every `eval_steps`. What is left empty is taken from the
    training."""

    data: Piece | None = None
    engine: tuple[Piece, ...] = ()
    rewards: tuple[Piece, ...] = ()
    metrics: tuple[Piece, ...] = (Piece("mean"),)
    num_prompts: NonNegativeInt = 0  # 0: all of them
    num_generations: PositiveInt = 1
    confidence: Annotated[float, Range(0, 1, above=True, below=True)] = 0.95  # of the bootstrap intervals


@dataclass(frozen=True)
class Report:
    """What a run leaves to look at, besides `metrics.jsonl`."""

    logging_steps: PositiveInt = 1
    log_completions: bool = True  # rows with their rewards and advantages, as parquet
    media_log_steps: NonNegativeInt = (
        5  # collections with small images of the rows: first, last, some between
    )
    trackers: tuple[Piece, ...] = (
        Piece("tensorboard", {"required": False}),
    )  # dashboards; one that is asked for by name must be installed
    visualizations: tuple[Piece, ...] = ()  # pictures for the HTML report
    checks: tuple[Piece, ...] = (
        Piece("logprob_mismatch", {"tolerance": 0.05}),
    )  # what to warn of, on the console and at the head of the HTML report
    startup_checks: tuple[Piece, ...] = (
        Piece("rewards_apply"),
        Piece("zero_variance_groups"),
        Piece("sampling_params"),
        Piece("gradient_flow"),
        Piece("importance_correction"),
    )  # what is looked at in the first step, at no cost; `mmrl doctor` looks at everything


@dataclass(frozen=True)
class Config:
    """A training run."""

    policy: Piece
    data: Piece
    rollout: Rollout
    rewards: tuple[Piece, ...]  # each may carry `weight` and `label`
    advantage: tuple[Piece, ...]
    objective: Piece
    sampler: Piece = Piece("uniform")
    group_filter: Piece = Piece("keep_all")
    references: Mapping[str, Piece] = field(default_factory=dict)
    metrics: tuple[Piece, ...] = ()
    learn: Learn = Learn()
    evaluation: Evaluation = Evaluation()
    report: Report = Report()
    max_steps: PositiveInt = 1000
    save_steps: PositiveInt = 100
    save_total_limit: NonNegativeInt = 2
    metric_for_best_model: str = ""  # the checkpoint where it was best is kept besides the latest
    greater_is_better: bool = True
    push_to_hub: bool = False  # the best model, or else the last, when the run ends
    hub_model_id: str = ""  # owner/name
    hub_private_repo: bool = True
    eval_steps: NonNegativeInt = 0  # 0: only after the last step, where there is evaluation data
    ddp_timeout: Annotated[float, Range(1)] = (
        1800.0  # seconds that a process waits for another before all of them fail
    )
    seed: int = 0
    output_dir: str = "runs/unnamed"
    overwrite_output_dir: bool = False


@dataclass(frozen=True)
class EvaluateConfig:
    """A model to measure, without training; or several `settings` of it, side by side."""

    policy: Piece
    evaluation: Evaluation
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # changes, by a name for each
    cost_metrics: tuple[Piece, ...] = (
        Piece("operations"),
    )  # meters of what a setting spends, besides seconds
    target_metric: str = ""  # the metric that is set against costs; empty: the first
    greater_is_better: bool = True  # that metric
    output_dir: str = "runs/evaluation"
    seed: int = 0


@dataclass(frozen=True)
class BuildConfig:
    """A dataset to build."""

    build: Piece
    output: str
    seed: int = 0


# ---- checking


def load(path: str | Path, overrides: Sequence[str] = (), kind: type = Config) -> Any:
    """Read and check a configuration file."""
    try:
        return parse(read(path, overrides), kind)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(raw: Mapping[str, Any], kind: type, place: str = "") -> Any:
    """Turn plain mappings into a configuration dataclass, or say which key is wrong."""
    given = _known(raw, kind, place)
    prefix = f"{place}." if place else ""
    required = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    missing = [f"'{prefix}{name}'" for name in required if raw.get(name) is None]
    if missing:
        verb = "s are" if len(missing) > 1 else " is"
        raise ConfigError(f"{', '.join(missing)}: the required key{verb} missing")
    return kind(**given)


def parse_some(raw: Mapping[str, Any], kind: type, place: str = "") -> types.SimpleNamespace:
    """Check the keys that a part of a configuration has, such as a variant; what it leaves out, at any depth,
    has its default or None."""
    raw = {key: value for key, value in raw.items() if key != "policy" or not is_part(raw)}
    hints = typing.get_type_hints(kind)
    inside = {
        key: parse_some(value, hints[key], f"{place}{key}.")
        for key, value in raw.items()
        if dataclasses.is_dataclass(hints.get(key)) and hints[key] is not Piece and isinstance(value, Mapping)
    }
    given = _known({k: v for k, v in raw.items() if k not in inside}, kind, place.removesuffix("."))
    defaults = {f.name: _default(f) for f in dataclasses.fields(kind)}
    return types.SimpleNamespace(**{**defaults, **given, **inside})


def is_part(raw: Mapping[str, Any]) -> bool:
    """Tell whether a file leaves open which policy learns: then it is a part of a configuration, such as a
    variant. It may still give that policy options, `policy: {likelihood: ...}`."""
    match raw.get("policy"):
        case {"name": _}:
            return False
        case None | dict():
            return True
    return False


def _default(of: dataclasses.Field) -> Any:
    if of.default_factory is not dataclasses.MISSING:
        return of.default_factory()
    return None if of.default is dataclasses.MISSING else of.default


def _known(raw: Mapping[str, Any], kind: type, place: str) -> dict[str, Any]:
    """Check every key that is there."""
    hints = typing.get_type_hints(kind, include_extras=True)
    prefix = f"{place}." if place else ""
    for key in raw:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(hints)}"
            raise ConfigError(f"there is no key '{prefix}{key}'; {hint}")
    return {key: convert(value, hints[key], prefix + key) for key, value in raw.items()}


def convert(value: Any, wanted: Any, place: str) -> Any:
    """Check a plain value against a type annotation with its range, and bring it into that form."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        _refuse_infinite(value, place)
        return value
    if origin is Annotated:
        value = convert(value, inner[0], place)
        for bounds in inner[1:]:
            if isinstance(bounds, Range | Ascending) and value not in bounds:
                raise ConfigError(f"'{place}' must be {bounds}, not {value!r}")
        return value
    if wanted is Piece:
        return as_piece(value, place)
    if dataclasses.is_dataclass(wanted) and isinstance(value, Mapping):
        return parse(value, wanted, place)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, inner, place)
    if origin is Literal:
        if not any(value == member and type(value) is type(member) for member in inner):
            raise ConfigError(f"'{place}' must be one of {', '.join(map(repr, inner))}, not {value!r}")
        return value
    if origin in (list, tuple, Sequence) and not isinstance(value, str | Mapping):
        return _convert_list(value, inner, place)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {str(key): convert(item, inner[1], f"{place}.{key}") for key, item in value.items()}
    return _convert_plain(value, wanted, place)


def _convert_list(value: Any, inner: tuple, place: str) -> tuple:
    """Read a list: `tuple[int, int]` wants two members, `tuple[int, ...]` and `list[int]` any number."""
    if not isinstance(value, Sequence):
        raise ConfigError(f"'{place}' must be a list, not {value!r}")
    members = inner if len(inner) > 1 and inner[1] is not Ellipsis else inner[:1] * len(value)
    if len(members) != len(value):
        raise ConfigError(f"'{place}' must be a list of {len(members)}, not {value!r}")
    return tuple(convert(item, members[i], f"{place}[{i}]") for i, item in enumerate(value))


def _convert_union(value: Any, members: tuple, place: str) -> Any:
    errors = []
    for member in members:
        if member is type(None):
            if value is None:
                return None
            continue
        try:
            return convert(value, member, place)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _convert_plain(value: Any, wanted: Any, place: str) -> Any:
    # Types are compared and not asked for, because true and false are whole numbers to Python.
    _refuse_infinite(value, place)
    if wanted is float and type(value) is int:
        return float(value)
    plain = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if wanted in plain:
        if type(value) is wanted:
            return value
        raise ConfigError(f"'{place}' must be {plain[wanted]}, not {value!r}")
    if typing.get_origin(wanted) in (list, tuple, Sequence, dict, Mapping) or dataclasses.is_dataclass(
        wanted
    ):
        raise ConfigError(f"'{place}' has the wrong form: {value!r}")
    return value


def _refuse_infinite(value: Any, place: str) -> None:
    """Refuse what cannot be reckoned with: NaN, infinities, whole numbers beyond 64 bits."""
    match value:
        case float() if not math.isfinite(value):
            raise ConfigError(f"'{place}' must be a finite number, not {value!r}")
        case int() if abs(value) > LARGEST:
            bits = value.bit_length()
            raise ConfigError(f"'{place}' must be a number of at most 63 bits, not one of {bits}")
        case Mapping():
            for key, inner in value.items():
                _refuse_infinite(inner, f"{place}.{key}")
        case list() | tuple():
            for i, inner in enumerate(value):
                _refuse_infinite(inner, f"{place}[{i}]")


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
    """Turn a configuration back into what YAML holds, so that reading it gives the same configuration."""
    if dataclasses.is_dataclass(value) and type(value) is not Piece:
        value = vars(value)
    match value:
        case Piece():
            return {"name": value.name, **as_plain(value.options)} if value.options else value.name
        case Mapping():
            return {key: as_plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [as_plain(inner) for inner in value]
    return value


def as_yaml(config: Any) -> str:
    """Write the resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(as_plain(config)))
