"""Explanation of why two evaluations differ, by scoring stored answers and rendering prompts again."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from torch import Tensor, nn

from mmrl.build import held_out, make_evaluator
from mmrl.config.changes import ABSENT, differences, inside
from mmrl.config.consistency import check_evaluation
from mmrl.config.evaluation import evaluation_of
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Config, EvaluateConfig, as_plain, load, parse
from mmrl.config.sweep import changed_config, setting_of
from mmrl.core.reward_table import EQUAL, Measured
from mmrl.core.types import Prompt, Rollouts
from mmrl.inference.rendering import Rendering
from mmrl.reporting.answers import PREDICTIONS, columns_of, judge_of, target_text, trajectory_of
from mmrl.reporting.effects import (
    Effect,
    Explanation,
    MetricChange,
    same_name,
    stored_prompts,
)
from mmrl.reporting.predictions import (
    Joined,
    Predictions,
    Row,
    aligned,
    by_prompt,
    check_same_prompts,
    find_predictions,
    join,
    no_reward_of_both,
    read_predictions,
)
from mmrl.runtime.distributed import Processes
from mmrl.runtime.folders import mark_of
from mmrl.runtime.reward_calls import RewardFault
from mmrl.training.resolved import resolve_defaults

SCORING = ("evaluation.rewards", "evaluation.metrics", "evaluation.correct")  # tested by rescoring
PROMPTS = ("policy", "evaluation.data")  # settings that are tested by rendering prompts again
NOT_COMPARED = {"settings", "cost_metrics", "target_metric", "greater_is_better", "imports", "output_dir"}
SIMPLE = re.compile(r"(?!(?i:true|false|null|yes|no|on|off)$)[A-Za-z/.][\w./:-]*")  # needs no quotes in YAML
# Errors of rewards, data and models that are reported as the reason why an effect is unknown.
FAULTS = (ValueError, RewardFault, OSError, ImportError)


@dataclass(frozen=True)
class StoredEvaluation:
    """An evaluation on disk: its answers, and the configuration and record in its folder.

    Args:
        predictions: The stored answers.
        config: The configuration; None if the folder does not record it.
        weights: Checkpoint or folder with the weights, if not `policy.model`.
        record: Contents of the folder's marker file.
    """

    predictions: Predictions
    config: EvaluateConfig | None
    weights: str
    record: Mapping[str, Any]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings as nested plain values, with defaults, package versions, code hashes and machine."""
        if self.config is None:
            return {}
        plain = {k: v for k, v in resolve_defaults(self.config)[0].items() if k not in NOT_COMPARED}
        made = self.record.get("record", self.record)
        versions = dict(text.rsplit(" ", 1) for text in made.get("versions", ()))
        code = {
            place: f"{name} {code}"
            for place, (name, code, _) in made.get("code", {}).items()
            if inside(place, "evaluation.rewards", "evaluation.metrics", "evaluation.engine")
        }
        machine = {k: v for k, v in self.record.get("machine", {}).items() if k != "unmetered"}
        return {**plain, "weights": self.weights, "packages": versions, "code": code, "machine": machine}

    @property
    def uids(self) -> set[str]:
        """Names of the answered prompts."""
        return {row["uid"] for row in self.predictions.rows}

    @cached_property
    def prompts(self) -> dict[str, Prompt]:
        """The prompts of the stored answers, read again from the data; ConfigError if the data changed."""
        assert self.config is not None
        return self.read_prompts(self.config)

    def read_prompts(self, config: EvaluateConfig) -> dict[str, Prompt]:
        """Read the prompts of the stored answers from the data of a configuration."""
        read = {prompt.uid: prompt for prompt in held_out(config)}
        for uid, rows in by_prompt(self.predictions).items():
            if uid not in read:
                raise ConfigError(
                    f"the data have no prompt '{uid}' any more; rows without an `id` are named after their "
                    "file and number"
                )
            if target_text(read[uid].target) != rows[0].get("target"):
                raise ConfigError(f"the data changed: prompt '{uid}' has another target")
        return {uid: read[uid] for uid in by_prompt(self.predictions)}

    @cached_property
    def scored_again(self) -> Rescored:
        """The answers, scored again with unchanged rewards; ConfigError if the stored rewards differ."""
        again = rescore(self, {})
        before, after = by_prompt(self.predictions), by_prompt(again.predictions)
        pairs = [pair for uid in before for pair in zip(before[uid], after[uid], strict=True)]
        for name in self.predictions.rewards:
            for old, new in pairs:
                a, b = (math.nan if row.get(name) is None else float(row[name]) for row in (old, new))
                if abs(a - b) > EQUAL or math.isnan(a) != math.isnan(b):
                    raise ConfigError(
                        f"scored again with its own settings, the answer to '{old['uid']}' gets {b:.6g} and "
                        f"not {a:.6g} from '{name.removeprefix('reward/')}': it reads more than the text, or "
                        "its code changed"
                    )
        return again

    def command(self, changes: Mapping[str, Any]) -> str:
        """Return the command that evaluates again with other settings; "" if no command is recorded."""
        if "command" not in self.record or not all(
            inside(setting, "policy", "evaluation", "seed") for setting in changes
        ):
            return ""
        folder = f"output_dir={self.predictions.path.parent}-{next(iter(changes)).rpartition('.')[2]}"
        overrides = [self._override(setting, value, changes) for setting, value in changes.items()]
        kept = [part for part in self.record["command"] if not part.startswith("output_dir=")]
        return shlex.join(["mmrl", "evaluate", *kept, *dict.fromkeys(overrides), folder])

    def _override(self, setting: str, value: Any, changes: Mapping[str, Any]) -> str:
        listed = re.match(r"evaluation\.(engine|rewards)", setting)
        if listed and self.config and not self.record["of"]["evaluation"].get(listed[1]):
            # The evaluation has no own list but uses the training's, so the override gives the whole list.
            changed = changed_config(self.config, changes)
            setting, value = listed[0], as_plain(vars(changed.evaluation)[listed[1]])
        value = None if value is ABSENT else value
        simple = isinstance(value, str) and SIMPLE.fullmatch(value)
        return f"{setting}={value if simple else json.dumps(value, default=str)}"


