"""Ranges of options: every number that a configuration sets is refused where it makes no sense."""

from __future__ import annotations

import inspect
import math
import typing
from typing import Annotated

import pytest

from mmrl.build import check
from mmrl.config.binding import Pieces
from mmrl.config.ranges import (
    Ascending,
    AtMost,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Probability,
    Range,
    ShareBelowOne,
    Taken,
    is_number,
    is_whole,
    marks,
)
from mmrl.config.registry import HOMES, Entry
from mmrl.config.schema import Config, ConfigError, Piece, convert, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from tests.config.test_schema import WHOLE
from tests.support.configs import library_pieces

# Numbers that may be anything finite: shifts, scales and bars of metrics and rewards, which have any sign.
FREE = {
    "constant.value",
    "vision.steering.scale", "share_among_turns.above",
    "with_reflection.threshold", "with_solved_examples.threshold",
    "alignment.beta", "delegated_reward.failed", "delegated_reward.below",
    "delegated_reward.above", "partial_credit.threshold", "tool_productivity.threshold",
    "pass_at.threshold", "win_rate.draw", "shrunk_mean.low", "shrunk_mean.high",
    "judge.scale", "tournament.scale", "rubric.scale", "barrier.thresholds", "merge_weights.weights",
    "threshold.above", "threshold.below", "cosine_length.right", "cosine_length.wrong",
    "tempsamp_anchor.lambda_off", "tempsamp_downscale.max_reward", "group_center.shift", "scale.factor",
    "tempsamp_shaping.threshold", "value_anchor.k", "metric_spike.above", "anchor_chosen.delta",
    "bco_pair.delta", "kto.delta", "weighted_sum.constant", "weighted_sum.weights",
    "binary_classification.positive", "binary_classification.scale", "binary_classification.offset",
    "binary_classification.f1_offset", "ratio_of_sums.scale", "ratio_of_sums.offset", "recall_at.at",
    "clip_score.divide_by", "diffusion.pick_score.divide_by", "learning_velocity.open_at", "pools.edges",
    "with_contrast.above", "with_successes.above", "best_hint.threshold", "first_success.threshold",
    "hint_reward.threshold",
    "length_band.bonus", "length_band.above", "vision.temporal_contrast.bonus",
    "vision.temporal_contrast.above", "with_hints.threshold", "not_all_right.max_reward", "adora.threshold",
    "capped_bonus.coef", "conditional_halves.mu", "conditional_halves.a", "conditional_halves.b",
    "covariance_mask.low", "covariance_mask.high", "distinct.threshold", "keep_steps.at_least",
    "keep_steps.at_most", "virtual_maximum.max_reward", "hot_mix.threshold",
    "bilevel_pairs.threshold", "branch_pairs.threshold", "towards.target", "towards.rate",
}  # fmt: skip
EACH = [(entry, name) for kind in HOMES for entry in library_pieces(kind) for name in entry.options]


def numeric(wanted: object) -> bool:
    """Tell whether an annotation holds a number anywhere inside."""
    return wanted in (int, float) or any(
        map(numeric, typing.get_args(wanted) if typing.get_origin(wanted) is not typing.Literal else ())
    )


def bounded(wanted: object) -> bool:
    """Tell whether the numbers inside an annotation have a range."""
    if typing.get_origin(wanted) is Annotated and any(
        isinstance(mark, Range | Taken) for mark in wanted.__metadata__
    ):
        return True
    inner = [one for one in typing.get_args(wanted) if numeric(one)]
    return bool(inner) and all(map(bounded, inner))


def wrong(kind: str, name: str, **options):
    with pytest.raises(ConfigError) as error:
        Pieces(Stream()).check(kind, Piece(name, options), "here")
    return str(error.value)


# ---- types


