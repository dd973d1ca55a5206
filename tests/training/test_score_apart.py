"""What rewards do to what they are given, what they may give, and how one of them ends without the others."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import time
from fractions import Fraction

import numpy
import pytest
import torch

from mmrl.core.reward_table import name_id
from mmrl.core.types import Outcome, Trajectory
from mmrl.reporting.metrics import describe_rewards
from mmrl.rewards.adapters import per_outcome
from mmrl.training.score import RewardFault, score
from tests.support.toys import prompts
from tests.training.test_score import FOUR, bound, lengths, patient_lengths, raising, rollouts_of, scored

# ---- what a reward does to what it is given

ROW = {
    "wanted": ["x", "y"],
    "nested": {"box": [1, 2], "tags": {"a"}, "area": torch.tensor([1.0, 2.0]), "mask": numpy.ones(2)},
}


def rows_with_columns():
    columns = {"prompt": [{"role": "user", "content": "?"}], **ROW}
    prompt = dataclasses.replace(prompts()[0], target=["x", {"y": [1]}], columns=copy.deepcopy(columns))
    outcomes = [Outcome(text=text, tags={"form": text}, recorded={"r": 1.0}) for text in ("bb", "a", "ccc")]
    return tuple(Trajectory(prompt, "p", (outcome,), None, 1) for outcome in outcomes)


def spoil(asked, outcomes):
    outcomes.sort(key=lambda outcome: outcome.text)
    asked.pop()
    asked.append(outcomes[0])
    for prompt in asked[:-1]:
        prompt.target[1]["y"].pop()  # raises where two rows share a list
        prompt.target.clear()
        prompt.columns["nested"]["box"].append(9)
        prompt.columns["nested"]["tags"].clear()
        prompt.columns["nested"]["area"].zero_()
        prompt.columns["nested"]["mask"][:] = 0
        prompt.columns.pop("wanted")
    for outcome in outcomes:
        outcome.tags.clear()
        outcome.recorded["r"] = 7.0


def spoil_trl(completions, prompts, wanted, nested):
    completions.sort(key=lambda messages: messages[0]["content"])
    prompts[0][0].clear()
    prompts.clear()
    wanted[0].pop()
    nested[0]["box"].clear()
    return [0.0] * len(completions)


class Spoils:
    """Spoils what it is given, fails once, and then looks at what it is given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, asked, outcomes):
        self.calls += 1
        if self.calls == 1:
            spoil(asked, outcomes)
            raise ConnectionError("once more")
        return intact(asked, outcomes)


class SpoilsPatiently(Spoils):
    """The same, asynchronously."""

    async def __call__(self, asked, outcomes):
        return super().__call__(asked, outcomes)


def spoils_at_once(asked, outcomes):
    spoil(asked, outcomes)
    return [0.0] * len(outcomes)


async def spoils_at_once_patiently(asked, outcomes):
    spoil(asked, outcomes)
    return [0.0] * len(outcomes)


def intact(asked, outcomes):
    """Give the lengths of texts where nothing was changed."""
    for prompt, outcome in zip(asked, outcomes, strict=True):
        assert prompt.target == ["x", {"y": [1]}] and prompt.columns["wanted"] == ROW["wanted"]
        nested = prompt.columns["nested"]
        assert (nested["box"], nested["tags"], nested["area"].tolist()) == ([1, 2], {"a"}, [1.0, 2.0])
        assert nested["mask"].tolist() == [1, 1]
        assert prompt.columns["prompt"] == [{"role": "user", "content": "?"}]
        assert (outcome.tags, outcome.recorded) == ({"form": outcome.text}, {"r": 1.0})
    return [float(len(outcome.text)) for outcome in outcomes]


def intact_later(asked, outcomes):
    time.sleep(0.05)
    return intact(asked, outcomes)


@pytest.mark.parametrize(
    "spoiling", [spoils_at_once, spoils_at_once_patiently, spoil_trl, Spoils, SpoilsPatiently]
)
def test_a_reward_that_changes_what_it_is_given_moves_no_other(spoiling):
    rewards = [bound(spoiling, retries=1), bound(intact_later), bound(intact, label="again")]
    rows = rows_with_columns()
    for _ in range(2):  # the next collection asks the same prompts
        table = score(rewards, rows)
        assert table.scored["intact_later"][:, 0].tolist() == [2, 1, 3]
        assert table.scored["again"][:, 0].tolist() == [2, 1, 3]
        assert table.ids["form"].tolist() == [[name_id("bb")], [name_id("a")], [name_id("ccc")]]
    if spoiling in (Spoils, SpoilsPatiently):  # the second try had fresh lists
        assert table.values[:, 0, 0].tolist() == [2, 1, 3]


def blackens(asked, outcomes):
    for outcome in outcomes:
        outcome.image.zero_()
    return [0.0] * len(outcomes)


def test_pixels_are_shared_so_a_reward_that_changes_them_is_an_error():
    pixels = torch.ones(3, 2, 2, dtype=torch.uint8)
    row = Trajectory(prompts()[0], "p", (Outcome(image=pixels),), None, 1)
    with pytest.raises(RewardFault, match="one of the rewards blackens changed .* outcomes in place"):
        score([bound(blackens)], (row,))


# ---- what a reward may give


class Reader:
    """Gives what it was set up with, whatever is asked."""

    def __init__(self, *, which: str) -> None:
        self.which = which

    def __call__(self, asked, outcomes):
        return GIVEN[self.which]()


def broken_iterator():
    yield 1.0
    raise LookupError("the file has ended")


def stopping_iterator():
    yield 1.0
    next(iter(()))


class Unreadable:
    def __repr__(self):
        raise ValueError("no words for it")


