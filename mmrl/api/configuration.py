"""Conversion of Python arguments (objects, functions, datasets, TRL's names) to a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import chain, count
from pathlib import Path
from typing import Any

from mmrl.config import objects
from mmrl.config.loading import ConfigError, merge, method_file, nearest, read
from mmrl.config.plain import ABSENT, as_list, as_mapping, lookup, nested
from mmrl.config.registry import find, import_name
from mmrl.config.schema import Config, as_plain, parse
from mmrl.data.object_rows import put_rows
from mmrl.inference.sources import names_pipeline
from mmrl.runtime.modules import DTYPES
from mmrl.trl.given import CONVERSING, kind_of_run
from mmrl.trl.names import NAMES
from mmrl.trl.run import quantized
from mmrl.trl.translation import arguments_of, kind_of, lora_of, tell, translated

Reward = Callable[..., Any] | str | Mapping[str, Any]
Tool = Callable[..., Any] | str | Mapping[str, Any]
OTHERS = {  # unsupported arguments of TRL's trainers, and what to do instead
    "reward_processing_classes": "A reward model is a reward with options: `mmrl list reward reward_model`.",
    "optimizers": "Set `optim` and `lr_scheduler_type`, or keys below `learn`, in `args`.",
    "optimizer_cls_and_kwargs": "Set `optim`, or keys below `learn`, in `args`.",
    "rollout_func": "Write an engine: docs/howto/engine.md.",
    "data_collator": "Rows are padded by the policy.",
    "compute_metrics": "Metrics are pieces: `evaluation.metrics`.",
    "preprocess_logits_for_metrics": "Metrics are pieces: `evaluation.metrics`.",
    "model_init": "Give the model.",
    "formatting_func": "Map the rows before.",
    "compute_loss_func": "Losses are pieces: `objective`.",
}
Factories = Callable[[], Any] | str | Mapping[str, Any]


def configuration(
    model: Any = None,
    reward_funcs: Reward | Sequence[Reward] | None = None,
    args: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    peft_config: Any = None,
    *,
    tools: Sequence[Tool] | None = None,
    environment_factory: Factories | None = None,
    ref_model: Any = None,
    quantization_config: Any = None,
    method: str = "",
    config: str | Path | Mapping[str, Any] | Config | None = None,
) -> Config:
    """Create the configuration of a run from the arguments of `mmrl.Trainer`, which documents them."""
    if model is None and isinstance(args, Mapping):
        model = args.get("model_name_or_path")
    flow = config is None and is_pipeline(model)
    # For flow models, which TRL has no trainer for, mmrl's defaults apply. With a whole configuration, a
    # dictionary `args` changes only its own keys, but an object such as a GRPOConfig sets all.
    spoken = not flow and (config is None or args is not None and not isinstance(args, Mapping))
    keywords, own = _arguments(args, ours=not spoken)
    if keywords.pop("model_name_or_path", model) != model:
        raise ConfigError("`model` and `model_name_or_path` of `args` name two models; give one")
    if model is None and config is None:
        raise ConfigError("there is no model; `model=` takes a hub id, a folder or an object")
    raw = _base(config, method or ("" if flow or config is not None else _kind(args, keywords, own)), model)
    spoken = spoken and lookup(raw, "policy.name") == "vision.tokens"
    if model is not None:
        named = _policy(model, processing_class)
        if spoken and "dtype" in named:
            keywords.setdefault("dtype", named.pop("dtype"))  # the dtype of the given model
        raw = merge(raw, {"policy": named})
    keywords |= {} if peft_config is None else lora_of(peft_config)
    raw = merge(raw, nested(quantized(quantization_config)))
    if ref_model is not None:
        _check_reference(ref_model, model, raw)
    names: dict[str, Any] = {}  # registered objects by unique name
    factories = environments_of(environment_factory)
    if tools or factories:
        raw = with_tools(raw, tools or (), factories, names)
    weights = keywords.pop("reward_weights", None)
    raw = _changed(raw, keywords, own, complete=spoken)
    if reward_funcs is not None:
        raw["rewards"] = _rewards(reward_funcs, names)
        raw = merge(raw, _filtered(raw.get("group_filter"), raw["rewards"]))
    if weights is not None:
        raw["rewards"] = _weighted(raw.get("rewards") or (), weights)
    if scored := rewards_of(factories):
        kept = raw.get("rewards") if reward_funcs is not None or config is not None else None
        raw["rewards"] = [*(kept or ()), *scored]
        raw = merge(raw, _filtered(raw.get("group_filter"), raw["rewards"]))
    return parse(_with_data(raw, train_dataset, eval_dataset, factories if config is None else ()), Config)


def _with_data(raw: dict[str, Any], train: Any, test: Any, factories: Sequence[Factory]) -> dict[str, Any]:
    """Add data sets to a configuration; without training data, the environment provides the prompts."""
    if train is not None:
        raw["data"] = data_piece("train_dataset", train, "train", raw.get("data"))
    elif factories:
        raw["data"] = without_rows(factories, raw)
    if test is not None:
        held_out = data_piece("eval_dataset", test, "test", raw.get("data"))
        raw = merge(raw, {"evaluation": {"data": held_out}})
    return raw


def _kind(args: Any, keywords: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Infer grpo, dpo or sft from the class or the names of TRL's arguments."""
    named = args is None or isinstance(args, Mapping)
    kind = kind_of_run(keywords, own) if named else kind_of(args)
    return "supervised" if kind == "sft" else kind


