"""Translation of TRL's arguments for the run: batches, steps, optimizer, model, rewards, trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.config.plain import as_list, as_mapping
from mmrl.trl.given import Change, Given

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    "sgd": "sgd",
}
SCHEDULES = {
    **{name: name for name in ("constant", "linear", "cosine")},
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}
_NAMED = ("project", "run_name")
TRACKERS = {"tensorboard": (), "wandb": _NAMED, "trackio": (*_NAMED, "space_id")}  # maps trackers to options
REWARDS = "open_r1.rewards"  # open-r1's module; its recipes use short names
SHORT_REWARDS = {
    **{name: f"{name}_reward" for name in ("accuracy", "format", "tag_count", "reasoning_steps")},
    "length": "len_reward",
}


def rewards(given: Given) -> Change:
    """Translate `reward_funcs` to names of rewards, and `reward_weights` to their weights, in order."""
    named, weights = as_list(given["reward_funcs"]), as_list(given["reward_weights"])
    count = len(named) if named else len(given.at("rewards") or weights)
    if weights and count != len(weights):
        raise ConfigError(f"'reward_weights' of TRL has {len(weights)} weights for {count} rewards")
    if not named:
        return {f"rewards.{i}.weight": float(weight) for i, weight in enumerate(weights)}
    shares = [{"weight": float(weight)} for weight in weights] or [{}] * count
    return {"rewards": [{"name": _reward(name), **share} for name, share in zip(named, shares, strict=True)]}


def _reward(name: str) -> str:
    """Convert a reward name of TRL or open-r1 (function, dotted path or short name) to `module:function`."""
    if name in SHORT_REWARDS:
        return f"{REWARDS}:{SHORT_REWARDS[name]}"
    if ":" in name:
        return name
    if "." in name:
        return ":".join(name.rsplit(".", 1))
    if name.endswith("_reward"):
        return f"trl.rewards:{name}"
    raise ConfigError(
        f"'reward_funcs' has '{name}', which only its own script knows; name the function as module:function"
    )


def batches(given: Given) -> Change:
    """Translate batch sizes to prompts and optimizer steps per training step, over all processes."""
    if given.kind != "grpo":
        return {"rollout.num_prompts": given.completions}
    group = given.values.get("num_generations") or given.at("rollout.num_generations") or 8
    if given.generated % group:
        raise ConfigError(
            f"{given.generated} completions of a generation are no whole groups of {group} (num_generations)"
        )
    return {
        "rollout.num_prompts": given.generated // group,
        "learn.minibatches": given.generated // given.completions,
    }


def length_of_run(given: Given) -> Change:
    """Translate `max_steps` or `num_train_epochs` to the length of the run."""
    if given["max_steps"] > 0:  # takes precedence over epochs, as in TRL
        steps: Change = {"max_steps": _collections(given, "max_steps")}
        return steps | ({"num_train_epochs": 0.0} if given.at("num_train_epochs") else {})
    if "num_train_epochs" in given:
        epochs: Change = {"num_train_epochs": float(given["num_train_epochs"])}
        return epochs | ({"max_steps": None} if given.at("max_steps") else {})
    return {}


def logging(given: Given) -> Change:
    """Translate `logging_steps` from optimizer steps to mmrl's training steps."""
    return {"report.logging_steps": _whole(given, "logging_steps")}


def saves(given: Given) -> Change:
    """Translate the arguments for how often checkpoints are written, and how many are kept."""
    strategy = _strategy(given, "save_strategy")
    change: Change = {}
    if strategy != "steps":
        change["save_steps"] = 0 if strategy == "no" else _epoch(given, "save_strategy")
    elif given.has("save_steps", "save_strategy"):
        change["save_steps"] = _shared(given, "save_steps")
    if "save_total_limit" in given or given.whole:
        change["save_total_limit"] = given["save_total_limit"] or 0
    return change


def evaluations(given: Given) -> Change:
    """Translate the arguments for how often held-out prompts are evaluated."""
    strategy = _strategy(given, "eval_strategy")
    if strategy == "no" and "eval_strategy" in given:
        return {"eval_steps": 0}
    if strategy == "epoch":
        return {"eval_steps": _epoch(given, "eval_strategy")}
    return {"eval_steps": _shared(given, "eval_steps" if "eval_steps" in given else "logging_steps")}


