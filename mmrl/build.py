"""Construction of training runs, evaluators and engines from configurations, and configuration checks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmrl.config.binding import Bound, Elsewhere, Pieces
from mmrl.config.consistency import check_evaluation, check_outputs, check_training
from mmrl.config.engine_checks import makes
from mmrl.config.evaluation import evaluation_of
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import find
from mmrl.config.schema import Config, EvaluateConfig, Piece
from mmrl.config.tags import named_in
from mmrl.config.trainable import check_trainable
from mmrl.core.protocols import Engine, LogProbs, Policy, Preparing, UsesEngine, UsesValueModel
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts
from mmrl.data.named_columns import named_columns
from mmrl.data.readable import check_engines, checked_prompts, drops, engines_of, prompt_check
from mmrl.data.row_files import bad_rows_error, log_dropped
from mmrl.diagnostics.inputs import check_references
from mmrl.diagnostics.reward_inputs import check_reward_inputs
from mmrl.diagnostics.round_trip import SAMPLE, check_targets, sampled
from mmrl.inference.session import Session
from mmrl.inference.sources import ModelSource, resolve
from mmrl.reporting.metrics import Trackers
from mmrl.rewards.answers import FormOfData, infer_form
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import check_hub
from mmrl.runtime.modules import loading_onto
from mmrl.training.collect import RewardCoverage
from mmrl.training.evaluate import Evaluator
from mmrl.training.learner import Learner, second_learners
from mmrl.training.method import Method
from mmrl.training.report import Reporter, ReportPieces
from mmrl.training.trainer import Run
from mmrl.training.unreadable import Unreadable

OBSERVING = ("visualizations", "checks", "startup_checks")  # keys of `report`, ordered as `ReportPieces`
log = logging.getLogger(__name__)


def build(config: Config, *, quiet: bool = False) -> Run:
    """Build a training run; check the configuration before any weight is loaded."""
    check(config).require_packages()
    stream = Stream(config.seed, stage=config.stage)
    pieces = Pieces(stream, config.policy, config.rollout.max_staleness)
    make = partial(pieces.make_field, config)
    trackers = make("report.trackers")
    data = pieces.made["data"] = usable_rows(config, read_prompts(config, pieces, config.data, "data"))
    pieces.answer_form = form = FormOfData(data)
    epochs, config = config.num_train_epochs, with_steps(config, len(data))
    eval_prompts = held_out(config) if config.evaluation.data else ()
    warnings = check_rewards(config, data, SAMPLE, form=form)
    warnings += check_rewards(config, eval_prompts, SAMPLE, evaluates=True)
    check_references(config, data, SAMPLE)
    # Build samplers before any weight is loaded, because they may miss a column of the data.
    sampler = make_chain(pieces, "sampler", config.sampler, data, "sampler")
    torch.manual_seed(config.seed)  # the global generator initialises adapters
    processes = Processes(config.ddp_timeout)
    loading = partial(loading_onto, processes.load_device, shards=processes.shards)
    with loading():
        policy, objective = make("policy"), make("objective")
    optimizer = processes.place(policy, make("learn.optimizer"))
    with loading():
        references = make("references", policy)
    check_outputs(config, objective.needs, {"": policy.outputs})
    method = Method(
        references=references,
        sampler=sampler,
        engine=make_chain(pieces, "engine", config.rollout.engine, policy, "rollout.engine"),
        rewards=_with_workers(make("rewards")),
        group_filter=make("group_filter"),
    )
    chain = make("advantage")
    method.noted = pieces.notes("advantage", "sampler", "engine")
    learning_rate = pieces.number(config.learn.learning_rate, NonNegativeFloat, "learn.learning_rate")
    _connect(config, pieces, policy, references, processes)
    evaluator = make_evaluator(config, eval_prompts, policy, processes) if eval_prompts else None
    if evaluator:
        evaluator.prepare = list(pieces.that_are(Preparing).values())
    observing = [make(key) for key in ("metrics", *(f"report.{kind}" for kind in OBSERVING))]
    watching = ReportPieces(*observing, trackers=Trackers(trackers))
    if config.until:
        make("until")  # a callback; the run gets it from `pieces`
    labels_read = named_in(chain, (bound.name for bound in method.rewards))
    pieces.made["rewards"] = RewardCoverage(method.rewards, len(data), labels_read)
    reporter = Reporter(config, processes, stream, watching, quiet)
    length = f"{epochs:g} epochs of {len(data)} prompts: {config.max_steps} steps" if epochs else ""
    for line in filter(None, (form.sentence, *warnings, length)):
        reporter.console.say(line)
    shared = (config, processes, stream, references, reporter.console.say)
    learner = Learner(policy, objective, chain, optimizer, learning_rate, *shared)
    seconds = second_learners(*shared)
    unreadable = Unreadable(drops(config.data))
    return Run(
        config, pieces, processes, method, learner, reporter, evaluator, seconds, unreadable=unreadable
    )


def _connect(
    config: Config,
    pieces: Pieces,
    policy: Policy,
    references: Mapping[str, LogProbs],
    processes: Processes,
) -> None:
    """Pass the first engine, or the value model (critic), as a function to the pieces that need it."""
    engine = pieces.made["rollout.engine[0]"]

    def ask(prompts: Sequence[Prompt]) -> Rollouts:
        with torch.no_grad(), processes.unshard(policy.module):
            return engine.rollout(prompts)

    for piece in pieces.that_are(UsesEngine).values():
        piece.connect(ask, processes.all_gather_object)
    for piece in pieces.that_are(UsesValueModel).values():
        if piece.value_model:
            from mmrl.training.consulting import values_of  # imported here because few runs need it

            model, steps = references[piece.value_model], config.learn.micro_batch_steps
            options = {"policy": policy, "model": model, "processes": processes}
            piece.connect_value_model(partial(values_of, **options, micro_batch_steps=steps))


def _with_workers(rewards: Sequence[Bound]) -> Sequence[Bound]:
    """Attach Ray actors to the rewards that have `workers`."""
    if not any(isinstance(reward.function, Elsewhere) for reward in rewards):
        return rewards
    from mmrl.runtime.ray_rewards import with_actors

    return with_actors(rewards)


def with_steps(config: Config, num_rows: int) -> Config:
    """Convert `num_train_epochs` to `max_steps`, rounded up, for a data set of `num_rows` prompts.

    Prompts of additional sampling rounds within a step (`rollout.max_rounds`) do not count towards an epoch.
    """
    if not config.num_train_epochs:
        return replace(config, **_shares(config, config.max_steps))
    prompts = min(config.rollout.num_prompts, num_rows)  # prompts per step, all distinct
    # Round first: 0.1 * 3 is 0.30000000000000004, which would add a step.
    steps = max(1, math.ceil(round(config.num_train_epochs * num_rows / prompts, 9)))
    return replace(config, max_steps=steps, num_train_epochs=0.0, **_shares(config, steps))


def _shares(config: Config, steps: int) -> dict[str, int]:
    """Convert `save_steps` and `eval_steps` to numbers of steps if they are fractions of the run."""
    shares = {"save_steps": config.save_steps, "eval_steps": config.eval_steps}
    return {key: math.ceil(round(share * steps, 9)) for key, share in shares.items() if 0 < share < 1}


def make_chain(pieces: Pieces, kind: str, listed: Sequence[Piece], first: Any, place: str) -> Any:
    """Build a chain of engines around a policy, or of samplers around data; each wraps the previous one."""
    for i, piece in enumerate(listed):
        first = pieces.make(kind, piece, first, place=f"{place}[{i}]")
    return first


def check(config: Config) -> Pieces:
    """Check the names, options and connections of a configuration without loading anything.

    The result lists the pieces; its method `require_packages` checks that their packages are installed.
    """
    pieces = check_training(config)
    check_trainable(config.policy)
    check_hub(config)
    return pieces


def check_data(config: Config | EvaluateConfig) -> list[str]:
    """Read the data of a run or an evaluation and build its samplers, without loading weights.

    Returns warnings as sentences: which form of targets was inferred, and how many rows' own targets do not
    get the full reward as answers. Raises `ConfigError` if a run would fail: no prompts, missing columns, or
    too many such rows.
    """
    read = {"evaluation.data": held_out(config)} if config.evaluation.data else {}
    if isinstance(config, Config):
        pieces = Pieces(Stream(config.seed, stage=config.stage))
        data = usable_rows(config, read_prompts(config, pieces, config.data, "data"))
        make_chain(pieces, "sampler", config.sampler, data, "sampler")
        read = {"data": data, **read}
    forms = {place: infer_form(prompts) for place, prompts in read.items()}
    sentences = [f"{place}: {sentence}" for place, (form, sentence) in forms.items() if form]
    for place, prompts in read.items():
        sentences += check_rewards(config, prompts, evaluates=place != "data")
    return sentences


def check_rewards(
    config: Config | EvaluateConfig,
    prompts: Sequence[Prompt],
    sample: int = 0,
    *,
    evaluates: bool = False,
    form: FormOfData | None = None,
) -> list[str]:
    """Check that prompts (or `sample` of them) have the rewards' inputs, and that targets earn full marks."""
    own = "evaluation.rewards" if config.evaluation.rewards else "rewards"
    trains = isinstance(config, Config) and not evaluates
    rewards = config.rewards if trains else evaluation_of(config).evaluation.rewards
    place, rows = "rewards" if trains else own, sampled(prompts, sample)
    engines = engines_of(config)["data" if trains else "evaluation.data"]
    check = partial(prompt_check, config.policy, engines)
    complete, text = trains and len(rows) == len(prompts), makes(config.policy, engines) == "text"
    check_reward_inputs(text, check, rows, rewards, place, complete=complete)
    return check_targets(prompts, rewards, place, sample=sample, form=form)


