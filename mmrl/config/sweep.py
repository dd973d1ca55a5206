"""Settings of an evaluation: named sets of changes, each of which gives a configuration of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import reduce
from typing import Any

from mmrl.config.loading import merge, nearest
from mmrl.config.schema import ConfigError, EvaluateConfig, as_plain, parse


def settings_of(config: EvaluateConfig) -> dict[str, EvaluateConfig]:
    """The configuration of every setting by its name; nothing is loaded.

    Keys of changes are dotted like overrides: `{evaluation.engine.0.temperature: 0.7}`. A setting may change
    the policy and the engine; prompts, rewards and random draws are common, so that results compare.
    """
    base = replace(config, settings={})
    return {name: _changed(base, name, changes) for name, changes in config.settings.items()}


def setting_of(config: EvaluateConfig, name: str) -> EvaluateConfig:
    """The configuration of one setting."""
    if name not in config.settings:
        hint = nearest(name, config.settings) or f"there are {', '.join(config.settings) or 'none'}"
        raise ConfigError(f"there is no setting '{name}'; {hint}")
    return _changed(replace(config, settings={}), name, config.settings[name])


def _changed(base: EvaluateConfig, name: str, changes: Mapping[str, Any]) -> EvaluateConfig:
    try:
        raw = as_plain(base)
        for key, value in changes.items():
            raw = merge(raw, _nested(key, value))
        config = parse(raw, EvaluateConfig)
    except ConfigError as error:
        raise ConfigError(f"settings.{name}: {error}") from error
    engine = replace(config.evaluation, engine=base.evaluation.engine)
    same = replace(config, policy=base.policy, evaluation=engine)
    for field in fields(base):
        if getattr(same, field.name) != getattr(base, field.name):
            raise ConfigError(
                f"settings.{name} changes '{field.name}', but settings are compared on the same prompts, "
                "with the same draws and rewards; change the policy and the engine of the evaluation alone"
            )
    return config


def _nested(key: str, value: Any) -> Any:
    return reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), as_plain(value))