def _changed(
    raw: dict[str, Any], keywords: Mapping[str, Any], own: dict[str, Any], *, complete: bool
) -> dict[str, Any]:
    """Apply TRL arguments (`keywords`), then mmrl keys (`own`); if `complete`, TRL's defaults apply, too."""
    merged = merge(raw, own)
    change, decided, differs = translated(keywords, merged, own, complete=complete)
    change = {k: v for k, v in change.items() if k in decided or lookup(own, k, ABSENT) is ABSENT}
    if keywords:
        tell(tuple(differs))
    return merge(merge(merged, nested(change)), own)


def _base(config: Any, method: str, model: Any) -> dict[str, Any]:
    """Read the configuration to start from: a given one, or defaults for the model and the method."""
    match config:
        case None:
            file = method_file(method or ("flow_grpo" if is_pipeline(model) else "grpo"))
            kind = file.parent.name if file.parent.name in ("flow", "preference") else "vision_language"
            return merge(read(f"defaults/{kind}.yaml"), read(file))
        case Config():
            raw = dict(as_plain(config))
        case _:
            raw = read(config)
    return merge(raw, read(method_file(method))) if method else raw


def is_pipeline(model: Any) -> bool:
    """Whether a model is a pipeline of diffusers, given as an object, a folder, or a hub repository."""
    match model:
        case None:
            return False
        case str() | Path():
            return names_pipeline(str(model))
        case object(components=_):
            return True
    return False


