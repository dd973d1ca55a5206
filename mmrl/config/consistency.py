"""Checks that the sections of a configuration fit together, without loading data or models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any

from mmrl.config.binding import Bound, Pieces
from mmrl.config.engine_checks import check_learning, declared, notes_of
from mmrl.config.evaluation import evaluation_of
from mmrl.config.loading import ConfigError, nearest
from mmrl.config.misplaced import check_all
from mmrl.config.nesting import check_nesting, check_servers
from mmrl.config.plain import as_list
from mmrl.config.ranges import BelowGenerations, DividesGenerations, marks
from mmrl.config.registry import HOMES, Needs, find
from mmrl.config.schema import Config, EvaluateConfig, as_piece, as_plain, parse
from mmrl.config.staleness import check_pruned, check_staleness
from mmrl.config.tags import check_replay, check_tags
from mmrl.core.rng import Stream

OWN_WEIGHTS = "trained weights"  # what a reference holds in memory, unless its class sets `holds`


def check_training(config: Config) -> Pieces:
    """Check the configuration of a training run; return its pieces, to check the installed packages."""
    pieces = Pieces(Stream(), config.policy, config.rollout.max_staleness)
    parse(as_plain(config), Config)  # checks types and ranges, as `load` does for a file
    _check_together(config)
    checked = check_all(pieces, config)
    _check_rewards(checked, "rewards", weighted=_reads_rewards(_listed(checked, "advantage")))
    _check_rewards(checked, "evaluation.rewards", weighted=False)
    _check_reward_names(checked, config.evaluation.correct)
    _check_every_turn(checked)
    _check_metric_notes(pieces, checked)
    check_tags(pieces, checked)
    if config.report.visualizations and not config.evaluation.data:
        raise ConfigError(
            "'report.visualizations' draw what an evaluation answered, and this run has none; add "
            "`evaluation: {data: ...}`"
        )
    if config.until:
        names = [bound.name for bound in _listed(checked, "rewards")]
        _check_metric("until.of", config.until.options.get("of"), names)
    acting = checked.get(f"references.{config.rollout.policy}")
    weights = getattr(acting.entry.target, "holds", OWN_WEIGHTS) if acting else OWN_WEIGHTS
    if weights != OWN_WEIGHTS:
        raise ConfigError(
            f"'rollout.policy' is '{config.rollout.policy}', {weights} of its own, which cannot sample: name "
            "a reference of the policy's own weights (`frozen`, `ema`), or record answers of the other model "
            "and use the engine `offline`"
        )
    chain, engines = _listed(checked, "advantage"), _listed(checked, "rollout.engine")
    for place in ("rollout.engine", "evaluation.engine"):
        check_nesting(_listed(checked, place), place, "policy", "engine")
    check_servers(config)
    check_nesting(_listed(checked, "sampler"), "sampler", "data", "sampler")
    _check_groups(config, chain)
    _check_branching(config, engines)
    check_learning(config.policy, (*engines, *_listed(checked, "evaluation.engine")))
    needs = _needs_of(config, checked)
    chain_needs = reduce(Needs.__or__, (bound.needs for bound in chain), Needs())
    _check_references(config, chain_needs, "the advantage chain reads")
    valued = {str(bound.options.get("value_model") or "") for bound in _listed(checked, "sampler")} - {""}
    sampler_needs = Needs(others=dict.fromkeys(valued, frozenset({"value"})))
    _check_references(config, sampler_needs, "a sampler reads")
    says = _says(config, checked)
    for wanted in (needs, chain_needs, sampler_needs):
        check_outputs(config, wanted, says)
    for place, bound in checked.items():
        if place.startswith("references."):
            needs |= _needs_of_second(config, bound, place, says)
    check_replay(engines)
    check_staleness(config, needs, engines)
    check_pruned(needs, engines)
    notes = frozenset().union(*map(notes_of, engines))
    wanted = needs.notes | pieces.notes("advantage", "sampler", "engine")
    # Comparing with `engine` needs the log-probabilities that the engine recorded while sampling.
    if missing := (wanted | ({"logp"} if "engine" in needs.others else set())) - notes:
        raise ConfigError(
            f"the chain, the objective or a sampler reads the notes {sorted(missing)}, which the engines do "
            f"not take; they note {sorted(notes) or 'nothing'}"
        )
    return pieces


def _reads_rewards(chain: Sequence[Bound]) -> bool:
    """Whether advantages depend on rewards."""
    return all(getattr(bound.entry.target, "reads_rewards", True) for bound in chain)


def _check_groups(config: Config, chain: Sequence[Bound]) -> None:
    """Raise `ConfigError` if an advantage function needs larger groups than `num_generations`."""
    number = config.rollout.num_generations
    for i, bound in enumerate(chain):
        options = {name: p.default for name, p in bound.entry.options.items()} | bound.options
        compares = "group" in (options.get("by") or ()) and options.get("singleton") == "zero"
        # The mean of a group of one is its own reward: r - r = 0.
        if compares and number == 1:
            raise ConfigError(
                f"advantage[{i}]: '{bound.entry.full_name}' compares the rollouts of a prompt, but "
                "rollout.num_generations is 1, so every advantage would be 0; ask for 2 or more, or set "
                "`singleton: raw`"
            )
        for name, wanted in bound.entry.hints.items():
            most = options.get(name)
            if marks(wanted, BelowGenerations) and isinstance(most, int) and number <= most:
                raise ConfigError(
                    f"advantage[{i}].{name} is {most}, but rollout.num_generations is {number}: a "
                    f"prompt has one set for '{bound.entry.full_name}' to compare, so every advantage would "
                    f"be 0; ask for at least {most + 1}, or set '{name}' lower"
                )


def check_some(raw: Mapping[str, Any], config: Any) -> None:
    """Check a partial configuration, such as a variant, which has no policy and no data."""
    pieces = Pieces(Stream())
    for name, option in (raw.get("policy") or {}).items():
        if name in HOMES:  # an option that holds a piece
            pieces.check(name, as_piece(option, f"policy.{name}"), f"policy.{name}")
    checked = check_all(pieces, config)
    if config.objective is not None:
        _needs_of(config, checked)


def check_evaluation(config: Config | EvaluateConfig) -> Pieces:
    """Check every name and option of an evaluation without loading anything."""
    config, pieces = evaluation_of(config), Pieces(Stream())
    checked = check_all(pieces, config)
    check_nesting(_listed(checked, "evaluation.engine"), "evaluation.engine", "policy", "engine")
    check_servers(config)
    _check_rewards(checked, "evaluation.rewards", weighted=False)  # all weights may be 0
    _check_reward_names(checked, config.evaluation.correct)
    _check_every_turn(checked)
    _check_metric_notes(pieces, checked)
    check_tags(pieces, checked)
    evaluation = config.evaluation
    if evaluation.data is None:
        raise ConfigError("'evaluation.data' is missing, so there is nothing to evaluate on")
    for name, named in (("engine", evaluation.engine), ("rewards", evaluation.rewards)):
        if not named:
            raise ConfigError(f"'evaluation.{name}' is empty; name at least one")
    return pieces


def _check_every_turn(checked: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a piece needs an outcome per turn, but the engine returns only the last one."""
    engines = _listed(checked, "rollout.engine")
    evaluating = _listed(checked, "evaluation.engine") or engines[:1]
    for place, bound in checked.items():
        if not (isinstance(bound, Bound) and bound.needs.every_turn):
            continue
        engine = _of_last_turn(evaluating if place.startswith("evaluation.") else engines)
        if engine is not None:
            raise ConfigError(
                f"{place}: '{bound.entry.full_name}' needs an outcome of every turn, but the engine "
                f"'{engine.entry.full_name}' makes one of the last turn alone; set "
                "`turn_outcomes: true` on it"
            )