def read_stored(path: Path) -> StoredEvaluation:
    """Read an evaluation, or a training run's last one, with the records in its folder.

    Raises ConfigError if there are no predictions, or the recorded configuration cannot be read any more.
    """
    file = find_predictions(path)
    predictions = read_predictions(file)
    folder = file.parent.parent if file.parent.name == PREDICTIONS else file.parent
    record, config, weights = mark_of(folder), None, ""
    try:
        match record:
            case {"by": "train"} if (folder / "config.yaml").is_file():
                config = evaluation_of(load(folder / "config.yaml", kind=Config))
                weights = f"{folder.resolve()}, {file.stem}"
            case {"by": "evaluate", "of": {**facts}}:
                weights = facts.pop("weights", "")
                config = evaluation_of(parse(facts, Config if "rollout" in facts else EvaluateConfig))
                if config.settings and file.parent.name == PREDICTIONS:
                    config = setting_of(config, unquote(file.stem))
    except ConfigError as error:
        raise ConfigError(f"'{folder}' records settings that cannot be read: {error}") from error
    return StoredEvaluation(predictions, config, weights, record)


def explain(first: StoredEvaluation, second: StoredEvaluation) -> Explanation:
    """List the settings that differ, with the effect of each on the first evaluation, without a model.

    Settings of rewards and metrics are tested by scoring the stored answers again. Settings of policy and
    data are tested by rendering the prompts again. All other settings need a new evaluation.
    """
    other = aligned(first.predictions, second.predictions)
    stored = stored_prompts(first.predictions, other)
    if first.config is None or second.config is None:
        names = [str(one.predictions.path) for one in (first, second) if one.config is None]
        note = f"no settings are recorded for {' and '.join(names)}, so only answers are compared"
        return Explanation((), stored, [note])
    changed = differences(first.settings, second.settings)
    # Compare the code hashes of a piece only with those of the same piece.
    changed = {k: (a, b) for k, (a, b) in changed.items() if not inside(k, "code") or same_name(a, b)}
    answered = first.uids
    shared = [uid for uid in by_prompt(other) if uid in answered]
    rendering = Rendering(first.read_prompts, first.config, shared)
    scoring = {setting: values for setting, values in changed.items() if inside(setting, *SCORING)}
    effects = scoring_effects(first, scoring)
    for setting, (a, b) in changed.items():
        if setting in scoring:
            continue
        known: dict[str, Any] = {}
        try:
            if inside(setting, *PROMPTS):
                known = {"prompts": rendering.difference(setting, b)}
        except FAULTS as error:
            known = {"fault": unknown(error)}
        effects.append(Effect(setting, a, b, command=first.command({setting: b}), **known))
    notes = [] if changed else ["all recorded settings are equal"]
    explained = any(effect.prompts and effect.prompts.different for effect in effects)
    if stored and stored.different and not explained:
        notes.append(
            "no setting explains why prompts differ: compare packages, and the files of the tokenizer, the "
            "chat template and the data"
        )
    return Explanation(effects, stored, notes)


