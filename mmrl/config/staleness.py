"""Checks of `rollout.max_staleness`, and the default correction for rollouts of older weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.config.registry import Entry, Needs
from mmrl.config.schema import Config, Piece

CORRECTION = Piece("truncated_importance")  # default `step_weight` for rollouts of older weights


def lacks_correction(entry: Entry, options: Mapping[str, Any], needs: Needs) -> bool:
    """Whether an objective does not correct for rollouts of older weights, but has the option to do so."""
    return "step_weight" in entry.options.keys() - options.keys() and "engine" not in needs.others


def check_staleness(config: Config, needs: Needs, engines: Sequence[Any]) -> None:
    """Raise `ConfigError` if the engine or objective cannot work with rollouts of older weights."""
    size, last = config.rollout, engines[-1].entry
    if size.max_staleness < 2 and any(bound.options.get("partial_rollouts") for bound in engines):
        raise ConfigError(
            f"'partial_rollouts' let newer weights continue answers, but 'rollout.max_staleness' is "
            f"{size.max_staleness}, so answers are asked with the last weights already; set it to 2 or more"
        )
    if not size.max_staleness:
        return
    begin = f"'rollout.max_staleness' is {size.max_staleness}"
    if size.max_rounds > 1:
        raise ConfigError(
            f"{begin} and 'rollout.max_rounds' {size.max_rounds}, but only one round can be asked for ahead; "
            "set one of them lower"
        )
    if not callable(getattr(last.target, "ask", None)):
        raise ConfigError(
            f"{begin}, but the engine '{last.full_name}' cannot work while the policy learns; list "
            "`ray_workers` last, or ask servers with `vision.vllm`"
        )
    if engines[-1].options.get("sleep_level"):
        raise ConfigError(f"{begin}, so servers work while the policy learns; set `sleep_level: 0`")
    if "engine" not in needs.others and config.objective.options.get("step_weight") is None:
        raise ConfigError(
            f"{begin}, so answers come from older weights, but the objective '{config.objective.name}' "
            "neither compares with them nor has a `step_weight`; take `policy_gradient`, or set it to 0"
        )


def check_pruned(needs: Needs, engines: Sequence[Any]) -> None:
    """Raise `ConfigError` if servers drop video tokens, but the objective has no correction for that."""
    if "engine" not in needs.others and any(bound.options.get("video_pruning_rate") for bound in engines):
        raise ConfigError(
            "with `video_pruning_rate` answers come from a pruned model, but the objective does not compare "
            "with it; add `step_weight: [truncated_importance]` to it"
        )
