"""HiPRAG: the gated bonus and good steps, by worked numbers."""

from __future__ import annotations

from mmrl.core.tool_calls import Call, CallError
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.papers.hiprag import gated_bonus, good_steps
from mmrl.runtime.scoring import SCORING, Scoring
from tests.support.tables import assert_rows, reward_table


def test_good_steps_are_paid_for_behind_a_right_answer_of_a_good_format():
    cases = [(1, 1, 0.75), (1, 1, 1.0), (1, 0, 1.0), (0, 1, 1.0), (0, 0, 1.0), (1, 1, None)]
    right, good, share = zip(*cases, strict=True)
    table = reward_table(
        {"right": right, "format": good, "share": share}, weights={"format": 0.0, "share": 0.0}
    )
    found = gated_bonus(table, of="right", format="format", share="share").values[:, 0]
    assert_rows(found, [[1.3], [1.4], [0.8], [0.2], [0], [1]])


def talk(*turns):
    """Make the messages of a conversation: calls in turns of the policy, and replies."""
    return [
        Message("tool", (Part(turn),))
        if isinstance(turn, str)
        else Message("assistant", (Part("x"),), calls=turn)
        for turn in turns
    ]


def shares(*talks):
    outcomes = [Outcome("x") for _ in talks]
    prompts = [Prompt(f"p{i}", (), "Paris") for i in range(len(talks))]
    held = SCORING.set(Scoring(rows=tuple(range(len(talks))), turns=talks))
    try:
        return good_steps(prompts, outcomes)
    finally:
        SCORING.reset(held)


def test_calls_are_good_until_a_reply_has_the_answer_and_unless_they_are_made_again():
    a, b = Call("search", {"query": "a"}), Call("search", {"query": "b"})
    assert shares(
        talk((a,), "a river", (b,), "in paris.", ()),  # all are good
        talk((a,), "in Paris", (b,), "more", ()),  # the second came too late
        talk((a, a), "none, Parisian", (CallError("?"),), "none", ()),  # made again, and malformed
        talk(()),
    ) == [1, 2 / 3, 0.5, 1]