def usable_rows(config: Config, data: Sequence[Prompt]) -> Sequence[Prompt]:
    """Drop rows whose recorded answers the model cannot read, or raise, depending on `bad_rows`.

    Returns all rows if no engine reads recorded answers, or if the policy cannot check them without weights.
    """
    check_answers = getattr(find("policy", config.policy.name).target, "check_answers", None)
    reads = any(getattr(find("engine", e.name).target, "reads_answers", False) for e in config.rollout.engine)
    if check_answers is None or not reads:
        return data
    wrong: dict[int, str] = check_answers(config.policy.options, data)
    lines = [f"prompt '{data[index].uid}': {reason}" for index, reason in wrong.items()]
    if lines and config.data.options.get("bad_rows") != "drop":
        advice = "give the data the `height` and `width` to crop and resize to, or set `bad_rows: drop`"
        raise ConfigError(f"data: {bad_rows_error(str(config.data.options.get('path', '')), lines, advice)}")
    log_dropped("data", lines, len(data))
    if len(lines) == len(data):
        raise ConfigError("the model can take the recorded answers of no row")
    return [data[i] for i in range(len(data)) if i not in wrong] if lines else data


# ---- evaluation and inference


def held_out(config: Config | EvaluateConfig) -> Sequence[Prompt]:
    """Read the evaluation prompts, at most `evaluation.num_prompts`."""
    pieces, wanted = Pieces(Stream(config.seed, purpose="evaluate")), config.evaluation
    return read_prompts(config, pieces, wanted.data, "evaluation.data")[: wanted.num_prompts or None]