def _strategy(given: Given, name: str) -> str:
    if given[name] not in ("no", "steps", "epoch"):
        raise ConfigError(f"'{name}={given[name]!r}' of TRL is not here; there are no, steps and epoch")
    return given[name]


def _epoch(given: Given, name: str) -> float:
    """Return the length of one epoch as a fraction of the run; 0 if the run is at most one epoch."""
    if given["max_steps"] > 0:
        raise ConfigError(
            f"'{name}=epoch' of TRL needs `num_train_epochs`, and `max_steps` is given; set 'steps'"
        )
    epochs = float(given["num_train_epochs"])
    return 1 / epochs if epochs > 1 else 0


def _shared(given: Given, name: str) -> float:
    """Convert optimizer steps to mmrl's training steps; keep a fraction if the length is in epochs."""
    return given[name] if given[name] < 1 and given["max_steps"] <= 0 else _whole(given, name)


def _whole(given: Given, name: str) -> int:
    """Convert a number of optimizer steps, or a fraction below 1 of all steps, to mmrl's training steps."""
    if given[name] < 1 and given["max_steps"] <= 0:
        raise ConfigError(f"'{name}={given[name]}' of TRL is a share of all steps; give `max_steps` too")
    return _collections(given, name)


def _collections(given: Given, name: str) -> int:
    count: float = given[name] if given[name] >= 1 else given[name] * given["max_steps"]
    return math.ceil(count / given.updates)


def turns(given: Given) -> Change:
    """Translate `max_tool_calling_iterations` to `max_turns`, which is larger by one."""
    if not given.conversing:
        raise ConfigError(
            "'max_tool_calling_iterations' of TRL limits calls of tools, but no engine has any; add "
            "vision.with_tools or vision.with_environments to `rollout.engine`"
        )
    return {f"{given.conversing}.max_turns": given["max_tool_calling_iterations"] + 1}


def learning_rate(given: Given) -> Change:
    """Translate the learning rate and its scheduler to a constant rate or a schedule."""
    there = given.at("learn.learning_rate")
    rate = (
        there if "learning_rate" not in given and isinstance(there, int | float) else given["learning_rate"]
    )
    kind = given.values.get("lr_scheduler_type") or "constant"
    if kind not in SCHEDULES:
        raise ConfigError(
            f"'lr_scheduler_type={kind!r}' of TRL is not here; there are {', '.join(SCHEDULES)}, or write a "
            "schedule at `learn.learning_rate`"
        )
    more = dict(given["lr_scheduler_kwargs"] or {})
    end = 0.0
    if kind == "cosine_with_min_lr":
        lowest, share = more.pop("min_lr", None), more.pop("min_lr_rate", None)
        if (lowest is None) == (share is None):
            raise ConfigError(
                "'cosine_with_min_lr' of TRL needs `min_lr` or `min_lr_rate` in lr_scheduler_kwargs"
            )
        end = float(lowest) if lowest is not None else share * rate
    if more:
        raise ConfigError(
            f"'lr_scheduler_kwargs' of TRL may not have {', '.join(more)} with '{kind}'; write a "
            "schedule at `learn.learning_rate`"
        )
    warmup = given["warmup_steps"] or given["warmup_ratio"]
    warmup = math.ceil(warmup / given.updates) if warmup >= 1 else warmup
    warm = {"warmup_steps": warmup} if warmup else {}
    if SCHEDULES[kind] == "constant":
        return {"learn.learning_rate": {"name": "constant", "value": rate, **warm} if warm else rate}
    total = _collections(given, "max_steps") if given["max_steps"] > 0 else None
    total = given.at("max_steps") if total is None and "num_train_epochs" not in given else total
    length = {"steps": total} if total else {}  # default: the length of the run
    return {"learn.learning_rate": {"name": SCHEDULES[kind], "start": rate, "end": end, **length, **warm}}


