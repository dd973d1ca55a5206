"""From names in a config to pieces that can be called: options, schedules, random streams, memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import Needs
from mmrl.config.schema import Config, ConfigError, Piece, parse
from mmrl.core.protocols import Observer
from mmrl.core.rng import Stream
from mmrl.core.types import Clock, Unit
from tests.support.tables import moved, reward_table
from tests.support.toys import RunningMean, ToyText, plan, prompts

LINEAR = {"name": "linear", "start": 0.0, "end": 1.0, "steps": 4}


# Pieces that configs below name as `tests.config.test_binding:name`.


def noisy(table, *, generator: torch.Generator, scale: float = 1.0):
    """Add noise."""
    return table.put(table.values + scale * torch.rand(1, generator=generator, dtype=torch.float64))


class Streaming:
    """Keep the stream."""

    def __init__(self, data, *, stream: Stream, size: int = 3, share: float | None = None) -> None:
        self.data, self.stream, self.size, self.share = data, stream, size, share


def whole(table, *, number: int = 3):
    """Multiply by a whole number."""
    assert isinstance(number, int)
    return table.put(table.values * number)


@pytest.fixture
def pieces():
    return Pieces(Stream(seed=1))


def made(pieces, kind, name, *given, **options):
    return pieces.make(kind, Piece(name, options), *given)


# ---- options


def test_options_are_handed_over_with_every_call(pieces):
    limit = made(pieces, "advantage", "clip_advantage", max_advantage=1.0)
    assert limit(reward_table([-3, 0.5])).values.flatten().tolist() == [-1, 0.5]


def test_options_are_brought_into_the_type_of_the_piece(pieces):
    assert made(pieces, "advantage", "clip_advantage", max_advantage=2).options == {"max_advantage": 2.0}
    assert made(pieces, "advantage", "group_center", by=["group"]).options == {"by": ("group",)}


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        (
            "advantage",
            "clip_advantage",
            {"max_advantage": "5"},
            "'here.max_advantage' must be a number, not '5'",
        ),
        ("advantage", "group_center", {"singleton": "none"}, "'here.singleton' must be one of 'zero', 'raw'"),
        (
            "advantage",
            "clip_advantag",
            {},
            "here: no advantage is called 'clip_advantag'; did you mean 'clip_advantage'?",
        ),
        ("surrogate", "clip", {"epsilon_hgh": 0.3}, "here: surrogate 'clip' has no option 'epsilon_hgh'"),
        ("advantage", "pick", {}, "here: advantage 'pick' needs the option of"),
        ("aggregation", "fixed_length", {}, "needs the option max_completion_length"),
    ],
)
def test_mistakes_are_named_with_their_place(pieces, kind, name, options, message):
    with pytest.raises(ConfigError, match=message):
        pieces.make(kind, Piece(name, options), place="here")


def test_a_kind_as_an_option_holds_a_piece_or_a_list_of_them(pieces):
    objective = made(
        pieces,
        "objective",
        "policy_gradient",
        surrogate={"name": "clip", "epsilon": 0.1},
        aggregation="step_mean",
        penalty=["k1", {"name": "k3", "coef": 0.5}],
    )
    assert objective.surrogate.options == {"epsilon": 0.1}
    assert [bound.name for bound in objective.penalty] == ["k1", "k3"]
    assert objective.ratio.entry.full_name == "step_ratio", "a default may be a piece"
    with pytest.raises(ConfigError, match=r"objective.penalty\[1\]: no penalty is called 'k33'"):
        made(
            pieces,
            "objective",
            "policy_gradient",
            surrogate="clip",
            aggregation="step_mean",
            penalty=["k1", "k33"],
        )


def test_checking_makes_nothing(pieces):
    entry = pieces.check("data", Piece("tests.support.toys:prompts", {"num": 3}))
    assert entry.target is prompts
    assert pieces.made == {}
    with pytest.raises(ConfigError, match="data.num' must be a whole number"):
        pieces.check("data", Piece("tests.support.toys:prompts", {"num": "three"}))


def test_what_wraps_something_is_made_at_once_and_remembered(pieces):
    policy = made(pieces, "policy", "tests.support.toys:ToyText", length=3)
    reference = made(pieces, "reference", "ema", policy, decay=0.5)
    assert isinstance(policy, ToyText)
    assert (policy.table.shape[1], reference.decay) == (3, 0.5)
    assert pieces.made == {"policy": policy, "reference": reference}


def test_a_reward_carries_what_its_caller_needs_beside_its_options(pieces):
    bound = made(
        pieces, "reward", "exact_match", weight=2, label="right", timeout=3, on_error="skip", tag="box"
    )
    assert (bound.weight, bound.label, bound.name, bound.options) == (2.0, "right", "right", {"tag": "box"})
    assert bound.call == {"timeout": 3.0, "on_error": "skip"}
    plain = made(pieces, "reward", "exact_match")
    assert (plain.weight, plain.name, plain.call) == (1.0, "exact_match", {})
    with pytest.raises(ConfigError, match="reward.weight' must be a number"):
        made(pieces, "reward", "exact_match", weight="heavy")


def test_only_rewards_carry_a_weight(pieces):
    with pytest.raises(ConfigError, match="advantage 'total' has no option 'weight'"):
        made(pieces, "advantage", "total", weight=1.0)


# ---- what a piece reads


def test_a_piece_needs_the_policy_that_it_is_set_against(pieces):
    assert set(made(pieces, "penalty", "k3").needs.others) == {"ref"}
    assert set(made(pieces, "penalty", "k3", against="ema").needs.others) == {"ema"}
    assert not made(pieces, "ratio", "step_ratio").needs.others, "the current pass can answer for `old`"
    assert set(made(pieces, "ratio", "step_ratio", against="engine").needs.others) == {"engine"}
    assert made(pieces, "ratio", "sequence_ratio").needs.unit == Unit.ROW


# ---- schedules


def test_an_option_that_is_a_number_follows_a_schedule(pieces):
    new, batch = moved([[0.0]], [1])
    k3 = made(pieces, "penalty", "entropy_bonus", coef=LINEAR)
    new = type(new)(new.logp, {"entropy": torch.ones(1, 1)})
    values = []
    for step in (0, 1, 4):
        pieces.tick(Clock(step))
        values.append(float(k3(new, batch)))
    assert values == [0, -0.25, -1]


def test_before_the_first_tick_an_option_has_its_first_value(pieces):
    assert made(pieces, "advantage", "clip_advantage", max_advantage=LINEAR).options == {"max_advantage": 0.0}


def test_options_of_pieces_inside_pieces_follow_too(pieces):
    surrogate = {"name": "clip", "epsilon": LINEAR, "epsilon_high": {**LINEAR, "end": 2.0}}
    objective = made(pieces, "objective", "policy_gradient", surrogate=surrogate, aggregation="step_mean")
    pieces.tick(Clock(2))
    assert objective.surrogate.options == {"epsilon": 0.5, "epsilon_high": 1.0}


def test_options_of_what_was_made_follow_as_its_attributes(pieces):
    reference = made(pieces, "reference", "ema", ToyText(), decay=LINEAR)
    sampler = made(pieces, "sampler", "tests.config.test_binding:Streaming", [], share={**LINEAR, "end": 4.0})
    pieces.tick(Clock(3))
    assert (reference.decay, sampler.share) == (0.75, 3.0)


def test_a_whole_number_follows_a_schedule_rounded(pieces):
    bound = made(pieces, "advantage", "tests.config.test_binding:whole", number={**LINEAR, "end": 10.0})
    seen = []
    for step in range(5):
        pieces.tick(Clock(step))
        seen.append(bound(reward_table([1])).values.item())
    # 0, 2.5, 5, 7.5, 10; halves go to the even neighbour
    assert seen == [0, 2, 5, 8, 10]


def test_an_option_that_is_no_number_follows_nothing(pieces):
    with pytest.raises(ConfigError, match="advantage.of' must be a text"):
        made(pieces, "advantage", "pick", of=LINEAR)


def test_mistakes_in_a_schedule_are_named_with_their_place(pieces):
    with pytest.raises(ConfigError, match="advantage.max_advantage: no schedule is called 'linaer'"):
        made(pieces, "advantage", "clip_advantage", max_advantage={"name": "linaer"})
    with pytest.raises(ConfigError, match="advantage.max_advantage.end' must be a number"):
        made(pieces, "advantage", "clip_advantage", max_advantage={**LINEAR, "end": "later"})


def test_a_number_is_a_number_or_a_schedule(pieces):
    assert pieces.number(1, NonNegativeFloat, "rate") == 1.0
    assert pieces.number(LINEAR, NonNegativeFloat, "rate")(Clock(2)) == 0.5
    with pytest.raises(ConfigError, match="'rate' must be a number, not 'fast'"):
        pieces.number("fast", NonNegativeFloat, "rate")


# ---- randomness and memory


def test_a_generator_is_drawn_anew_for_every_moment_and_alike_in_every_run():
    def draws(seed):
        pieces = Pieces(Stream(seed))
        bound = made(pieces, "advantage", "tests.config.test_binding:noisy")
        values = []
        for pieces.stream.step in range(3):
            values.append(bound(reward_table([0])).values.item())
        return values

    first = draws(1)
    assert len(set(first)) == 3
    assert first == draws(1) != draws(2)


def test_a_stream_is_the_runs_own(pieces):
    sampler = made(pieces, "sampler", "tests.config.test_binding:Streaming", [1, 2], size=5)
    assert sampler.stream is pieces.stream
    assert (sampler.data, sampler.size) == ([1, 2], 5)


@pytest.mark.parametrize(
    ("kind", "name", "option"),
    [("advantage", "tests.config.test_binding:noisy", "generator"), ("sampler", "uniform", "stream")],
)
def test_what_the_run_fills_is_refused_in_a_config(pieces, kind, name, option):
    with pytest.raises(ConfigError, match=f"'{kind}.{option}' is filled by the run; leave it out"):
        pieces.check(kind, Piece(name, {option: 1}))


def test_pieces_with_a_memory_are_listed_by_their_place(pieces):
    bound = pieces.make("advantage", Piece("tests.support.toys:RunningMean"), place="advantage[1]")
    pieces.make("sampler", Piece("uniform"), prompts(num=2))
    assert list(pieces.that_are(Observer)) == ["advantage[1]"]
    table = reward_table([1, 3])
    pieces.that_are(Observer)["advantage[1]"].observe((), table)
    assert bound(table).values.flatten().tolist() == [-1, 1], "what is called is what observes"
    assert isinstance(pieces.that_are(Observer)["advantage[1]"], RunningMean)


def test_bound_pieces_do_not_share_their_options(pieces):
    one, two = (made(pieces, "advantage", "clip_advantage", max_advantage=value) for value in (1.0, 2.0))
    assert (one.options, two.options) == ({"max_advantage": 1.0}, {"max_advantage": 2.0})
    assert dataclasses.is_dataclass(one)


# ---- whole configurations


def test_every_piece_of_a_configuration_is_checked_by_its_place(pieces):
    config = parse(plan("x", references={"ref": "frozen"}, metrics=["mean"]), Config)
    checked = pieces.check_all(config)
    assert {
        "policy",
        "references.ref",
        "metrics[0]",
        "rollout.engine[0]",
        "learn.optimizer",
    } <= checked.keys()
    assert isinstance(checked["objective"].needs, Needs), "what loads nothing is made"
    assert checked["policy"].function is ToyText, "what may load is not"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"references": {"ref": "frozn"}}, "references.ref: no reference is called 'frozn'"),
        ({"evaluation": {"metrics": ["maen"]}}, r"evaluation.metrics\[0\]: no metric is called 'maen'"),
        ({"learn": {"optimizer": {"name": "sgd", "momentum": 2}}}, "'learn.optimizer.momentum' must be"),
        ({"learn": {"learning_rate": -1}}, "'learn.learning_rate' must be at least 0"),
    ],
)
def test_mistakes_anywhere_in_a_configuration_are_named(pieces, changes, message):
    with pytest.raises(ConfigError, match=message):
        pieces.check_all(parse(plan("x", **changes), Config))


def test_a_field_is_made_as_it_holds_its_pieces(pieces):
    config = parse(plan("x", references={"ref": "frozen"}, metrics=["mean", "mean"]), Config)
    policy = pieces.make_field(config, "policy")
    assert isinstance(policy, ToyText)
    assert [bound.name for bound in pieces.make_field(config, "metrics")] == ["mean", "mean"]
    assert list(pieces.make_field(config, "references", policy)) == ["ref"]
    assert "references.ref" in pieces.made


def test_a_list_in_place_of_one_piece_is_a_mistake(pieces):
    with pytest.raises(ConfigError, match="reward.engine takes one engine, not a list; write it without"):
        pieces.name("reward", Piece("judge", {"engine": [{"name": "vision.generate"}]}))
    with pytest.raises(ConfigError, match="reward.policy takes one policy, not a list"):
        pieces.name("reward", Piece("judge", {"engine": "vision.generate", "policy": ["vision.tokens"]}))


def test_only_second_models_are_like_the_policy_of_the_run():
    pieces = Pieces(Stream(), Piece("tests.support.toys:ToyText"))
    critic = {"advantage": ["total"], "objective": "value_regression"}
    assert "policy" in pieces.name("reference", Piece("second_model", critic)).options
    server = {"engine": {"name": "chat_completions", "url": "http://localhost:8000/v1", "model": "judge"}}
    assert "policy" not in pieces.name("reward", Piece("judge", server)).options
    assert "policy" not in pieces.name("engine", Piece("vision.with_prefix_rollouts")).options