def read_prompts(
    config: Config | EvaluateConfig, pieces: Pieces, piece: Piece, place: str
) -> Sequence[Prompt]:
    """Read a data set, including the columns that other pieces of the run need.

    A prompt that the model cannot read counts as a bad row.
    """
    check = prompt_check(config.policy, engines_of(config).get(place, ()))
    return checked_prompts(pieces, piece, place, named_columns(config), check)


def make_evaluator(
    config: Config | EvaluateConfig,
    prompts: Sequence[Prompt],
    policy: Policy,
    processes: Processes,
    engine: Engine | None = None,
) -> Evaluator:
    """Build an evaluator; an engine or rewards missing in `evaluation` are taken from training.

    The argument `engine`, such as an engine that returns stored answers, replaces the configured engines.
    """
    config = evaluation_of(config)
    stream, wanted = Stream(config.seed, purpose="evaluate"), config.evaluation
    pieces = Pieces(stream)
    pieces.policies["policy"] = config.policy
    pieces.answer_form = FormOfData(prompts)
    evaluator = Evaluator(
        data=prompts,
        processes=processes,
        stream=stream,
        engine=engine or make_chain(pieces, "engine", wanted.engine, policy, "evaluation.engine"),
        rewards=_with_workers(pieces.make_field(config, "evaluation.rewards")),
        metrics=pieces.make_field(config, "evaluation.metrics"),
        num_generations=wanted.num_generations,
        confidence=wanted.confidence,
        correct=wanted.correct,
        unreadable=Unreadable(drops(wanted.data), "evaluation.data"),
    )
    evaluator.noted = pieces.notes("metric")  # known once all pieces are built
    return evaluator


