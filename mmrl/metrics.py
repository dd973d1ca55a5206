"""Evaluation metrics, computed from the rewards of all answers; bootstrap intervals resample prompts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated

import torch

from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Range, Tag, TagWords
from mmrl.config.registry import metric
from mmrl.core.reward_table import EQUAL, RewardTable, name_id
from mmrl.core.tensor import group_index, group_rank, group_sum

OpenShare = Annotated[float, Range(0, 1, above=True, below=True)]


@metric
def mean(table: RewardTable, *, of: str = "", label: str = "") -> dict[str, float]:
    """Compute the mean of one reward (default: of each reward) over the answers to which it applies."""
    names = [of] if of else list(table.scored)
    return {label or name: float(table.at_end(name).nanmean()) for name in names}


@metric
def recall_at(
    table: RewardTable, *, of: str, at: tuple[float, ...], strict: bool = False, label: str = ""
) -> dict[str, float]:
    """Compute the fraction of answers whose reward reaches a threshold, for each of several thresholds.

    Args:
        of: Name of the reward; with `temporal_iou` the metric is R1@m.
        at: Thresholds.
        strict: Require more than the threshold, as in the later evaluator of Time-R1 (arXiv 2503.13377).
        label: Name before `@`; by default the name of the reward.
    """
    reward = table.at_end(of)
    reward = reward[~reward.isnan()]  # NaN: reward does not apply
    passes = torch.gt if strict else torch.ge
    return {f"{label or of}@{bar:g}": float(passes(reward, bar).double().mean()) for bar in at}


@metric
def grouped_minimum(table: RewardTable, *, of: str, by: Tag = "cluster", label: str = "") -> dict[str, float]:
    """Compute the mean over groups of the lowest reward of each group; NaN without any reward.

    With rotations of one question as groups, this is CircularEval (MMBench, arXiv 2307.06281): a question
    counts if the answers to all its rotations are right.

    Args:
        of: Name of the reward.
        by: Tag that rows of one group share.
        label: Name of the metric; by default that of the reward.
    """
    reward = table.at_end(of)
    index = group_index([table.tag(by)[:, 0]])
    lowest = torch.full((int(index.max()) + 1,), math.inf, dtype=torch.float64)
    lowest.scatter_reduce_(0, index, reward.double().nan_to_num(math.inf), "amin")
    lowest = lowest[lowest.isfinite()]
    return {label or of: float(lowest.mean())}


# ---- metrics of counts: ratios of sums over all answers, and binary classification


@metric
def ratio_of_sums(
    table: RewardTable,
    *,
    of: str,
    over: str = "",
    complement: bool = False,
    scale: float = 1.0,
    offset: float = 0.0,
    label: str = "",
) -> dict[str, float]:
    """Compute the ratio of two summed counts over the answers that have both; NaN without such answers.

    A denominator of 0 gives 0.

    Args:
        of: Reward in the numerator.
        over: Reward in the denominator; by default the number of answers.
        complement: Return one minus the ratio.
        scale: Factor of the result; 100 gives percent.
        offset: Added to the denominator, as some evaluation scripts do.
        label: Name of the metric; by default the reward in the numerator.
    """
    top = table.at_end(of).double()
    bottom = table.at_end(over).double() if over else torch.ones_like(top)
    valid = ~(top.isnan() | bottom.isnan())
    if not valid.any():
        return {label or of: math.nan}
    ratio = _share(float(top[valid].sum()), float(bottom[valid].sum()) + offset)
    return {label or of: scale * (1 - ratio if complement else ratio)}


@metric
def binary_classification(
    table: RewardTable,
    *,
    answer: str,
    truth: str,
    positive: float = 1.0,
    scale: float = 1.0,
    offset: float = 0.0,
    f1_offset: float = 0.0,
    decimals: NonNegativeInt | None = None,
    share_name: str = "positive_ratio",
    label: str = "",
) -> dict[str, float]:
    """Compute accuracy, precision, recall, F1 and the fraction of positive answers.

    They are computed over the answers with both labels; NaN without such answers. An answer that is neither
    label is wrong. A denominator of 0 gives 0. Offsets and rounding reproduce evaluation scripts.

    Args:
        answer: Reward with the predicted label.
        truth: Reward with the true label.
        positive: Value of the positive label.
        scale: Factor of the results; 100 gives percent.
        offset: Added to all denominators except that of F1.
        f1_offset: Added to the denominator of F1.
        decimals: Digits of results, with precision and recall rounded before F1; null: no rounding.
        share_name: Name of the fraction of positive answers.
        label: Prefix of the names of the metrics.
    """
    predicted, true = table.at_end(answer), table.at_end(truth)
    valid = ~(predicted.isnan() | true.isnan())
    predicted, true = predicted[valid], true[valid]
    flagged, real = predicted == positive, true == positive

    def share(top: torch.Tensor, bottom: float) -> float:
        value = scale * _share(float(top.sum()), bottom + offset)
        return value if decimals is None else round(value, decimals)

    precision = share(flagged & real, float(flagged.sum()))
    recall = share(flagged & real, float(real.sum()))
    # f1 = 2 p r / (p + r), with p and r in [0, 1]; precision and recall are scaled and rounded already.
    f1 = scale * _share(2 * precision * recall / scale**2, (precision + recall) / scale + f1_offset)
    named = {
        "accuracy": share(predicted == true, len(predicted)),
        "precision": precision,
        "recall": recall,
        "f1": f1 if decimals is None else round(f1, decimals),
        share_name: share(flagged, len(predicted)),
    }
    prefix, defined = f"{label}/" if label else "", bool(valid.any())
    return {f"{prefix}{name}": value if defined else math.nan for name, value in named.items()}


@metric
def weighted_sum(
    table: RewardTable,
    *,
    metric: tuple[Callable, ...],
    weights: Mapping[str, float],
    constant: float = 0.0,
    label: str,
) -> dict[str, float]:
    """Compute the weighted sum of other metrics and a constant; return the other metrics too.

    Args:
        metric: Metrics to combine.
        weights: Weights of the values that these metrics return, by name.
        constant: Added to the sum.
        label: Name of the sum.
    """
    numbers = _numbers(table, metric, weights, "`weighted_sum` weighs")
    return {**numbers, label: constant + sum(weight * numbers[name] for name, weight in weights.items())}


@metric
def harmonic_mean(
    table: RewardTable, *, metric: tuple[Callable, ...], of: tuple[str, ...], label: str
) -> dict[str, float]:
    """Compute the harmonic mean of other metrics, as in F1 (0 if any is 0); return the other metrics too.

    Args:
        metric: Metrics to combine.
        of: Names of the values to combine.
        label: Name of the harmonic mean.
    """
    numbers = _numbers(table, metric, of, "`harmonic_mean` combines")
    values = [numbers[name] for name in of]
    mean = len(values) / sum(1 / value for value in values) if all(values) else 0.0
    return {**numbers, label: mean}


def _numbers(
    table: RewardTable, metrics: Sequence[Callable], wanted: Collection[str], what: str
) -> dict[str, float]:
    numbers = {name: value for metric in metrics for name, value in metric(table).items()}
    missing = sorted(set(wanted) - set(numbers))
    if missing:
        raise ValueError(f"{what} {missing}, but its metrics give {sorted(numbers)}")
    return numbers


def _share(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


# ---- several answers to a prompt, several turns, several roles


@metric
def pass_at(
    table: RewardTable, *, of: str, k: tuple[PositiveInt, ...], threshold: float = 0.5, label: str = ""
) -> dict[str, float]:
    """Estimate the probabilities that any of k answers is right (pass@k) and that all are (pass^k).

    These are unbiased estimates from n answers with c right ones: 1 - C(n - c, k) / C(n, k) and C(c, k) /
    C(n, k), averaged over the prompts with at least k answers; NaN without such prompts.

    Args:
        of: Name of the reward.
        k: Numbers of answers, such as [1, 8], at most `num_generations`.
        threshold: An answer is right if its reward is above this value.
        label: Prefix of the names of the metrics.
    """
    reward = table.at_end(of)
    valid = ~reward.isnan()
    index = group_index([table.group])
    answers = group_sum(valid.double(), index).long().tolist()
    right = group_sum((valid & (reward > threshold)).double(), index).long().tolist()
    counts = list(zip(answers, right, strict=True))
    prefix, named = f"{label}/" if label else "", {}
    for number in k:
        enough = [(n, c) for n, c in counts if n >= number]
        one = [1 - math.comb(n - c, number) / math.comb(n, number) for n, c in enough]
        every = [math.comb(c, number) / math.comb(n, number) for n, c in enough]
        for name, shares in ((f"pass@{number}", one), (f"pass^{number}", every)):
            named[prefix + name] = statistics.fmean(shares) if shares else math.nan
    return named


@metric
def pairwise_accuracy(table: RewardTable, *, of: str, truth: str, label: str = "") -> dict[str, float]:
    """Compute the fraction of pairs of answers to a prompt that a reward orders as another one does.

    All pairs count whose answers have different values of `truth`. Equal values of `of` are wrong, as in TRL
    and RewardBench (arXiv 2403.13787). NaN without pairs.

    Args:
        of: The reward to measure, such as the score of a reward model.
        truth: The reward with the right order, such as `preferred` of recorded pairs. A reward with `where`
            measures the rows of one source.
        label: Name of the metric; by default `accuracy/` and the name of the reward `of`.
    """
    score, right = table.at_end(of), table.at_end(truth)
    name, same = label or f"accuracy/{of}", table.group[:, None] == table.group[None]
    above = same & (right[:, None] - right[None] > EQUAL) & ~score.isnan()[:, None] & ~score.isnan()[None]
    agrees = (score[:, None] > score[None]) & above
    pairs = float(above.sum())
    return {name: float(agrees.sum()) / pairs if pairs else math.nan}


def runs_for(difference: float, std: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """Compute the runs per method needed to detect a difference of mean scores, not rounded.

    n = 2 ((z(1 - alpha / 2) + z(power)) std / difference)^2 with `std` the standard deviation between runs of
    a method (On Randomness in Agentic Evals, arXiv 2602.07150).
    """
    normal = statistics.NormalDist()
    return 2 * ((normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)) * std / difference) ** 2


@metric
def runs_needed(
    table: RewardTable,
    *,
    of: str,
    difference: PositiveFloat,
    alpha: OpenShare = 0.05,
    power: OpenShare = 0.8,
    label: str = "",
) -> dict[str, float]:
    """Compute the deviation between runs, and the runs needed for a comparison (arXiv 2602.07150).

    Run i consists of the i-th answers to all prompts; its score is their mean. The metrics are `run_std` and
    `runs_needed`, NaN with fewer than two runs (`num_generations`).

    Args:
        of: Name of the reward.
        difference: Difference of the mean scores of two methods to detect.
        alpha: Two-sided significance level.
        power: Probability to detect the difference.
        label: Prefix of the names of the metrics.
    """
    reward = table.at_end(of)
    valid = ~reward.isnan()
    order = torch.arange(len(reward), dtype=torch.float64)[:, None]
    run = group_rank(order, group_index([table.group]), valid[:, None])[:, 0][valid]
    scores = [float(reward[valid][run == number].mean()) for number in run.unique()]
    prefix = f"{label}/" if label else ""
    std = needed = math.nan
    if len(scores) > 1:
        std = statistics.stdev(scores)
        needed = float(math.ceil(runs_for(difference, std, alpha, power)))
    return {f"{prefix}run_std": std, f"{prefix}runs_needed": needed}


@metric
def win_rate(
    table: RewardTable,
    *,
    of: str,
    where: TagWords | None = None,
    draw: float = 0.0,
    label: str = "win_rate",
) -> dict[str, float]:
    """Compute the fraction of games won: a payoff above `draw` counts 1, a payoff equal to `draw` 1/2.

    Args:
        of: Reward with the payoff, summed over the turns of a game.
        where: Tags of the turns that count, such as `{role: spy}`; empty: all turns.
        draw: Payoff of a draw.
        label: Name of the metric.
    """
    table.at_end(of)  # raises an error for an unknown reward
    payoff = torch.where(_turns(table, where), table.scored[of], torch.nan)
    payoff = payoff.nansum(-1)[~payoff.isnan().all(-1)] - draw
    won = (payoff > EQUAL).double() + 0.5 * (payoff.abs() <= EQUAL).double()
    return {label: float(won.mean())}


@metric(every_turn=True)
def turns(table: RewardTable, *, where: TagWords | None = None, label: str = "turns") -> dict[str, float]:
    """Compute the mean number of turns of a conversation, and `turns/share`.

    Args:
        where: Tags of the turns that count, such as `{role: spy}`; empty: all turns. `turns/share` is the
            fraction of all steps that belong to these turns.
        label: Name of the metric.
    """
    counted = _turns(table, where)
    before = torch.cat([torch.zeros_like(table.ends[:, :1]), table.ends[:, :-1]], 1)
    steps = torch.where(table.present, table.ends - before, 0)
    share = _share(float(steps[counted].sum()), float(steps.sum()))
    return {label: float(counted.sum(-1).double().mean()), f"{label}/share": share}


def _turns(table: RewardTable, where: Mapping[str, str] | None) -> torch.Tensor:
    """Return a mask (rows, outcomes) of the outcomes that have all tags in `where`."""
    counted = table.present.clone()
    for tag, word in (where or {}).items():
        counted &= table.tag(tag) == name_id(word)
    return counted