@pytest.mark.parametrize(
    ("wanted", "inside", "outside", "spelled"),
    [
        (PositiveInt, [1, 5], [0, -1], "at least 1"),
        (NonNegativeInt, [0], [-1], "at least 0"),
        (PositiveFloat, [1e-9], [0, -1e-9], "more than 0"),
        (NonNegativeFloat, [0], [-1e-9], "at least 0"),
        (Probability, [0, 0.5, 1], [-0.1, 1.1], "at least 0 and at most 1"),
        (PositiveShare, [1e-9, 1], [0, 1.1], "more than 0 and at most 1"),
        (ShareBelowOne, [0, 0.999], [1, -0.1], "at least 0 and less than 1"),
        (Annotated[float, Range(high=1)], [-5, 1], [2], "at most 1"),
        (Annotated[tuple[int, int], Ascending()], [(1, 1), (1, 2)], [(2, 1)], "in ascending order"),
        (tuple[Probability, ...], [(0, 1)], [(0, 2)], "at least 0 and at most 1"),
        (PositiveInt | None, [None, 1], [0], "at least 1"),
    ],
)
def test_a_range_holds_its_bounds_and_is_spelled(wanted, inside, outside, spelled):
    for value in inside:
        assert convert(value, wanted, "x") == value
    for value in outside:
        with pytest.raises(ConfigError, match=f"must be {spelled}, not"):
            convert(value, wanted, "x")


def test_a_number_is_found_inside_a_range_and_a_union_and_not_inside_a_list():
    assert (
        is_number(PositiveInt | None) and is_number(float) and is_number(Annotated[Probability, AtMost("x")])
    )
    assert not is_number(tuple[float, ...]) and not is_number(str | None)
    assert is_whole(PositiveInt | None) and not is_whole(PositiveInt | float)


# ---- every piece


@pytest.mark.parametrize(("entry", "name"), EACH, ids=[f"{e.kind}-{e.full_name}-{n}" for e, n in EACH])
def test_every_number_of_a_piece_has_a_range_which_its_default_is_in(entry: Entry, name: str):
    hints, parameter = entry.hints, entry.options[name]
    where = f"{entry.target.__module__}: the option `{name}` of {entry.kind} '{entry.full_name}'"
    assert name in hints, f"{where} has no type that can be read; annotate it"
    wanted = hints[name]
    if not numeric(wanted):
        return
    assert bounded(wanted) or f"{entry.full_name}.{name}" in FREE, (
        f"{where} is a number without a range; use a type of mmrl.config.ranges such as "
        f"NonNegativeFloat, or, if any finite number is right, add "
        f"'{entry.full_name}.{name}' to FREE in tests/config/test_ranges.py"
    )
    if parameter.default is not inspect.Parameter.empty:
        assert convert(parameter.default, wanted, name) == parameter.default
    assert all(mark.option in entry.options for mark in marks(wanted, AtMost))
    if is_number(wanted):
        for value in (math.nan, math.inf, -math.inf, 10**30):
            with pytest.raises(ConfigError, match=f"'{name}' must be"):
                convert(value, wanted, name)


# ---- nonsense that would train


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("reward", "exact_match", {"weight": math.nan}, "'here.weight' must be a finite number, not nan"),
        ("compare", "sigmoid", {"weight": math.inf}, "'here.weight' must be a finite number, not inf"),
        ("reference", "ema", {"decay": 7}, "'here.decay' must be at least 0 and at most 1, not 7.0"),
        (
            "policy",
            "vision.tokens",
            {"model": "m", "lora_rank": -1},
            "'here.lora_rank' must be at least 0, not -1",
        ),
        ("engine", "vision.generate", {"temperature": -1}, "'here.temperature' must be at least 0, not -1.0"),
        (
            "engine",
            "vision.generate",
            {"top_p": 3},
            "'here.top_p' must be more than 0 and at most 1, not 3.0",
        ),
        ("compare", "sigmoid", {"beta": -0.1}, "'here.beta' must be more than 0, not -0.1"),
        ("surrogate", "clip", {"epsilon": -0.2}, "'here.epsilon' must be at least 0, not -0.2"),
        (
            "surrogate",
            "cispo",
            {"clip_min": 2, "clip_max": 1},
            "'here.clip_min' must be at most 'clip_max', 1, not 2",
        ),
        (
            "surrogate",
            "cispo",
            {"clip_min": 6},
            "'here.clip_min' must be at most 'clip_max', 5.0, not 6",
        ),
        ("penalty", "k3", {"coef": -1}, "'here.coef' must be at least 0, not -1.0"),
        ("cache", "compression.kivi", {"nbits": 0}, "'here.nbits' must be one of 1, 2, 4, 8, not 0"),
        ("advantage", "high_entropy", {"top": 1.5}, "'here.top' must be at least 0 and at most 1, not 1.5"),
        ("optimizer", "adamw", {"beta1": 1}, "'here.beta1' must be at least 0 and less than 1, not 1.0"),
        ("engine", "diffusion.denoise", {"num_inference_steps": -4}, "must be at least 1, not -4"),
        (
            "engine",
            "diffusion.denoise",
            {"stochastic": [5, 2]},
            "'here.stochastic' must be in ascending order",
        ),
        (
            "engine",
            "diffusion.denoise",
            {"solver": {"name": "diffusion.flow_sde", "noise_level": -1}},
            "'here.solver.noise_level' must be more than 0, not -1.0",
        ),
    ],
)
def test_an_option_outside_of_its_range_is_refused_with_place_value_and_range(kind, name, options, message):
    assert message in wrong(kind, name, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learn": {"learning_rate": math.nan}}, "'learn.learning_rate' must be a finite number, not nan"),
        ({"learn": {"learning_rate": math.inf}}, "'learn.learning_rate' must be a finite number, not inf"),
        (
            {"rollout": {"engine": ["offline"], "num_generations": 0}},
            "'rollout.num_generations' must be at least 1",
        ),
    ],
)
def test_a_key_outside_of_its_range_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        parse({**WHOLE, **change}, Config)