def load_evaluator(config: Config | EvaluateConfig, weights: Path | None = None) -> Evaluator:
    """Load a policy, optionally with the weights of a model folder, and build its evaluator."""
    check_evaluation(config).require_packages()
    pieces, processes = Pieces(Stream(config.seed)), Processes()
    prompts = held_out(config)  # before any weight is loaded
    for warning in check_rewards(config, prompts, SAMPLE, evaluates=True):
        log.warning("%s", warning)
    policy = _load_policy(config, pieces, processes, weights)
    return make_evaluator(config, prompts, policy, processes).agreed()


def load_engine(
    source: str | Path | Config | EvaluateConfig,
    overrides: Sequence[str] = (),
    *,
    setting: str = "",
    seed: int | None = None,
    **options: Any,
) -> Session:
    """Load a model for inference: `load_engine("run.yaml").answer("What is this?", images=["a.png"])`.

    The engine has its cache and transforms, but adds no rows for training. A model without a configuration
    samples as `transformers chat` does: temperature 1, at most 256 tokens. Raises `ConfigError` if the
    configuration names no engine.

    Args:
        source: Configuration or its file (for its rollout engine, or the engine of an evaluation), the folder
            of a run or of a checkpoint, a model folder, or a model of the hub.
        overrides: Changes as on the command line, such as "policy.model=...".
        setting: Name of one of the `settings` of an evaluation.
        seed: Seed of random numbers; None: the seed of the configuration.
        options: Options of the engine, such as `temperature` (0: greedy) or `max_completion_length`.
    """
    return open_source(resolve(source, overrides, setting=setting, options={"seed": seed, **options}))


def check_source(source: ModelSource) -> Pieces:
    """Check the policy and the engines of a source without loading anything."""
    pieces = Pieces(Stream(source.config.seed))
    pieces.check("policy", source.config.policy)
    for i, piece in enumerate(source.engines):
        pieces.check("engine", piece, f"{source.place}[{i}]")
    pieces.require_packages()
    return pieces


def open_source(source: ModelSource, policy: Policy | None = None) -> Session:
    """Load the model of a source, unless its `policy` is given, and build its engine."""
    checked = check_source(source)
    check_engines(source.config.policy, source.engines)
    # Initialise new weights as in training; the engine draws from another random stream.
    policy = policy or _load_policy(source.config, checked, Processes(), source.weights)
    pieces = Pieces(Stream(source.config.seed, purpose="inference"))
    pieces.policies["policy"] = source.config.policy
    return Session(make_chain(pieces, "engine", source.engines, policy, source.place), source.data)


def _load_policy(
    config: Config | EvaluateConfig, pieces: Pieces, processes: Processes, weights: Path | None = None
) -> Policy:
    with loading_onto(processes.load_device, learns=False):
        policy = pieces.make("policy", config.policy)
    policy.module.to(processes.device)
    if weights is not None:
        policy.load(weights)
    return policy
