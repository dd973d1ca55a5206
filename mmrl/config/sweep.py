"""Variants of an evaluation's configuration: its `settings`, and changes to match another evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from mmrl.config.changes import ABSENT
from mmrl.config.loading import ConfigError, merge, nearest
from mmrl.config.plain import nested
from mmrl.config.schema import EvaluateConfig, as_plain, parse


def settings_of(config: EvaluateConfig) -> dict[str, EvaluateConfig]:
    """Return the configuration of every setting, by name, without loading anything."""
    return {name: setting_of(config, name) for name in config.settings}


def setting_of(config: EvaluateConfig, name: str) -> EvaluateConfig:
    """Return the configuration of one setting; raises `ConfigError` for a change that is not allowed.

    Changes have dotted keys like overrides: `{evaluation.engine.0.temperature: 0.7}`. A setting may change
    only the policy and the engine. Prompts, rewards and random draws stay equal, to make results comparable.
    """
    if name not in config.settings:
        hint = nearest(name, config.settings) or f"there are {', '.join(config.settings) or 'none'}"
        raise ConfigError(f"there is no setting '{name}'; {hint}")
    base = replace(config, settings={})
    try:
        raw = as_plain(base)
        for key, value in config.settings[name].items():
            raw = merge(raw, nested({key: as_plain(value)}))
        changed = parse(raw, EvaluateConfig)
    except ConfigError as error:
        raise ConfigError(f"settings.{name}: {error}") from error
    engine = replace(changed.evaluation, engine=base.evaluation.engine)
    same = replace(changed, policy=base.policy, evaluation=engine)  # undo the allowed changes
    for key, value in vars(base).items():
        if vars(same)[key] != value:
            raise ConfigError(
                f"settings.{name} changes '{key}', but settings are compared on the same prompts, "
                "with the same draws and rewards; change the policy and the engine of the evaluation alone"
            )
    return changed


def changed_config(config: EvaluateConfig, changes: Mapping[str, Any]) -> EvaluateConfig:
    """Apply changes {dotted key: value} to a configuration; the value `ABSENT` removes a key."""
    plain = deepcopy(as_plain(replace(config, settings={})))
    for key, value in changes.items():
        if value is ABSENT:
            above, _, name = key.rpartition(".")
            inner = plain
            for part in above.split("."):
                inner = inner[int(part) if isinstance(inner, list) else part]
            inner.pop(name, None)
        else:
            plain = merge(plain, nested({key: value}))
    return parse(plain, EvaluateConfig)
