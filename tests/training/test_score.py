"""Rewards of a round: what is measured, what does not apply, and what is a fault."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace

import numpy
import pytest
import torch

from mmrl.advantages.select import per_step
from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.reward_table import ABSENT, name_id
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Trajectory
from mmrl.reporting.metrics import describe_rewards
from mmrl.training.score import RewardFault, RewardLog, score
from tests.support.toys import prompts


def rollouts_of(*texts: str):
    """Make one rollout per text, two to a prompt; a text with slashes holds several outcomes, one per
    step."""
    rows = []
    for i, text in enumerate(texts):
        prompt = prompts()[i // 2]
        words = text.split("/")
        outcomes = tuple(Outcome(text=word, end=k + 1) for k, word in enumerate(words))
        rows.append(Trajectory(prompt, prompt.uid, outcomes, None, len(words)))
    return tuple(rows)


FOUR = rollouts_of("a", "bb", "ccc", "dddd")


def scored(measure, rollouts=FOUR, **settings):
    """Score with one function as a config names it."""
    return score([bound(measure, **settings)], rollouts)


def bound(measure, **settings):
    name = f"{__name__}:{measure.__name__}"
    globals()[measure.__name__] = measure  # a config finds functions by name only
    return Pieces(Stream()).make("reward", Piece(name, settings))


def lengths(asked, outcomes):
    return [len(outcome.text) for outcome in outcomes]


async def patient_lengths(asked, outcomes):
    await asyncio.sleep(0.01)
    return [len(outcome.text) for outcome in outcomes]


def halves(asked, outcomes):
    return torch.tensor([len(outcome.text) / 2 for outcome in outcomes])


def mixed_numbers(asked, outcomes):
    return [True, 2, numpy.float32(0.5), torch.tensor(0.25)]


def only_long(asked, outcomes):
    return [None if len(outcome.text) < 3 else 1.0 for outcome in outcomes]


def too_few(asked, outcomes):
    return [1.0] * (len(outcomes) - 1)


def one_nan(asked, outcomes):
    return [math.nan if outcome.text == "bb" else 1.0 for outcome in outcomes]


def infinite(asked, outcomes):
    return [math.inf] * len(outcomes)


def raising(asked, outcomes):
    raise KeyError("span")


async def patiently_raising(asked, outcomes):
    raise KeyError("span")


@pytest.fixture
def released():
    """Let rewards that hang return when the test is over."""
    RELEASED.clear()
    yield
    RELEASED.set()


RELEASED = threading.Event()


def slow(asked, outcomes):
    RELEASED.wait(300)
    return [1.0] * len(outcomes)


async def patiently_slow(asked, outcomes):
    await asyncio.sleep(300)


def one_number(asked, outcomes):
    return 0.5


def words(asked, outcomes):
    return ["0.5"] * len(outcomes)


def nothing(asked, outcomes):
    return None


# ---- measured


def test_numbers_stand_by_row_and_place():
    table = scored(lengths, rollouts_of("a/bb", "ccc"))
    # Two rows; the second has no second outcome.
    assert table.values[:, 0].tolist() == [[1, 2], [3, 0]]
    assert table.valid[:, 0].tolist() == [[True, True], [True, False]]
    assert table.ends.tolist() == [[1, 2], [1, ABSENT]]
    assert table.at_end("lengths").tolist() == [2, 3]
    assert (table.uids, table.length.tolist()) == (("p0", "p0"), [2, 1])


def test_all_outcomes_of_a_round_are_measured_at_once():
    seen = []

    def listening(asked, outcomes):
        seen.append([(prompt.uid, outcome.text) for prompt, outcome in zip(asked, outcomes, strict=True)])
        return [0.0] * len(outcomes)

    scored(listening, rollouts_of("a/bb", "ccc", "d"))
    assert seen == [[("p0", "a"), ("p0", "bb"), ("p0", "ccc"), ("p1", "d")]]


@pytest.mark.parametrize("measure", [halves, mixed_numbers])
def test_tensors_and_numbers_of_any_kind_are_numbers(measure):
    wanted = {"halves": [0.5, 1.0, 1.5, 2.0], "mixed_numbers": [1.0, 2.0, 0.5, 0.25]}[measure.__name__]
    assert scored(measure).values[:, 0, 0].tolist() == wanted


def test_none_does_not_apply():
    table = score([bound(only_long), bound(lengths, weight=0.5)], FOUR)
    assert table.valid[:, 0, 0].tolist() == [False, False, True, True]
    assert table.at_end("only_long").isnan().tolist() == [True, True, False, False]
    # 0.5 * 1, 0.5 * 2, 1 + 0.5 * 3, 1 + 0.5 * 4
    assert table.reward().tolist() == [0.5, 1.0, 2.5, 3.0]
    assert table.learn.all()


def test_a_reward_of_weight_0_is_a_label():
    table = score([bound(halves), bound(lengths, weight=0, label="size")], FOUR)
    assert table.names == ("halves",)
    assert table.scored["size"][:, 0].tolist() == [1, 2, 3, 4]


def test_labels_alone_can_be_measured():
    table = scored(lengths, weight=0)
    assert (table.names, table.values.shape) == ((), (4, 0, 1))
    assert table.at_end("lengths").tolist() == [1, 2, 3, 4]


def turned(tags, **others):
    """Make a conversation of one row, or of a row per turn."""
    outcomes = tuple(Outcome(text="a" * (k + 1), end=k + 1, tags=of_turn) for k, of_turn in enumerate(tags))
    return Trajectory(prompts()[0], "game", outcomes, None, len(tags), {}, **others)


TURNS = [{"turn": "0", "role": "spy"}, {"turn": "1", "role": "civilian"}, {"turn": "2", "role": "spy"}]


@pytest.mark.parametrize(
    "settings, wanted",
    [
        ({}, [None, None, 3]),
        ({"at": "last"}, [None, None, 3]),
        ({"at": "every"}, [1, 2, 3]),
        ({"at": "role=spy"}, [1, None, 3]),
        ({"at": "role"}, [1, 2, 3]),
        ({"at": "stage"}, [None] * 3),
    ],
)
def test_a_reward_stands_at_the_turns_that_it_looks_at(settings, wanted):
    whole = score([bound(letters, **settings)], (turned(TURNS),))
    assert numbers(whole.scored["letters"][0]) == wanted
    rows = [turned([{**tags, "episode": "g"}]) for tags in reversed(TURNS)]
    asked = [
        replace(row, outcomes=(replace(row.outcomes[0], text="a" * (3 - i)),)) for i, row in enumerate(rows)
    ]
    parts = score([bound(letters, **settings)], tuple(asked))
    assert numbers(parts.scored["letters"][:, 0].flip(0)) == wanted
    assert parts.ids["turn_number"][:, 0].tolist() == [2, 1, 0]


def numbers(column):
    return [None if math.isnan(value) else value for value in column.tolist()]


def letters(asked, outcomes):
    return [len(outcome.text) for outcome in outcomes]


def test_outcomes_that_are_no_turns_are_all_measured():
    plain = turned([{}, {}, {}])
    assert score([bound(letters)], (plain,)).scored["letters"].tolist() == [[1, 2, 3]]


def test_a_turn_of_an_episode_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="episode 'g' has the turn 'first'"):
        score([bound(letters)], (turned([{"turn": "first", "episode": "g"}]),))


def test_outcomes_of_more_turns_than_the_conversation_has_are_an_error():
    turns = (Message("assistant", (Part("a"),)),)
    with pytest.raises(ValueError, match="prompt 'p0' has 3 outcomes with the tag `turn`, .* has 1 turns"):
        score([bound(letters)], (turned(TURNS, turns=turns),))


def test_tags_become_ids_and_notes_are_padded():
    def row(length, tag):
        outcome = Outcome(text="a", tags={"turn": tag} if tag else {})
        return Trajectory(prompts()[0], "game", (outcome,), None, length, {"logp": torch.ones(length)}, False)

    table = score([bound(lengths)], (row(1, "2"), row(2, "")), notes=frozenset({"logp", "entropy"}), rank=3)
    assert table.ids["turn"].tolist() == [[name_id("2")], [0]]
    assert table.ids["group"].tolist() == [[name_id("game")]] * 2
    assert table.ids["on_policy"].tolist() == [[0], [0]]
    assert table.ends.tolist() == [[1], [2]], "an outcome without an end has seen the whole rollout"
    assert table.process.tolist() == [3, 3]
    torch.testing.assert_close(
        table.notes["logp"], torch.tensor([[1.0, math.nan], [1.0, 1.0]]).double(), equal_nan=True
    )
    assert table.notes["entropy"].isnan().all()


def test_log_probabilities_tell_which_steps_of_a_row_were_not_chosen():
    def row(logp):
        notes = {"logp": torch.tensor(logp)}
        return Trajectory(prompts()[0], "p0", (Outcome(text="a"),), None, len(logp), notes)

    assert not score([bound(lengths)], (row([-1.0, -1.0]),)).notes, "all were, and nobody asks for the note"
    table = score([bound(lengths)], (row([-1.0, math.nan]), row([-2.0])))
    assert per_step(table).valid[:, 0].tolist() == [[True, False], [True, False]]


def test_outcomes_must_stand_in_order():
    row = Trajectory(prompts()[0], "p0", (Outcome(text="a", end=2), Outcome(text="b", end=1)), None, 2)
    with pytest.raises(ValueError, match=r"'p0' must be in order, but their ends are \[2, 1\]"):
        scored(lengths, (row,))


def test_no_rollouts_make_an_empty_table():
    assert len(scored(raising, ())) == 0


# ---- side by side


def test_rewards_run_side_by_side():
    # Each waits for the other; one after the other, both would wait in vain.
    barrier = threading.Barrier(2, timeout=300)

    def left(asked, outcomes):
        barrier.wait()
        return [1.0] * len(outcomes)

    def right(asked, outcomes):
        barrier.wait()
        return [2.0] * len(outcomes)

    table = score([bound(left), bound(right)], FOUR)
    assert table.values[0, :, 0].tolist() == [1.0, 2.0]


def test_asynchronous_rewards_run_side_by_side():
    barrier = threading.Barrier(2, timeout=300)

    async def first(asked, outcomes):
        await asyncio.to_thread(barrier.wait)
        return [1.0] * len(outcomes)

    async def second(asked, outcomes):
        await asyncio.to_thread(barrier.wait)  # one after the other, both would wait in vain
        return [2.0] * len(outcomes)

    class Third:
        async def __call__(self, asked, outcomes):
            return [3.0] * len(outcomes)

    rewards = [bound(first, timeout=600), bound(lengths), bound(second, timeout=600), bound(Third)]
    assert score(rewards, FOUR).values[0, :, 0].tolist() == [1.0, 1.0, 2.0, 3.0]


# ---- faults

FAULTS = {
    too_few: "gave 3 numbers for 4 outcomes",
    one_nan: "gave nan; prompt 'p0', outcome 'bb'",
    infinite: "gave inf",
    raising: "raised KeyError: 'span'",
    patiently_raising: "raised KeyError: 'span'",
    one_number: "gave 0.5, not a number per outcome",
    words: "gave '0.5'",
    nothing: "gave None",
}


@pytest.mark.parametrize("measure", FAULTS, ids=lambda measure: measure.__name__)
def test_a_fault_stops_the_run_and_names_the_reward(measure):
    with pytest.raises(RewardFault) as fault:
        score([bound(lengths), bound(measure)], FOUR)
    assert str(fault.value).startswith(f"reward '{measure.__name__}' {FAULTS[measure]}")
    assert "on_error: skip" in str(fault.value)


@pytest.mark.parametrize("measure", [slow, patiently_slow])
def test_a_slow_reward_is_a_fault(measure, released):
    began = time.monotonic()
    with pytest.raises(
        RewardFault, match=f"'{measure.__name__}' raised TimeoutError: no answer within 0.05 s"
    ):
        scored(measure, timeout=0.05)
    assert time.monotonic() - began < 120


def test_limits_count_from_the_same_start(released):
    began = time.monotonic()
    with pytest.raises(RewardFault):
        score([bound(slow, label=str(i), timeout=1.0) for i in range(100)], FOUR)
    assert time.monotonic() - began < 60  # 1 s, not 100 times 1 s


def test_skip_drops_the_group_and_counts_it():
    table = score([bound(one_nan, on_error="skip"), bound(lengths)], FOUR)
    # "bb" is the second answer to p0: its whole group goes, p1 keeps both of its rewards.
    assert table.learn[:, 0].tolist() == [False, False, True, True]
    assert table.valid[:, :, 0].tolist() == [[False, False]] * 2 + [[True, True]] * 2
    metrics = describe_rewards(table)
    assert metrics["rewards/one_nan/error_rate"] == 0.25
    assert "rewards/lengths/error_rate" not in metrics
    # (1 + 3 + 1 + 4) / 2: half a sum of the dropped group would be no reward.
    assert metrics["reward"] == 4.5


@pytest.mark.parametrize("measure", [too_few, raising, patiently_raising])
def test_skip_drops_everything_where_a_reward_fails_as_a_whole(measure):
    table = score([bound(measure, on_error="skip"), bound(infinite, on_error="skip"), bound(lengths)], FOUR)
    assert not table.learn.any()
    metrics = describe_rewards(table)
    assert metrics[f"rewards/{measure.__name__}/error_rate"] == 1.0
    assert metrics["rewards/infinite/error_rate"] == 1.0, "every reward counts its own faults"
    assert math.isnan(metrics["reward"])
    assert metrics["rewards/lengths/mean"] == 2.5
    assert table.at_end("infinite").isnan().all()


# ---- retries


class Flaky:
    """Fails as often as it is told, then gives 1."""

    def __init__(self, *, fails: int) -> None:
        self.fails = fails

    def __call__(self, asked, outcomes):
        self.fails -= 1
        if self.fails >= 0:
            raise ConnectionError(f"{self.fails} left")
        return [1.0] * len(outcomes)


class PatientlyFlaky:
    """The same, asynchronously."""

    def __init__(self, *, fails: int) -> None:
        self.flaky = Flaky(fails=fails)

    async def __call__(self, asked, outcomes):
        return self.flaky(asked, outcomes)


@pytest.mark.parametrize("kind", [Flaky, PatientlyFlaky])
def test_a_reward_that_raises_is_called_again(kind):
    assert scored(kind, fails=2, retries=2).values.eq(1).all()
    with pytest.raises(RewardFault, match="ConnectionError: 0 left"):
        scored(kind, fails=3, retries=2)
    with pytest.raises(RewardFault, match="ConnectionError: 0 left"):
        scored(kind, fails=1)


def test_a_wrong_number_is_not_asked_for_again():
    calls = []

    def counting(asked, outcomes):
        calls.append(1)
        return [math.nan] * len(outcomes)

    with pytest.raises(RewardFault):
        scored(counting, retries=3)
    assert len(calls) == 1


# ---- rewards for some of the rows


def of_sources(*sources):
    """Give the four rollouts the column `source`."""
    return tuple(
        replace(row, prompt=replace(row.prompt, columns={**row.prompt.columns, "source": source}))
        for row, source in zip(FOUR, sources, strict=True)
    )


SOURCES = of_sources("gui", "gui", "maths", "video")


def test_a_reward_is_only_asked_about_the_rows_that_where_names():
    asked_about = []

    def noted(asked, outcomes):
        asked_about.append([outcome.text for outcome in outcomes])
        return lengths(asked, outcomes)

    table = scored(noted, SOURCES, where={"source": "maths"})
    assert asked_about == [["ccc"]]
    values = table.at_end("noted")
    assert values[2] == 3 and values[[0, 1, 3]].isnan().all()
    several = scored(noted, SOURCES, where={"source": ["gui", "video"]}).at_end("noted")
    assert several.isnan().tolist() == [False, False, True, False]


def test_a_reward_without_any_row_is_not_called():
    assert scored(raising, SOURCES, where={"source": "audio"}).at_end("raising").isnan().all()
    assert scored(raising, where={"source": "gui"}).at_end("raising").isnan().all()


def test_a_fault_names_the_row_it_is_about():
    with pytest.raises(RewardFault, match="prompt 'p1', outcome 'dddd'"):
        scored(one_infinite, SOURCES, where={"source": ["maths", "video"]})
    with pytest.raises(RewardFault, match="gave 0 numbers for 1 outcomes"):
        scored(too_few, SOURCES, where={"source": "maths"})


def one_infinite(asked, outcomes):
    return [math.inf if outcome.text == "dddd" else 1.0 for outcome in outcomes]


def test_what_a_reward_logs_of_some_rows_stands_beside_them():
    def logging(prompts, completions, log_extra, log_metric, **columns):
        log_extra("said", [text.upper() for text in completions])
        log_metric("longest", max(map(len, completions)))
        return [1.0] * len(completions)

    log = RewardLog()
    score([bound(logging, where={"source": "gui"})], SOURCES, log=log)
    assert log.columns["said"] == ["A", "BB", None, None]
    assert log.metrics["longest"] == [2]


def test_rewards_of_three_tasks_make_one_total():
    rewards = [
        bound(lengths, where={"source": "gui"}, weight=0.9),
        bound(halves, where={"source": ["maths", "video"]}, weight=0.9),
        bound(only_long, weight=0.1),
    ]
    total = score(rewards, SOURCES).reward()
    assert total.tolist() == pytest.approx([0.9, 1.8, 0.9 * 1.5 + 0.1, 0.9 * 2 + 0.1])