GIVEN = {
    "tuple": lambda: (1, 2, 3, 4),
    "generator": lambda: (i for i in (1, 2, 3, 4)),
    "array": lambda: numpy.array([1, 2, 3, 4]),
    "bfloat16": lambda: torch.tensor([1, 2, 3, 4], dtype=torch.bfloat16, requires_grad=True),
    "parts": lambda: [numpy.float16(1), torch.tensor([2.0]), Fraction(3), numpy.int64(4)],
    "huge": lambda: [1, 10**400, 3, 4],
    "longest": lambda: [1, 10**5000, 3, 4],
    "broken": broken_iterator,
    "stopping": stopping_iterator,
    "endless": itertools.count,
    "dictionary": lambda: {1.0: "a", 2.0: "b", 3.0: "c", 4.0: "d"},
    "keys": {1.0: "a", 2.0: "b", 3.0: "c", 4.0: "d"}.keys,
    "set": lambda: {1, 2, 3, 4},
    "bytes": lambda: b"1234",
    "text": lambda: "1234",
    "nothing": lambda: None,
    "column": lambda: torch.ones(4, 1),
    "scalar": lambda: torch.tensor(1.0),
    "complex": lambda: [1, 2j, 3, 4],
    "letters": lambda: [1, b"2", 3, 4],
    "nested": lambda: [1, [2], 3, 4],
    "unreadable": lambda: [1, Unreadable(), 3, 4],
    "short array": lambda: numpy.ones(3),
}


@pytest.mark.parametrize("which", ["tuple", "generator", "array", "bfloat16", "parts"])
def test_lists_of_every_kind_are_read(which):
    assert scored(Reader, which=which).values[:, 0, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("which", "what"),
    [
        ("huge", "gave 1000"),
        ("longest", "gave a int; prompt 'p0', outcome 'bb'"),
        ("broken", "raised LookupError: the file has ended"),
        ("stopping", "raised RuntimeError: generator raised StopIteration"),
        ("endless", "gave more than 4 numbers for 4 outcomes"),
        ("dictionary", "gave {1.0: 'a', 2.0: 'b', 3.0: 'c', 4.0: 'd'}, not a number per outcome"),
        ("keys", "gave dict_keys"),
        ("set", "gave {1, 2, 3, 4}, not a number per outcome"),
        ("bytes", "gave b'1234', not a number per outcome"),
        ("text", "gave '1234', not a number per outcome"),
        ("nothing", "gave None, not a number per outcome"),
        ("column", "gave a Tensor of shape (4, 1), not a number per outcome"),
        ("scalar", "gave a Tensor of shape (), not a number per outcome"),
        ("complex", "gave 2j; prompt 'p0', outcome 'bb'"),
        ("letters", "gave b'2'"),
        ("nested", "gave [2]"),
        ("unreadable", "gave a Unreadable"),
        ("short array", "gave 3 numbers for 4 outcomes"),
    ],
)
def test_what_is_no_list_of_numbers_names_the_reward_and_what_came(which, what):
    with pytest.raises(RewardFault) as fault:
        scored(Reader, which=which, label="mine")
    assert str(fault.value).startswith(f"reward 'mine' {what}")
    assert len(str(fault.value)) < 600
    assert not scored(Reader, which=which, on_error="skip").learn.all()


def test_a_long_answer_does_not_fill_the_message():
    with pytest.raises(RewardFault) as fault:
        scored(raising, rollouts_of("a" * 10**6))
    assert len(str(fault.value)) < 600


# ---- one reward's end is not another's


def stops(asked, outcomes):
    return [next(iter(())) for _ in outcomes]


def exits(asked, outcomes):
    raise SystemExit(3)


async def cancelled(asked, outcomes):
    raise asyncio.CancelledError("by the client")


async def stops_patiently(asked, outcomes):
    next(iter(()))


async def blocks(asked, outcomes):
    time.sleep(20)
    return [1.0] * len(outcomes)


ENDS = {
    stops: "raised StopIteration",
    exits: "raised SystemExit: 3",
    cancelled: "raised CancelledError: by the client",
    stops_patiently: "raised RuntimeError: coroutine raised StopIteration",
    blocks: "raised TimeoutError: no answer within 0.2 s",
}


@pytest.mark.parametrize("measure", ENDS, ids=lambda measure: measure.__name__)
def test_a_reward_that_ends_oddly_is_named_alone(measure):
    began = time.monotonic()
    limit = {"timeout": 0.2} if measure is blocks else {}
    others = [bound(patient_lengths), bound(patient_lengths, label="beside"), bound(lengths)]
    table = score([others[0], bound(measure, on_error="skip", **limit), *others[1:]], FOUR)
    assert time.monotonic() - began < 15
    metrics = describe_rewards(table)
    assert [name for name in metrics if "error_rate" in name] == [f"rewards/{measure.__name__}/error_rate"]
    assert all(table.scored[name][:, 0].tolist() == [1, 2, 3, 4] for name in ("patient_lengths", "beside"))
    with pytest.raises(RewardFault) as fault:
        score([others[0], bound(measure, **limit), others[2]], FOUR)
    assert str(fault.value).startswith(f"reward '{measure.__name__}' {ENDS[measure]}")


def test_one_that_stops_inside_a_reward_for_one_outcome_is_no_short_list():
    @per_outcome
    def first_letter(prompt, outcome):
        return float(ord(next(iter(outcome.text))))

    with pytest.raises(RewardFault, match="reward 'first_letter' raised StopIteration"):
        scored(first_letter, rollouts_of("a", ""))


def test_a_plain_function_may_give_what_is_to_be_awaited():
    def deferred(asked, outcomes):
        return patient_lengths(asked, outcomes)

    assert scored(deferred).values[:, 0, 0].tolist() == [1, 2, 3, 4]
