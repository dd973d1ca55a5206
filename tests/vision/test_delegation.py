"""The game of a planner and its sub-agents: who reads what, tags, and the worth of plans."""

from __future__ import annotations

from mmrl.core.rng import Stream
from mmrl.engines.play import Play
from mmrl.vision.games.delegation import Delegation
from tests.support.playing import Answering
from tests.support.toys import ToyText
from tests.vision.test_spy import pair


def play(answers, seed=0, **options):
    """Play a game with answers in order; return its rows and what was read."""
    listed, read = iter(answers), []

    def answer(prompt):
        read.append(prompt)
        return next(listed)

    inner = Answering(ToyText(), answer)
    rows = Play(inner, game=Delegation(**options), stream=Stream(seed)).rollout([pair()])
    return [row.outcomes[0] for row in rows], read


def tags(outcomes, *names):
    return [tuple(outcome.tags[name] for name in names) for outcome in outcomes]


def test_a_planner_asks_and_answers():
    plan = "<task>count red</task> and <task>count blue</task><task>more</task>"
    outcomes, read = play([plan, "3 <image>", "4", "<task>count red</task>", "5", "7 <task>no</task>"])
    assert tags(outcomes, "role", "part") == [
        *(("main", "plan"), ("sub", "act"), ("sub", "act")),
        *(("main", "plan"), ("sub", "act"), ("main", "plan")),
    ]
    nodes, parents = zip(*tags(outcomes, "node", "parent"), strict=True)
    assert len(set(nodes)) == 6
    assert parents == ("", nodes[0], nodes[0], nodes[0], nodes[3], nodes[3])
    assert play(["a hat"], seed=1)[0][0].tags["node"] != play(["a hat"])[0][0].tags["node"]
    # Both tasks are new, then the only one is old; the last plan is the answer.
    assert [o.recorded.get("turn_reward") for o in outcomes] == [1.0, None, None, 0.0, None, 1.0]
    assert read[1].text == "count red" and len(read[1].media) == 2
    assert read[3].text.startswith("What is different?")
    assert "Task: count red\nReply: 3 < image>\nTask: count blue\nReply: 4\n" in read[3].text
    assert "answer now" in read[5].text


def test_a_plan_without_a_task_is_the_answer():
    outcomes, _ = play(["a hat"])
    assert len(outcomes) == 1 and outcomes[0].recorded == {"turn_reward": 1.0}


def test_a_planner_that_decides_keeps_its_plan_or_changes_it():
    outcomes, read = play(
        ["<task>a</task>", "1", "I keep it", "2", "switch", "<task>b</task>", "3", "done"],
        rounds=3,
        decide=True,
    )
    assert [part for (part,) in tags(outcomes, "part")] == [
        "plan", "act", "switch", "act", "switch", "plan", "act", "plan"
    ]  # fmt: skip
    assert read[3].text == "a" and "Write keep" in read[2].text