def test_a_learning_rate_below_zero_is_refused():
    with pytest.raises(ConfigError, match="'learn.learning_rate' must be at least 0, not -1.0"):
        Pieces(Stream()).number(-1, NonNegativeFloat, "learn.learning_rate")


def test_a_configuration_that_no_file_gave_is_checked_as_well():
    config = parse(WHOLE, Config)
    object.__setattr__(config.rollout, "num_prompts", -3)
    with pytest.raises(ConfigError, match="'rollout.num_prompts' must be at least 1, not -3"):
        check(config)


# ---- schedules


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            {"name": "linear", "start": 0.5, "end": 7, "steps": 4},
            "'here.decay.end' must be at least 0 and at most 1",
        ),
        (
            {"name": "linear", "start": math.nan, "end": 1, "steps": 4},
            "'here.decay.start' must be a finite number",
        ),
        ({"name": "constant", "value": -1}, "'here.decay.value' must be at least 0 and at most 1, not -1.0"),
        (
            {"name": "ramp", "slope": 0.1, "limit": 2},
            "'here.decay.limit' must be at least 0 and at most 1, not 2.0",
        ),
        (
            {"name": "linear", "start": 0, "end": 1, "steps": 0},
            "'here.decay.steps' must be at least 1, not 0",
        ),
        (
            {"name": "sliding_window", "start": 3, "stop": 1},
            "'here.decay.start' must be at most 'stop', 1, not 3",
        ),
        (
            {"name": "tests.config.test_ranges:wild", "values": [3.0]},
            "here.decay: schedule 'tests.config.test_ranges.wild' at step 0",
        ),
    ],
)
def test_what_a_schedule_is_known_to_give_is_in_the_range_of_the_option(schedule, message):
    assert message in wrong("reference", "ema", decay=schedule)


def test_a_schedule_of_whole_numbers_is_checked_as_rounded():
    name, options = "diffusion.denoise", {"name": "linear", "start": 0.6, "end": 3.4, "steps": 4}
    Pieces(Stream()).check("engine", Piece(name, {"num_inference_steps": options}), "here")
    assert "'here.num_inference_steps.start' must be at least 1, not 0" in wrong(
        "engine", name, num_inference_steps={**options, "start": 0.4}
    )


def wild(clock: Clock, *, values: list[float]) -> float:
    """Give the value of the step."""
    return values[clock.step]


@pytest.mark.parametrize(
    ("value", "what"),
    [(math.nan, "a finite number, not nan"), (-0.5, "at least 0, not -0.5"), (None, "a number")],
)
def test_a_value_of_a_schedule_is_checked_when_it_is_taken(value, what, monkeypatch):
    given = iter([0.5, value])
    monkeypatch.setattr("tests.config.test_ranges.wild", lambda clock: next(given))
    schedule = {"name": "tests.config.test_ranges:wild"}
    rate = Pieces(Stream()).number(schedule, NonNegativeFloat, "learn.learning_rate")
    with pytest.raises(ConfigError, match=f"learn.learning_rate: schedule .* at step 3: .* must be {what}"):
        rate(Clock(3))


def test_a_list_of_numbers_follows_no_schedule():
    assert "'here.keep' must be a list, not {" in wrong(
        "transform", "compression.pyramid_drop", keep={"name": "constant", "value": 0.5}
    )