def check_others(others: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an unsupported argument of TRL's trainers, unless its value is None."""
    for name, value in others.items():
        if name not in OTHERS:
            supported = [*OTHERS, *inspect.signature(configuration).parameters]
            raise ConfigError(
                f"the trainer has no argument '{name}'; {nearest(name, supported) or 'see its docstring'}"
            )
        if value is not None and value != (None, None):
            raise ConfigError(f"'{name}' of TRL's trainers is not here. {OTHERS[name]}")


def _check_reference(reference: Any, model: Any, raw: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a reference model has other weights than the initial model."""
    advice = (
        "leave it out, or name its folder as `model` and that of the other weights as `init_from` in `args`"
    )
    if lookup(raw, "objective.name") != "comparison":
        raise ConfigError(f"`ref_model` is for pairs, and this is no run of DPO; {advice}")
    if isinstance(reference, str | Path) or isinstance(model, str | Path):
        names = [str(getattr(one, "name_or_path", one)) for one in (reference, model)]
        if names[0] != names[1]:
            raise ConfigError(f"`ref_model` is '{names[0]}' and `model` '{names[1]}'; {advice}")
    elif reference is not model:
        pairs = [dict(one.state_dict()) for one in (reference, model)]
        if pairs[0].keys() != pairs[1].keys() or not all(
            weight.shape == pairs[1][name].shape and bool((weight == pairs[1][name].to(weight)).all())
            for name, weight in pairs[0].items()
        ):
            raise ConfigError(f"`ref_model` has other weights than `model`; {advice}")


def _policy(model: Any, processor: Any) -> dict[str, Any]:
    """Return the policy options for a model; register a model object, and keep its dtype and attention."""
    match model:
        case str() | Path():
            return {"model": str(model)}
    pipeline = is_pipeline(model)
    if not pipeline and processor is None:
        raise ConfigError(
            f"`model` is a {type(model).__name__}, so `processing_class` is needed: its processor, such as "
            "AutoProcessor.from_pretrained(...)"
        )
    name = objects.put(str(getattr(model, "name_or_path", "") or type(model).__name__), model)
    if pipeline:
        return {"model": name, "dtype": _dtype(model.transformer)}
    objects.put(f"{name.removeprefix(objects.PREFIX)}/processor", processor)
    return {"model": name, "dtype": _dtype(model), "attn_implementation": model.config._attn_implementation}


def _dtype(module: Any) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == module.dtype)


def _arguments(args: Any, *, ours: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `args` into arguments of TRL and nested configuration keys of mmrl.

    Args:
        args: A dictionary, or an object such as a GRPOConfig.
        ours: Whether names that TRL and mmrl share, such as `max_steps`, count as keys of mmrl.
    """
    match args:
        case None:
            return {}, {}
        case Mapping():
            config_keys = {name for name in Config.__dataclass_fields__ if ours or name not in NAMES}
            names = [name for name in args if "." in name or name in config_keys]
            changes = reduce(merge, (nested({name: args[name]}) for name in names), {})
            return {name: value for name, value in args.items() if name not in names}, changes
    return arguments_of(args), {}


def _rewards(rewards: Reward | Sequence[Reward], names: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the configuration of one or several rewards as a list of mappings."""
    match rewards:
        case str() | Mapping() | Callable():
            rewards = [rewards]
    return [reward_piece(reward, names) for reward in rewards]


def _filtered(group_filter: Any, rewards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the change that lets a group filter read the first reward if the run lacks the one it names."""
    names = [one.get("label") or one["name"].rpartition(":")[2].rpartition(".")[2] for one in rewards]
    match group_filter:
        case {"of": str(name)} if names and name not in names:
            return {"group_filter": {"of": names[0]}}
    return {}


def _weighted(pieces: Sequence[Any], weights: float | Sequence[float]) -> list[dict[str, Any]]:
    """Return the rewards with the given weights, in order."""
    weights = as_list(weights)
    if len(weights) != len(pieces):
        raise ConfigError(f"`reward_weights` has {len(weights)} numbers for {len(pieces)} rewards")
    both = zip(pieces, weights, strict=True)
    return [{**as_piece_mapping(piece), "weight": float(weight)} for piece, weight in both]


def reward_piece(reward: Reward, names: dict[str, Any], kind: str = "reward") -> dict[str, Any]:
    """Return the configuration of a reward: its import path if it has one, otherwise a registered object.

    `names` maps names to the objects so far; a second object with the same name gets a numbered name. Pieces
    of another `kind` are handled in the same way.
    """
    match reward:
        case str():
            return {"name": reward}
        case {"name": name, **options}:
            return {**reward_piece(name, names, kind), **options}
        case _ if not callable(reward):
            raise ConfigError(f"a {kind} must be a function, a name or a mapping with a name, not {reward!r}")
    name = type(reward).__name__
    match reward:
        case object(__module__=str(module), __name__=str(name)):
            with suppress(ImportError, AttributeError):
                if import_name(f"{module}:{name}") is reward:
                    return {"name": f"{module}:{name}"}
    numbered = (f"{name}_{number}" for number in count(2))
    free = next(n for n in chain([name], numbered) if names.setdefault(n, reward) is reward)
    return {"name": objects.put(free, reward)}


# ---- tools and environments

NO_LIMIT = 10_000  # maximum number of turns and of images; TRL limits only tokens


@dataclass(frozen=True)
class Factory:
    """An environment factory: a class, a function, a registered name, or a mapping with `name` and options.

    `label` is the name of the environment in the configuration."""

    piece: Any
    label: str
    scores: bool  # whether the environment has `get_reward`


def environments_of(given: Factories | None) -> list[Factory]:
    """List the factories in TRL's `environment_factory`: one factory, or a mapping of labels to factories."""
    if given is None:
        return []
    listed: list[tuple[str, Any]] = [("", given)]
    if isinstance(given, Mapping) and "name" not in given:
        listed = list(given.items())
    factories = []
    for label, piece in listed:
        options = as_mapping(piece) if isinstance(piece, str | Mapping) else {"name": piece}
        target = options["name"]
        target = find("environment", target).target if isinstance(target, str) else target
        if not callable(target):
            raise ConfigError(f"`environment_factory` must be a class or a function, not {target!r}")
        kind = target if isinstance(target, type) else type(target())
        label = label or options.get("label") or kind.__name__
        factories.append(Factory(options, label, callable(getattr(kind, "get_reward", None))))
    return factories


def with_tools(
    raw: dict[str, Any], tools: Sequence[Tool], factories: Sequence[Factory], names: dict[str, Any]
) -> dict[str, Any]:
    """Add the engine that calls tools to a configuration, without limits of turns and images, as in TRL."""
    engines = [as_piece_mapping(engine) for engine in as_list(raw["rollout"]["engine"])]
    if taken := [engine["name"] for engine in engines if engine.get("name") in CONVERSING]:
        raise ConfigError(
            f"the configuration has '{taken[0]}' already; change that, or leave out `tools` and "
            "`environment_factory`"
        )
    engine: dict[str, Any] = {"name": CONVERSING[bool(factories)]}
    engine |= {"max_turns": NO_LIMIT, "max_images": NO_LIMIT}
    if tools:
        engine["tool"] = [reward_piece(tool, names, "tool") for tool in tools]
    if factories:
        engine["environment"] = [
            {**reward_piece(one.piece, names, "environment"), "label": one.label} for one in factories
        ]
    return merge(raw, {"rollout": {"engine": [*engines, engine]}})


def rewards_of(factories: Sequence[Factory]) -> list[dict[str, Any]]:
    """Return a reward configuration, with the environment's label, for every factory with `get_reward`."""
    return [{"name": "precomputed", "key": f.label, "label": f.label} for f in factories if f.scores]


def without_rows(factories: Sequence[Factory], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data configuration for a run without a data set, whose environment provides the tasks."""
    if len(factories) > 1:
        raise ConfigError(
            "of several environments each row names its own in the column `environment`; give `train_dataset`"
        )
    return {"name": "episodes", "count": lookup(raw, "rollout.num_prompts") or 1}


def data_piece(name: str, data: Any, split: str, base: Any) -> dict[str, Any]:
    """Return the configuration of a dataset; data given as a path or as rows are read by the piece `base`."""
    match data:
        case {"name": _}:
            return dict(data)
        case str() | Path():
            path = str(data)
        case _:
            path = put_rows(name, data, split)
    return {**as_piece_mapping(base), "path": path}


def as_piece_mapping(piece: Any) -> dict[str, Any]:
    """Convert a piece (name or mapping) to a mapping with `name`; {} for None."""
    return as_mapping(as_plain(piece or {}))
