"""From what a Python program hands over (objects, functions, datasets, TRL's keywords) to a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import chain, count
from pathlib import Path
from typing import Any

from mmrl.config import objects
from mmrl.config.loading import ConfigError, merge, nearest, read
from mmrl.config.plain import as_list, as_mapping, lookup, nested
from mmrl.config.registry import find, import_name
from mmrl.config.schema import Config, as_plain, parse
from mmrl.config.trl_arguments import arguments_of, translate, with_defaults
from mmrl.config.trl_given import CONVERSING
from mmrl.data.object_rows import put_rows
from mmrl.inference.sources import names_pipeline
from mmrl.runtime.modules import DTYPES

Reward = Callable[..., Any] | str | Mapping[str, Any]
Tool = Callable[..., Any] | str | Mapping[str, Any]
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
    method: str = "",
    config: str | Path | Mapping[str, Any] | Config | None = None,
) -> Config:
    """Make the configuration of a run from the arguments of `mmrl.Trainer`, which documents them."""
    if model is None and config is None:
        raise ConfigError("there is no model; `model=` takes a hub id, a folder or an object")
    raw = _base(config, method, model)
    if model is not None:
        raw = merge(raw, {"policy": _policy(model, processing_class)})
    if peft_config is not None:
        raw = merge(raw, {"policy": _lora(peft_config)})
    names: dict[str, Any] = {}  # objects of this call, so that two functions of one name stay two
    factories = environments_of(environment_factory)
    if tools or factories:
        raw = with_tools(raw, tools or (), factories, names)
    weights, changes = _changes(args, raw, complete=not method and config is None)
    raw = reduce(merge, changes, raw)
    if reward_funcs is not None:
        raw["rewards"] = _rewards(reward_funcs, names)
        raw = merge(raw, _filtered(raw.get("group_filter"), raw["rewards"]))
    if weights is not None:
        raw["rewards"] = _weighted(raw.get("rewards") or (), weights)
    if own := rewards_of(factories):
        kept = raw.get("rewards") if reward_funcs is not None or config is not None else None
        raw["rewards"] = [*(kept or ()), *own]
        raw = merge(raw, _filtered(raw.get("group_filter"), raw["rewards"]))
    if factories and train_dataset is None and config is None:
        raw["data"] = without_rows(factories, raw)
    if train_dataset is not None:
        raw["data"] = data_piece("train_dataset", train_dataset, "train", raw.get("data"))
    if eval_dataset is not None:
        held_out = data_piece("eval_dataset", eval_dataset, "test", raw.get("data"))
        raw = merge(raw, {"evaluation": {"data": held_out}})
    return parse(raw, Config)


def _base(config: Any, method: str, model: Any) -> dict[str, Any]:
    """Read what the run begins with: a whole configuration, or the defaults of the model and the method."""
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


def method_file(name: str) -> Path:
    """Find the file of a method by its name, such as "dapo"."""
    package = Path(__file__).parents[1]
    homes = [home / "methods" for home in (package / "configs", package.parent / "configs")]
    files = {file.stem: file for home in homes for file in home.glob("*/*.yaml")}
    if name not in files:
        hint = nearest(name, files) or f"there are {', '.join(sorted(files))}"
        raise ConfigError(f"there is no method '{name}'; {hint}")
    return files[name]


def is_pipeline(model: Any) -> bool:
    """Return whether a model is a pipeline of diffusers: an object, a folder, or a repository of the hub."""
    match model:
        case None:
            return False
        case str() | Path():
            return names_pipeline(str(model))
        case object(components=_):
            return True
    return False


def _policy(model: Any, processor: Any) -> dict[str, Any]:
    """Name a model in a configuration; an object is kept, with its precision and attention."""
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


def _lora(config: Any) -> dict[str, Any]:
    """Read rank and alpha of a `LoraConfig`; anything else that it sets is an error."""
    plain = vars(type(config)(r=config.r, lora_alpha=config.lora_alpha))
    harmless = {"task_type", "base_model_name_or_path", "inference_mode"}
    if config.target_modules == "all-linear":  # as here: those of the language model
        harmless |= {"target_modules"}
    other = sorted(
        name for name, value in vars(config).items() if value != plain[name] and name not in harmless
    )
    if other:
        raise ConfigError(
            f"of `peft_config` only r and lora_alpha are read, but it sets {', '.join(other)}; leave that "
            "out, or make the adapter with peft, save it, and name its folder: args={'policy.adapter': ...}"
        )
    return {"lora_rank": config.r, "lora_alpha": float(config.lora_alpha)}


def _changes(
    args: Any, raw: Mapping[str, Any], complete: bool
) -> tuple[Sequence[float] | None, list[dict[str, Any]]]:
    """Sort `args` into the weights of rewards and changes of the configuration `raw`.

    In a dictionary a name that both know, such as `max_steps`, is the key of a configuration. A `GRPOConfig`
    or `DPOConfig` is completed by TRL's defaults if `complete` says so, to train what TRL would.
    """
    match args:
        case None:
            return None, []
        case Mapping():
            keywords = dict(args)
            ours = [name for name in args if name in Config.__dataclass_fields__ or "." in name]
        case _:
            keywords, ours = arguments_of(args), []
            if complete:
                keywords = with_defaults(keywords)
    weights = keywords.pop("reward_weights", None)
    changes = [nested({name: keywords.pop(name)}) for name in ours]
    return weights, [translate(keywords, raw), *changes]


def _rewards(rewards: Reward | Sequence[Reward], names: dict[str, Any]) -> list[dict[str, Any]]:
    """Name one reward or several in a configuration."""
    match rewards:
        case str() | Mapping() | Callable():
            rewards = [rewards]
    return [reward_piece(reward, names) for reward in rewards]


def _filtered(group_filter: Any, rewards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Let the filter of a method that reads a reward of its own, as DAPO's does, read the first one given."""
    names = [
        reward.get("label") or reward["name"].rpartition(":")[2].rpartition(".")[2] for reward in rewards
    ]
    match group_filter:
        case {"of": str(name)} if names and name not in names:
            return {"group_filter": {"of": names[0]}}
    return {}