def optimizer(given: Given) -> Change:
    """Translate `optim` and optimizer hyperparameters to an optimizer with options."""
    optim = given["optim"]
    if optim not in OPTIMIZERS:
        raise ConfigError(f"'optim={optim!r}' of TRL is not here; there are {', '.join(OPTIMIZERS)}")
    name = OPTIMIZERS[optim] if "optim" in given else given.at("learn.optimizer.name") or OPTIMIZERS[optim]
    options = {"weight_decay": "weight_decay"}
    if name != "sgd":
        options |= {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
    taken = {ours: given[theirs] for ours, theirs in options.items() if theirs in given}
    return {"learn.optimizer": {"name": name, **taken}}


def sampler(given: Given) -> Change:
    """Translate `shuffle_dataset` and `train_sampling_strategy` to the innermost sampler or its options."""
    first, *wrappers = as_list(given.at("sampler")) or ["uniform"]
    strategy, known = given["train_sampling_strategy"], ("random", "sequential", "group_by_length")
    if strategy not in known[: 3 if given.kind == "sft" else 1]:
        raise ConfigError(
            f"'train_sampling_strategy={strategy!r}' of TRL is not here; there are {', '.join(known)} for "
            "SFT, and `shuffle_dataset=False` gives data order for GRPO"
        )
    if strategy == "group_by_length":
        column = {"length_column": given["length_column_name"]} if "length_column_name" in given else {}
        return {"sampler": [{"name": strategy, **column}, *wrappers]}
    # For SFT, `shuffle_dataset` matters only for packing; rows are drawn at random anyway.
    shuffle = given["shuffle_dataset"] if given.kind == "grpo" else strategy == "random"
    return {"sampler": [{**as_mapping(first), "shuffle": shuffle}, *wrappers]}


def rows(given: Given) -> Change:
    """Translate SFT's `packing`, `max_length`, and the arguments that choose the trained tokens."""
    if given.kind != "sft":
        return {}
    change: Change = {"policy.packing": bool(given["packing"] or given["padding_free"])}
    if given["completion_only_loss"] and given["assistant_only_loss"]:
        raise ConfigError(
            "with `completion_only_loss` and `assistant_only_loss` TRL learns the assistant's turns inside "
            "the completion, which is one turn here; give one of them"
        )
    names = [name for name in ("completion_only_loss", "assistant_only_loss") if name in given]
    names += ["max_length"] if "max_length" in given else []
    return change | {f"rollout.engine.0.{name}": given[name] for name in names}


# ---- the model


def model(given: Given) -> Change:
    """Translate arguments for loading the model; `bf16` or `fp16` set the dtype, else the weights' dtype."""
    kwargs = {name: value for name, value in (given["model_init_kwargs"] or {}).items() if value is not None}
    stored = [kwargs.pop(name, None) for name in ("dtype", "torch_dtype")]
    stored += [given.values.get(name) for name in ("dtype", "torch_dtype")]
    stored = [str(value).removeprefix("torch.") for value in stored if value is not None]
    attention = kwargs.pop("attn_implementation", None) or given["attn_implementation"]
    change: Change = {"policy.attn_implementation": attention} if attention else {}
    change |= quantized(kwargs.pop("quantization_config", None))
    for name in ("device_map", "low_cpu_mem_usage", "use_cache"):  # these do not affect training
        kwargs.pop(name, None)
    neutral = {"revision": "main", "trust_remote_code": False}
    if odd := [name for name, value in kwargs.items() if name not in neutral or value != neutral[name]]:
        raise ConfigError(
            f"'model_init_kwargs' of TRL may not have {odd[0]}={kwargs[odd[0]]!r} here; see "
            "`mmrl list policy`"
        )
    if "bf16" in given and given["bf16"] and given["fp16"]:
        raise ConfigError("'bf16' and 'fp16' of TRL are both True; set one")
    if stored or given.has("bf16", "fp16"):
        half = not given["fp16"] if given["bf16"] is None and given.whole else given["bf16"]
        plain = "bfloat16" if stored[:1] == ["auto"] else (*stored, "float32")[0]
        change["policy.dtype"] = "bfloat16" if half else "float16" if given["fp16"] else plain
    return change


def adapter(given: Given) -> Change:
    """Translate `use_peft` and the LoRA arguments to an adapter, which is trained instead of the model."""
    if not given["use_peft"]:
        return {}
    rank, alpha = given["lora_r"], float(given["lora_alpha"])
    alpha = alpha * math.sqrt(rank) if given["use_rslora"] else alpha  # mmrl scales by alpha / rank
    layers = [name.strip().rstrip(",") for name in as_list(given["lora_target_modules"])]
    named = {"policy.lora_target_modules": layers} if layers and layers != ["all-linear"] else {}
    return {"policy.lora_rank": rank, "policy.lora_alpha": alpha, **named}


def quantization(given: Given) -> Change:
    """Translate `load_in_4bit` and `load_in_8bit` to a transform that quantises frozen weights."""
    names = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type")
    return quantized(
        {**{n: given[n] for n in names}, "bnb_4bit_use_double_quant": given["use_bnb_nested_quant"]}
    )


def quantized(config: Any) -> Change:
    """Translate a `BitsAndBytesConfig`, or a mapping with its argument names; {} for None."""
    options = dict(config) if isinstance(config, Mapping) else vars(config) if config is not None else {}
    options = {name.removeprefix("_"): value for name, value in options.items()}
    if options.get("load_in_4bit") and options.get("load_in_8bit"):
        raise ConfigError("'load_in_4bit' and 'load_in_8bit' of TRL are both True; set one")
    piece: dict[str, Any] = {"name": "compression.bnb_quantize", "nbits": 8}
    if options.get("load_in_4bit"):
        kind, double = options.get("bnb_4bit_quant_type") or "fp4", options.get("bnb_4bit_use_double_quant")
        piece |= {"nbits": 4, "kind": kind, "double": bool(double)}
    return {"policy.transform": [piece]} if options.get("load_in_4bit") or options.get("load_in_8bit") else {}


def checkpointing(given: Given) -> Change:
    """Translate `gradient_checkpointing`, which newer versions of TRL call `activation_checkpointing`."""
    newer = "activation_checkpointing" in given
    name = "activation_checkpointing" if newer else "gradient_checkpointing"
    return {"policy.gradient_checkpointing": bool(given[name])}


def dataset(given: Given) -> Change:
    """Translate `dataset_name`, unless the configuration already has a data path, and `system_prompt`."""
    change: Change = {}
    if "dataset_name" in given and not given.at("data.path"):
        change["data.path"] = given["dataset_name"]
    return change | ({"data.system_prompt": given["system_prompt"]} if given["system_prompt"] else {})


def device(given: Given) -> Change:
    """Raise `ConfigError` for `use_cpu` if there is a GPU; otherwise change nothing."""
    import torch

    if given["use_cpu"] and torch.cuda.is_available():
        raise ConfigError(
            "'use_cpu' of TRL is not here; hide the GPU with CUDA_VISIBLE_DEVICES= in the environment"
        )
    return {}


# ---- output


def trackers(given: Given) -> Change:
    """Translate `report_to` to trackers, with the project and run names for dashboards."""
    names = as_list(given["report_to"])
    if "report_to" not in given:
        names = [as_mapping(piece)["name"] for piece in given.at("report.trackers") or ()]
    every = names == ["all"]
    names = list(TRACKERS) if every else [name for name in names if name != "none"]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ConfigError(f"'report_to={unknown[0]!r}' of TRL is not here; there are {', '.join(TRACKERS)}")
    values = given.values
    options = {
        "run_name": values.get("run_name"),
        "project": values.get("wandb_project") or values.get("project"),
        "space_id": values.get("trackio_space_id"),
    }
    pieces = []
    for name in names:
        taken = {option: options[option] for option in TRACKERS[name] if options[option] is not None}
        pieces.append({"name": name, **taken, **({"required": False} if every else {})})
    return {"report.trackers": pieces}


def best(given: Given) -> Change:
    """Translate the metric for the best checkpoint, and whether larger is better."""
    metric = given["metric_for_best_model"]
    if metric is None:
        if given["load_best_model_at_end"]:
            raise ConfigError(
                "'load_best_model_at_end' of TRL compares a loss where `metric_for_best_model` is not given; "
                "give it"
            )
        return {"greater_is_better": given["greater_is_better"]} if "greater_is_better" in given else {}
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    greater = given["greater_is_better"]
    return {
        "metric_for_best_model": metric,
        "greater_is_better": not metric.endswith("loss") if greater is None else greater,
    }


RULES = {
    f.__name__: f
    for f in (
        rewards, batches, length_of_run, logging, saves, evaluations, turns, learning_rate, optimizer,
        sampler, rows, model, adapter, quantization, checkpointing, dataset, device, trackers, best,
    )
}  # fmt: skip
