"""Rules of TRL's arguments about the run: batches, steps, learning rate, precision, trackers."""

from __future__ import annotations

import math

from mmrl.config.loading import ConfigError
from mmrl.config.plain import as_list, as_mapping
from mmrl.config.trl_given import Change, Given
from mmrl.config.trl_table import ARGUMENTS

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    "sgd": "sgd",
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
TRACKERS = {
    "tensorboard": (),
    "wandb": ("project", "run_name"),
    "trackio": ("project", "run_name", "space_id"),
}


def reward_weights(given: Given) -> Change:
    """`reward_weights`: the weight of each reward in order."""
    weights, rewards = given["reward_weights"], given.at("rewards")
    if rewards is not None and len(rewards) != len(weights):
        raise ConfigError(f"'reward_weights' of TRL has {len(weights)} weights for {len(rewards)} rewards")
    return {f"rewards.{i}.weight": float(weight) for i, weight in enumerate(weights)}


def batches(given: Given) -> Change:
    """Batch sizes: prompts of a collection over all processes, and its optimizer steps."""
    if given.pairs:
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


def steps(given: Given) -> Change:
    """Numbers of optimizer steps, as numbers of collections."""
    change: Change = {}
    if given["max_steps"] > 0:  # wins over epochs, as in TRL
        change["max_steps"] = _collections(given, "max_steps")
        change |= {"num_train_epochs": 0.0} if given.at("num_train_epochs") else {}
    elif "num_train_epochs" in given:
        change["num_train_epochs"] = float(given["num_train_epochs"])
        change |= {"max_steps": None} if given.at("max_steps") else {}
    for name, key in (("logging_steps", "report.logging_steps"), ("save_steps", "save_steps")):
        change |= {key: _collections(given, name)} if name in given else {}
    strategy = given["eval_strategy"]
    if strategy not in ("no", "steps"):
        raise ConfigError(f"'eval_strategy={strategy!r}' of TRL is not here; set 'steps' with `eval_steps`")
    if given.has("eval_steps", "eval_strategy"):
        asked = "eval_steps" if "eval_steps" in given else "logging_steps"
        off = strategy == "no" and "eval_strategy" in given
        change["eval_steps"] = 0 if off else _collections(given, asked)
    return change


def _collections(given: Given, name: str, steps: float | None = None) -> int:
    """Convert a number of optimizer steps, or below 1 a share of all of them, into collections."""
    count: float = given[name] if steps is None else steps
    if count < 1:
        if given["max_steps"] <= 0:
            raise ConfigError(f"'{name}={count}' of TRL is a share of all steps; give `max_steps` too")
        count = count * given["max_steps"]
    return math.ceil(count / given.updates)


def turns(given: Given) -> Change:
    """`max_tool_calling_iterations`: replies of tools, after each of which there is one more turn."""
    if "max_tool_calling_iterations" not in given:
        return {}
    if not given.conversing:
        raise ConfigError(
            "'max_tool_calling_iterations' of TRL limits calls of tools, but no engine has any; add "
            "vision.with_tools or vision.with_environments to `rollout.engine`"
        )
    return {f"{given.conversing}.max_turns": given["max_tool_calling_iterations"] + 1}


def learning_rate(given: Given) -> Change:
    """The learning rate, or the schedule that it follows."""
    there = given.at("learn.learning_rate")
    rate = (
        there if "learning_rate" not in given and isinstance(there, int | float) else given["learning_rate"]
    )
    asked = given.values.get("lr_scheduler_type") or "constant"
    if asked not in SCHEDULES:
        raise ConfigError(
            f"'lr_scheduler_type={asked!r}' of TRL is not here; there are {', '.join(SCHEDULES)}, or write a "
            "schedule at `learn.learning_rate`"
        )
    warmup = given["warmup_steps"] or given["warmup_ratio"]
    warmup = _collections(given, "warmup_steps", warmup) if warmup else 0
    warm = {"warmup_steps": warmup} if warmup else {}
    if SCHEDULES[asked] == "constant":
        return {"learn.learning_rate": {"name": "constant", "value": rate, **warm} if warm else rate}
    total = _collections(given, "max_steps") if given["max_steps"] > 0 else None
    total = given.at("max_steps") if total is None and "num_train_epochs" not in given else total
    length = {"steps": total} if total else {}  # without a number as long as the run
    return {"learn.learning_rate": {"name": asked, "start": rate, "end": 0.0, **length, **warm}}


def optimizer(given: Given) -> Change:
    """The optimizer and its options."""
    asked = given["optim"]
    if asked not in OPTIMIZERS:
        raise ConfigError(f"'optim={asked!r}' of TRL is not here; there are {', '.join(OPTIMIZERS)}")
    name = OPTIMIZERS[asked] if "optim" in given else given.at("learn.optimizer.name") or OPTIMIZERS[asked]
    rows = [(key, row) for key, row in ARGUMENTS.items() if row.rule == "optimizer" and key != "optim"]
    options = {row.key.rpartition(".")[2]: given[key] for key, row in rows if key in given}
    return {"learn.optimizer": {"name": name, **options}}


def sampler(given: Given) -> Change:
    """`shuffle_dataset`: of the first sampler."""
    first, *wrappers = as_list(given.at("sampler")) or ["uniform"]
    return {"sampler": [{**as_mapping(first), "shuffle": given["shuffle_dataset"]}, *wrappers]}


def precision(given: Given) -> Change:
    """`bf16` and `fp16`: what is computed in; trained weights are in float32."""
    if given["bf16"] and given["fp16"]:
        raise ConfigError("'bf16' and 'fp16' of TRL are both True; set one")
    return {"policy.dtype": "bfloat16" if given["bf16"] else "float16" if given["fp16"] else "float32"}


def model(given: Given) -> Change:
    """`model_init_kwargs`."""
    change: Change = {}
    for name, value in (given["model_init_kwargs"] or {}).items():
        key = {"dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attn_implementation"}.get(
            name
        )
        if key is None:
            raise ConfigError(
                f"'model_init_kwargs' of TRL may not have '{name}' here; see `mmrl list policy`"
            )
        change[f"policy.{key}"] = str(value).removeprefix("torch.")
    return change


def device(given: Given) -> Change:
    """`use_cpu`, where there is nothing else."""
    import torch

    if given["use_cpu"] and torch.cuda.is_available():
        raise ConfigError(
            "'use_cpu' of TRL is not here; hide the GPU with CUDA_VISIBLE_DEVICES= in the environment"
        )
    return {}


def trackers(given: Given) -> Change:
    """`report_to`, and the names that dashboards show."""
    names = as_list(given["report_to"])
    if "report_to" not in given:
        names = [as_mapping(piece)["name"] for piece in given.at("report.trackers") or ()]
    every = names == ["all"]
    names = list(TRACKERS) if every else [name for name in names if name != "none"]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ConfigError(f"'report_to={unknown[0]!r}' of TRL is not here; there are {', '.join(TRACKERS)}")
    sources = {"run_name": "run_name", "project": "project", "space_id": "trackio_space_id"}
    return {
        "report.trackers": [
            {
                "name": tracker,
                **{
                    option: given[sources[option]] for option in TRACKERS[tracker] if sources[option] in given
                },
                **({"required": False} if every else {}),
            }
            for tracker in names
        ]
    }


def best(given: Given) -> Change:
    """The metric by which the best checkpoint is kept."""
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


RUN_RULES = {
    f.__name__: f
    for f in (
        reward_weights,
        batches,
        steps,
        turns,
        learning_rate,
        optimizer,
        sampler,
        precision,
        model,
        device,
        trackers,
        best,
    )
}
