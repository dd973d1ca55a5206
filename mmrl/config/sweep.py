"""Settings of an evaluation: named sets of changes, each of which gives one configuration."""

from __future__ import annotations

from dataclasses import replace

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