def _check_metric_notes(pieces: Pieces, checked: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the evaluation's engines record the per-step values that metrics read."""
    engines = _listed(checked, "evaluation.engine") or _listed(checked, "rollout.engine")[:1]
    if missing := pieces.notes("metric") - frozenset().union(*map(notes_of, engines)):
        raise ConfigError(
            f"evaluation.metrics read the notes {sorted(missing)}, which the engines do not take"
        )


def _of_last_turn(engines: Sequence[Bound]) -> Bound | None:
    """Find the engine that returns an outcome for the last turn only; None if every turn has one."""
    for engine in reversed(engines):
        if getattr(engine.entry.target, "row_per_turn", False):
            return None
        if option := engine.entry.options.get("turn_outcomes"):
            return None if engine.options.get(option.name, option.default) else engine
    return None


def _listed(checked: Mapping[str, Any], place: str) -> list[Bound]:
    return [bound for name, bound in checked.items() if name.startswith(f"{place}[")]


def _check_together(config: Config) -> None:
    """Raise `ConfigError` if keys of the configuration contradict each other."""
    learn, rollout, best = config.learn, config.rollout, config.metric_for_best_model
    ends = str(config.until.options.get("of", "")) if config.until else ""
    # With `metric_for_best_model`, every checkpoint must be evaluated.
    saves, measures = config.save_steps, config.eval_steps
    times = saves / measures if measures and (0 < saves < 1) <= (measures < 1) else 0.5
    unmeasured = abs(times - round(times)) > 1e-9
    contradictions = {
        f"'learn.minibatches' is {learn.minibatches}, but there are only {rollout.num_prompts} groups "
        "(rollout.num_prompts) to part": learn.minibatches > rollout.num_prompts,
        f"'eval_steps' is {config.eval_steps}, but 'evaluation.data' names nothing to measure on": (
            config.eval_steps and config.evaluation.data is None
        ),
        "'eval_on_start' is true, but 'evaluation.data' names nothing to measure on": (
            config.eval_on_start and config.evaluation.data is None
        ),
        f"'until' reads '{ends}', but 'eval_steps' is 0, so that is measured after the last step alone": (
            ends.startswith("eval_") and not config.eval_steps
        ),
        f"'carry' names {', '.join(config.carry)}, but 'init_from' names no run to take it from": (
            config.carry and not config.init_from
        ),
        f"'metric_for_best_model' is '{best}', so 'save_steps' ({config.save_steps}) must be a multiple of "
        f"'eval_steps' ({config.eval_steps}): only then is it measured where a checkpoint is written": (
            best.startswith("eval_") and unmeasured
        ),
        "'rollout.engine' is empty; name the engine that makes rollouts": not rollout.engine,
        "'sampler' is empty; name the sampler that chooses prompts": not config.sampler,
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


def _check_reward_names(checked: Mapping[str, Any], correct: str) -> None:
    """Raise `ConfigError` if a filter, sampler, metric or other piece names an unknown reward."""
    trained = [bound.name for bound in _listed(checked, "rewards")]
    evaluated = [bound.name for bound in _listed(checked, "evaluation.rewards")] or trained
    _check_name("evaluation.correct", correct, evaluated)
    _check_name("objective.margin", getattr(checked.get("objective"), "margin", None), trained)
    for place, bound in checked.items():
        options = bound.options if isinstance(bound, Bound) else {}
        names = evaluated if place.startswith("evaluation.") else trained
        if place == "group_filter" or place.startswith(("metrics[", "evaluation.metrics[", "sampler[")):
            _check_name(f"{place}.of", options.get("of"), names)
        elif place == "policy" and "objective" in checked:  # a reward model's names of rewards
            for label in as_list(options.get("labels")):
                _check_name("policy.labels", label, names)
        elif place.startswith("report.checks["):
            for option, value in options.items():
                for metric in as_list(value):
                    _check_metric(f"{place}.{option}", metric, names)


def _check_metric(place: str, metric: Any, names: Sequence[str]) -> None:
    # A reward's metric is called `rewards/NAME/mean`; `rewards/chosen` is a metric of preference objectives.
    match str(metric).split("/"):
        case ["rewards", name, _, *_]:
            _check_name(place, name, names)


def _check_name(place: str, name: Any, names: Sequence[str]) -> None:
    if isinstance(name, str) and name and name not in names:
        hint = nearest(name, names) or f"there are {', '.join(names)}"
        raise ConfigError(f"{place}: no reward is called '{name}'; {hint}")


def _needs_of(config: Config, checked: Mapping[str, Any]) -> Needs:
    """Return the outputs and policies that the objective reads; `ConfigError` if `references` lacks one."""
    match checked["objective"]:
        case object(needs=Needs() as needs):
            pass
        case _:
            raise ConfigError(
                f"objective: '{config.objective.name}' is no objective: it does not declare `needs`"
            )
    _check_references(config, needs, "the objective compares with")
    return needs


def _needs_of_second(config: Config, bound: Bound, place: str, says: Mapping[str, frozenset[str]]) -> Needs:
    """Check and return the outputs that an additional trained model's advantages and objective read."""
    chain, objective = bound.options.get("advantage", ()), bound.options.get("objective")
    needs = reduce(Needs.__or__, (piece.needs for piece in as_list(chain)), Needs())
    if objective is not None:
        needs |= objective.needs
    _check_references(config, needs, f"{place} reads")
    own = needs.outputs | needs.others.get("old", frozenset())
    others = {name: extra for name, extra in needs.others.items() if name != "old"}
    check_outputs(config, Needs(others={**others, place.removeprefix("references."): own}), says)
    return Needs(others=others, notes=needs.notes)


def _says(config: Config, checked: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Map model names ("" is the policy, others are additional trained models) to the model's outputs."""
    inner = {name: piece.options.get("policy") for name, piece in config.references.items()}
    return {"": declared(checked["policy"].entry, "outputs")} | {
        name: declared(find("policy", as_piece(piece, f"references.{name}.policy").name), "outputs")
        for name, piece in inner.items()
        if piece is not None
    }


def _check_branching(config: Config, engines: Sequence[Bound]) -> None:
    """Raise `ConfigError` if `num_generations` is no multiple of the number of leaves of an engine's tree."""
    number = config.rollout.num_generations
    for i, bound in enumerate(engines):
        for name in (name for name, hint in bound.entry.hints.items() if marks(hint, DividesGenerations)):
            leaves = prod(bound.options.get(name, bound.entry.options[name].default))
            if number % leaves:
                raise ConfigError(
                    f"rollout.num_generations is {number}, but '{bound.entry.full_name}' makes multiples of "
                    f"{leaves} answers, the product of rollout.engine[{i}].{name}; ask for "
                    f"{-(-number // leaves) * leaves}, or change '{name}'"
                )


def _check_references(config: Config, needs: Needs, who: str) -> None:
    """Raise `ConfigError` unless `references` names every policy in `needs`."""
    missing = set(needs.others) - set(config.references) - {"old", "engine"}  # always available
    if missing:
        raise ConfigError(
            f"{who} {sorted(missing)}, but `references` has {sorted(config.references) or 'nothing'}; add "
            "for instance `references: {ref: frozen}`"
        )


def check_outputs(config: Config, needs: Needs, says: Mapping[str, frozenset[str]]) -> None:
    """Raise `ConfigError` unless the models compute all outputs that advantages and objectives read.

    `says` maps the name of each additional trained model, such as a critic, to the model's outputs; the key
    "" has the outputs of the policy and the references.
    """
    for name, wanted in {"": needs.outputs, **needs.others}.items():
        outputs = says.get(name, says[""])
        if missing := wanted - outputs:
            whose = f"second model '{name}'" if name in says and name else "policy"
            piece = config.references[name].options["policy"] if name in says and name else config.policy
            raise ConfigError(
                f"the objective or the chain reads {sorted(missing)} of the {whose}, which "
                f"'{as_piece(piece, name).name}' does not say as it is set up; it says "
                f"{sorted(outputs) or 'nothing'} besides log-probabilities"
            )
