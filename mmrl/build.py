"""Builds training runs, evaluators and engines from configurations, and checks configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmrl.config.binding import Bound, Pieces
from mmrl.config.loading import ConfigError, change, read
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import HOMES, Entry, Needs
from mmrl.config.schema import Config, EvaluateConfig, Piece, as_piece, as_plain, load, parse
from mmrl.config.sweep import setting_of
from mmrl.core.protocols import Engine, Policy
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.reporting.metrics import Trackers
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import check_hub
from mmrl.training.collect import RewardCoverage
from mmrl.training.evaluate import Evaluator
from mmrl.training.method import Method
from mmrl.training.report import Reporter, ReportPieces
from mmrl.training.trainer import Run


def build(config: Config, *, quiet: bool = False) -> Run:
    """Make a training run from a configuration, which is checked before any weight is loaded."""
    check(config).require_packages()
    stream = Stream(config.seed)
    pieces = Pieces(stream)
    make = partial(pieces.make_field, config)
    trackers = make("report.trackers")
    data = pieces.prompts(config.data, "data")
    eval_prompts = held_out(config) if config.evaluation.data else ()
    torch.manual_seed(config.seed)  # adapters draw their first weights from the global stream
    processes = Processes(config.ddp_timeout)
    policy, objective = make("policy"), make("objective")
    _check_outputs(config, objective.needs, policy.says)
    method = Method(
        policy=policy,
        optimizer=processes.place(policy, make("learn.optimizer"), config.learn.max_grad_norm),
        references=make("references", policy),
        sampler=make("sampler", data),
        engine=make_engine(pieces, config.rollout.engine, policy, "rollout.engine"),
        rewards=make("rewards"),
        group_filter=make("group_filter"),
        chain=make("advantage"),
        objective=objective,
        learning_rate=pieces.number(config.learn.learning_rate, NonNegativeFloat, "learn.learning_rate"),
    )
    evaluator = make_evaluator(config, eval_prompts, policy, processes) if eval_prompts else None
    watching = ReportPieces(
        metrics=make("metrics"),
        visualizations=make("report.visualizations"),
        alarms=make("report.checks"),
        checkups=make("report.startup_checks"),
        trackers=Trackers(trackers),
    )
    pieces.made["rewards"] = RewardCoverage(method.rewards, len(data))
    return Run(
        config, pieces, processes, method, Reporter(config, processes, stream, watching, quiet), evaluator
    )


def make_engine(pieces: Pieces, listed: Sequence[Piece], policy: Policy, place: str) -> Engine:
    """Build a chain of engines: the first wraps the policy, each next one the engine before it."""
    engine: Any = policy
    for i, piece in enumerate(listed):
        engine = pieces.make("engine", piece, engine, place=f"{place}[{i}]")
    return engine


# ---- checking


def check(config: Config) -> Pieces:
    """Check every name, option and join of a configuration without loading anything.

    Returns the pieces, so that a caller that will run them can require their packages.
    """
    pieces = Pieces(Stream())
    parse(as_plain(config), Config)  # types and ranges, where it was not read from a file
    _check_together(config)
    check_hub(config)
    checked = pieces.check_all(config)
    _check_rewards(checked, "rewards")
    _check_rewards(checked, "evaluation.rewards", weighted=False)
    chain, engines = _listed(checked, "advantage"), _listed(checked, "rollout.engine")
    for i, bound in enumerate(chain):
        options = {name: p.default for name, p in bound.entry.options.items()} | bound.options
        compares = "group" in (options.get("by") or ()) and options.get("singleton") == "zero"
        if compares and config.rollout.num_generations == 1:
            raise ConfigError(
                f"advantage[{i}]: '{bound.entry.full_name}' compares the rollouts of a prompt, but "
                "rollout.num_generations is 1, so every advantage would be 0; ask for 2 or more, or set "
                "`singleton: raw`"
            )
    needs = _needs_of(config, checked)
    _check_outputs(config, needs, _declared(checked["policy"].entry, "says"))
    notes = frozenset().union(*(_declared(engine.entry, "notes") for engine in engines))
    wanted = needs.notes.union(*(bound.needs.notes for bound in chain))
    missing = (wanted | ({"logp"} if "engine" in needs.others else set())) - notes
    if missing:
        raise ConfigError(
            f"the chain or the objective reads the notes {sorted(missing)}, which the engines do not "
            f"take; they note {sorted(notes) or 'nothing'}"
        )
    return pieces


def check_some(raw: Mapping[str, Any], config: Any) -> None:
    """Check a part of a configuration, such as a variant, which has no policy and no data."""
    pieces = Pieces(Stream())
    for name, option in (raw.get("policy") or {}).items():
        if name in HOMES:  # of the policy that a run will name
            pieces.check(name, as_piece(option, f"policy.{name}"), f"policy.{name}")
    checked = pieces.check_all(config)
    if config.objective is not None:
        _needs_of(config, checked)


def check_measuring(config: Config | EvaluateConfig) -> Pieces:
    """Check every name and option of an evaluation without loading anything."""
    config, pieces = evaluation_of(config), Pieces(Stream())
    _check_rewards(pieces.check_all(config), "evaluation.rewards", weighted=False)
    if config.evaluation.data is None:
        raise ConfigError("'evaluation.data' is missing, so there is nothing to evaluate on")
    for name in ("engine", "rewards"):
        if not getattr(config.evaluation, name):
            raise ConfigError(f"'evaluation.{name}' is empty; name at least one")
    return pieces


def _listed(checked: Mapping[str, Any], place: str) -> list[Bound]:
    return [bound for name, bound in checked.items() if name.startswith(f"{place}[")]


def _check_together(config: Config) -> None:
    """Raise if keys contradict each other."""
    learn, rollout, best = config.learn, config.rollout, config.metric_for_best_model
    unmeasured = not config.eval_steps or config.save_steps % config.eval_steps
    contradictions = {
        f"'learn.minibatches' is {learn.minibatches}, but there are only {rollout.num_prompts} groups "
        "(rollout.num_prompts) to part": learn.minibatches > rollout.num_prompts,
        f"'eval_steps' is {config.eval_steps}, but 'evaluation.data' names nothing to measure on": (
            config.eval_steps and config.evaluation.data is None
        ),
        f"'metric_for_best_model' is '{best}', so 'save_steps' ({config.save_steps}) must be a multiple of "
        f"'eval_steps' ({config.eval_steps}): only then is it measured where a checkpoint is written": (
            best.startswith("eval_") and unmeasured
        ),
        "'rollout.engine' is empty; name the engine that makes rollouts": not rollout.engine,
        f"'rollout.policy' is '{rollout.policy}', which is not in `references` "
        f"({', '.join(config.references) or 'none'})": (
            rollout.policy and rollout.policy not in config.references
        ),
    }
    for message, holds in contradictions.items():
        if holds:
            raise ConfigError(message)


def _check_rewards(checked: Mapping[str, Any], place: str, *, weighted: bool = True) -> None:
    rewards = _listed(checked, place)
    for name, count in Counter(bound.name for bound in rewards).items():
        if count > 1:
            raise ConfigError(f"{place}: two rewards are called '{name}'; give one of them a `label`")
    if weighted and not any(bound.weight for bound in rewards):
        raise ConfigError(f"{place}: no reward has a weight, so there is nothing to learn from")


def _needs_of(config: Config, checked: Mapping[str, Any]) -> Needs:
    """Read what an objective needs; the policies that it compares with must be references."""
    needs = getattr(checked["objective"], "needs", None)
    if not isinstance(needs, Needs):
        raise ConfigError(
            f"objective: '{config.objective.name}' is no objective: it does not declare `needs`"
        )
    missing = set(needs.others) - set(config.references) - {"old", "engine"}
    if missing:
        raise ConfigError(
            f"the objective compares with {sorted(missing)}, but `references` has "
            f"{sorted(config.references) or 'nothing'}; add for instance `references: {{ref: frozen}}`"
        )
    return needs


def _check_outputs(config: Config, needs: Needs, says: frozenset[str]) -> None:
    missing = needs.extra.union(*needs.others.values()) - says
    if missing:
        raise ConfigError(
            f"the objective reads {sorted(missing)} of the policy, which '{config.policy.name}' does "
            f"not say as it is set up; it says {sorted(says) or 'nothing'} besides log-probabilities"
        )


def _declared(entry: Entry, name: str) -> frozenset[str]:
    """Read what a class declares: the outputs that a policy `says`, the `notes` of an engine."""
    if not hasattr(entry.target, name):
        raise ConfigError(f"'{entry.full_name}' is no {entry.kind}: it does not declare `{name}`")
    return getattr(entry.target, name)


# ---- evaluation


def evaluation_of(config: Config | EvaluateConfig) -> EvaluateConfig:
    """The evaluation of a training run; an engine or rewards that it leaves out are those of the training."""
    match config:
        case EvaluateConfig():
            return config
        case Config(evaluation=evaluation):
            engine = evaluation.engine or config.rollout.engine[:1]
            evaluation = replace(evaluation, engine=engine, rewards=evaluation.rewards or config.rewards)
            return EvaluateConfig(config.policy, evaluation, seed=config.seed)


def held_out(config: Config | EvaluateConfig) -> Sequence[Prompt]:
    """Read the prompts of the evaluation."""
    pieces, wanted = Pieces(Stream(config.seed, purpose="evaluate")), config.evaluation
    return pieces.prompts(wanted.data, "evaluation.data")[: wanted.num_prompts or None]


def make_evaluator(
    config: Config | EvaluateConfig, prompts: Sequence[Prompt], policy: Policy, processes: Processes
) -> Evaluator:
    """Make an evaluator; an engine or rewards that `evaluation` leaves out are those of the training."""
    config = evaluation_of(config)
    stream, wanted = Stream(config.seed, purpose="evaluate"), config.evaluation
    pieces = Pieces(stream)
    return Evaluator(
        data=prompts,
        processes=processes,
        stream=stream,
        engine=make_engine(pieces, wanted.engine, policy, "evaluation.engine"),
        rewards=pieces.make_field(config, "evaluation.rewards"),
        metrics=pieces.make_field(config, "evaluation.metrics"),
        num_generations=wanted.num_generations,
        confidence=wanted.confidence,
    )


def load_evaluator(config: Config | EvaluateConfig) -> Evaluator:
    """Load a policy and make its evaluator."""
    check_measuring(config).require_packages()
    pieces, processes = Pieces(Stream(config.seed)), Processes()
    prompts = held_out(config)  # before a weight is loaded
    return make_evaluator(config, prompts, _load_policy(config, pieces, processes), processes).agreed()


def load_engine(
    source: str | Path | Config | EvaluateConfig, overrides: Sequence[str] = (), *, setting: str = ""
) -> Engine:
    """Build the engine of a configuration for inference: `load_engine("run.yaml").rollout(prompts)`.

    The engine has its cache and transforms. Raises `ConfigError` where the configuration names no engine.

    Args:
        source: File or configuration; of a training run its rollout engine, of an evaluation its engine.
        overrides: Changes as on the command line, such as "policy.model=...".
        setting: Name of one of the `settings` of an evaluation.
    """
    if is_dataclass(source):
        config = parse(change(as_plain(source), overrides), type(source))
    else:
        config = load(source, overrides, Config if "rollout" in read(source, overrides) else EvaluateConfig)
    match config:
        case Config() if setting:
            raise ConfigError(f"'{setting}' is to be a setting of an evaluation, but this is a training run")
        case Config():
            place, listed = "rollout.engine", config.rollout.engine
        case EvaluateConfig():
            config = setting_of(config, setting) if setting else config
            place, listed = "evaluation.engine", config.evaluation.engine
    if not listed:
        raise ConfigError(f"'{place}' is empty; name the engine that answers")
    pieces = Pieces(Stream(config.seed))
    pieces.check("policy", config.policy)
    for i, piece in enumerate(listed):
        pieces.check("engine", piece, f"{place}[{i}]")
    pieces.require_packages()
    return make_engine(pieces, listed, _load_policy(config, pieces, Processes()), place)


def _load_policy(config: Config | EvaluateConfig, pieces: Pieces, processes: Processes) -> Policy:
    policy = pieces.make("policy", config.policy)
    policy.module.to(processes.device)
    return policy