def _weighted(pieces: Sequence[Any], weights: Sequence[float]) -> list[dict[str, Any]]:
    """Give rewards their weights, in order."""
    if len(weights) != len(pieces):
        raise ConfigError(f"`reward_weights` has {len(weights)} numbers for {len(pieces)} rewards")
    return [
        {**as_piece_mapping(piece), "weight": float(weight)}
        for piece, weight in zip(pieces, weights, strict=True)
    ]


def reward_piece(reward: Reward, names: dict[str, Any], kind: str = "reward") -> dict[str, Any]:
    """Name a reward in a configuration: a function by its module where that has it, else as an object.

    `names` holds the objects of the configuration so far; another object of the same name gets a number.
    Pieces of another kind are named alike.
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

NO_LIMIT = 10_000  # turns, images: in TRL tokens alone limit a conversation


@dataclass(frozen=True)
class Factory:
    """What makes environments: a class, a function, a name or a mapping with one, and its label."""

    piece: Any
    label: str
    scores: bool  # by `get_reward`


def environments_of(given: Factories | None) -> list[Factory]:
    """List what makes environments, as TRL takes it: one, or several by the names that rows choose from."""
    match given:
        case None:
            return []
        case {"name": _}:
            listed = [("", given)]
        case Mapping():
            listed = list(given.items())
        case _:
            listed = [("", given)]
    found = []
    for label, piece in listed:
        options = as_mapping(piece) if isinstance(piece, str | Mapping) else {"name": piece}
        target = options["name"]
        target = find("environment", target).target if isinstance(target, str) else target
        if not callable(target):
            raise ConfigError(f"`environment_factory` must be a class or a function, not {target!r}")
        kind = target if isinstance(target, type) else type(target())
        label = label or options.get("label") or kind.__name__
        found.append(Factory(options, label, callable(getattr(kind, "get_reward", None))))
    return found


def with_tools(
    raw: dict[str, Any], tools: Sequence[Tool], factories: Sequence[Factory], names: dict[str, Any]
) -> dict[str, Any]:
    """Add the engine that holds conversations with tools to a configuration, without limits, as in TRL."""
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
            {**reward_piece(factory.piece, names, "environment"), "label": factory.label}
            for factory in factories
        ]
    return merge(raw, {"rollout": {"engine": [*engines, engine]}})


def rewards_of(factories: Sequence[Factory]) -> list[dict[str, Any]]:
    """Name the rewards that environments give themselves, each under the name of its environment."""
    return [{"name": "precomputed", "key": f.label, "label": f.label} for f in factories if f.scores]


def without_rows(factories: Sequence[Factory], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Name the data of a run whose environment says itself what is to be done."""
    if len(factories) > 1:
        raise ConfigError(
            "of several environments each row names its own in the column `environment`; give `train_dataset`"
        )
    return {"name": "episodes", "count": lookup(raw, "rollout.num_prompts") or 1}


def data_piece(name: str, data: Any, split: str, base: Any) -> dict[str, Any]:
    """Name a dataset in a configuration; a path or rows in memory are read by the piece `base`."""
    match data:
        case {"name": _}:
            return dict(data)
        case str() | Path():
            path = str(data)
        case _:
            path = put_rows(name, data, split)
    return {**as_piece_mapping(base), "path": path}


def as_piece_mapping(piece: Any) -> dict[str, Any]:
    """Write a piece of a configuration as a mapping with a name; without one it is empty."""
    return as_mapping(as_plain(piece or {}))