def scoring_effects(stored: StoredEvaluation, changed: Mapping[str, tuple[Any, Any]]) -> list[Effect]:
    """Score stored answers with each setting of rewards and metrics that differs.

    Settings that are only valid together, such as a reward and the metric that names it, are one effect.
    """
    effects, together = list[Effect](), dict[str, tuple[Any, Any]]()
    for setting, (a, b) in changed.items():
        try:
            check_evaluation(changed_config(stored.config, {setting: b}))
        except ConfigError:
            together[setting] = (a, b)
        else:
            effects.append(_scoring_effect(stored, {setting: (a, b)}))
    return effects + ([_scoring_effect(stored, together)] if together else [])


def _scoring_effect(stored: StoredEvaluation, changed: Mapping[str, tuple[Any, Any]]) -> Effect:
    values = {setting: b for setting, (_, b) in changed.items()}
    try:
        known = {"metrics": rescored_metrics(stored, values), "rescored": True}
    except FAULTS as error:
        known = {"fault": unknown(error)}
    sides = [[pair[i] for pair in changed.values()] for i in (0, 1)]
    first, second = (side[0] if len(side) == 1 else side for side in sides)
    return Effect(" + ".join(changed), first, second, command=stored.command(values), **known)


def unknown(error: Exception) -> str:
    """Say in one line why an effect is unknown."""
    return f"unknown, because {' '.join(str(error).split())}"


# ---- stored answers, scored again


