"""The evaluation that belongs to a training run."""

from __future__ import annotations

from dataclasses import replace

from mmrl.config.schema import Config, EvaluateConfig


def evaluation_of(config: Config | EvaluateConfig) -> EvaluateConfig:
    """Return the evaluation of a training run, with the engine and rewards of the training by default."""
    match config:
        case EvaluateConfig():
            return config
        case Config(evaluation=evaluation):
            engine = evaluation.engine or config.rollout.engine[:1]
            evaluation = replace(evaluation, engine=engine, rewards=evaluation.rewards or config.rewards)
            return EvaluateConfig(config.policy, evaluation, seed=config.seed)