class StoredAnswers:
    """Engine that returns stored answers instead of sampling."""

    notes = frozenset[str]()

    def __init__(self, predictions: Predictions) -> None:
        self.policy: Any = SimpleNamespace(module=nn.Module())  # there is no model
        self.rows = by_prompt(predictions)

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Return the stored answers of prompts; the k-th copy of a prompt gets its k-th answer."""
        asked: dict[str, int] = {}
        answers = []
        for prompt in prompts:
            index = asked[prompt.uid] = asked.get(prompt.uid, -1) + 1
            answers.append(trajectory_of(prompt, self.rows[prompt.uid][index]))
        return tuple(answers)


@dataclass(frozen=True)
class Rescored:
    """Stored answers after scoring: rows with the new rewards, and metrics with bootstrap values."""

    predictions: Predictions
    values: Mapping[str, float]
    draws: Mapping[str, Tensor]
    units: Mapping[str, int]  # number of independent units (resampled by the bootstrap)
    interval: Callable[..., tuple[float, float]]


def rescore(stored: StoredEvaluation, changes: Mapping[str, Any]) -> Rescored:
    """Score stored answers with some settings of another evaluation.

    Raises:
        ConfigError: The data changed, answers are no texts, or the number of answers per prompt varies.
        RewardFault: A reward needs more than the text of an answer.
    """
    assert stored.config is not None
    config, rows = changed_config(stored.config, changes), stored.predictions.rows
    check_evaluation(config).require_packages()
    counts = {len(group) for group in by_prompt(stored.predictions).values()}
    if len(counts) > 1:
        raise ConfigError(f"prompts have {min(counts)} to {max(counts)} answers")
    evaluation = replace(config.evaluation, num_generations=counts.pop())
    config, prompts = replace(config, evaluation=evaluation), list(stored.prompts.values())
    engine = StoredAnswers(stored.predictions)
    evaluator = make_evaluator(config, prompts, engine.policy, Processes(), engine)
    measured = evaluator.measure(intervals=False)
    draws = evaluator.resample(measured.table)
    units = evaluator.units(measured.table, draws)
    values = {name: float(measured.metrics.get(name, math.nan)) for name in draws}
    return Rescored(
        _with_rewards(stored.predictions, rows, measured), values, draws, units, evaluator.interval
    )


def _with_rewards(predictions: Predictions, rows: Sequence[Row], measured: Measured) -> Predictions:
    """Replace the rewards of stored answers by those of a new scoring of the same answers."""
    columns = columns_of(measured.rollouts, measured.table)
    new = {name: column for name, column in columns.items() if name == "reward" or name.startswith("reward/")}
    # Match by prompt: rows stored by several processes may be in another order.
    ordered = [row for group in by_prompt(predictions).values() for row in group]
    old = {name for name in ordered[0] if name in ("reward", "correct") or name.startswith("reward/")}
    made = [
        {k: v for k, v in row.items() if k not in old} | {name: column[i] for name, column in new.items()}
        for i, row in enumerate(ordered)
    ]
    return replace(predictions, rows=made, judge=judge_of(measured.table, measured.correct))


def rescored_metrics(stored: StoredEvaluation, changes: Mapping[str, Any]) -> list[MetricChange]:
    """Compare metrics of stored answers before and after settings change, with paired intervals."""
    before, after = stored.scored_again, rescore(stored, changes)
    pairs = [(name, name) for name in after.draws if name in before.draws]
    pairs = pairs or [(next(iter(before.draws)), next(iter(after.draws)))]
    found = []
    for old, new in pairs:
        low, high = before.interval(after.draws[new] - before.draws[old], after.units[new], difference=True)
        name, a, b = new if old == new else f"{old} -> {new}", before.values[old], after.values[new]
        if old != new or abs(a - b) > EQUAL or low != high:
            found.append(MetricChange(name, a, b, low, high))
    paired = {new for _, new in pairs}
    return found + [MetricChange(k, math.nan, v) for k, v in after.values.items() if k not in paired]


def rescore_both(
    first: StoredEvaluation, second: StoredEvaluation, by: str | None = None
) -> tuple[dict[str, Joined], list[str]]:
    """Join two evaluations: with their stored rewards, and scored again with the rewards of either one.

    Returns:
        The joined evaluations by title, "" for the rewards as evaluated (left out if none is in both), and
            sentences about evaluations that could not be scored again.

    Raises:
        ConfigError: The evaluations have no prompt in common, or no reward that scores both.
    """
    both, joined, faults = (first.predictions, second.predictions), dict[str, Joined](), list[str]()
    check_same_prompts(both[0], aligned(*both))
    if {*both[0].measures} & {*both[1].measures}:
        joined[""] = join(*both, by=by)
    for stored, other in ((first, second), (second, first)):
        changes = scoring_changes(stored, other)
        if not any(inside(key, "evaluation.rewards") for key in changes):
            continue
        try:
            assert stored.scored_again  # raises unless rescoring reproduces the stored rewards
            again = rescore(stored, changes).predictions
            pair = (again, both[1]) if stored is first else (both[0], again)
            joined[f"both with the rewards of {other.predictions.path.parent}"] = join(*pair)
        except FAULTS as error:
            reason = " ".join(str(error).split())
            faults.append(f"the answers in '{stored.predictions.path}' cannot be scored again: {reason}")
    if not joined:
        raise ConfigError("; ".join([*faults, no_reward_of_both(*both)]))
    return joined, faults


def scoring_changes(stored: StoredEvaluation, other: StoredEvaluation) -> dict[str, Any]:
    """Return the reward and metric settings of `other` that differ from those of `stored`."""
    if stored.config is None or other.config is None:
        return {}
    changed = differences(stored.settings, other.settings)
    return {key: b for key, (_, b) in changed.items() if inside(key, *SCORING)}
