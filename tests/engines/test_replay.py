"""Rows of earlier steps that are brought back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Replay
from mmrl.core.types import Message, Part
from mmrl.rewards.adapters import per_outcome
from mmrl.training.collect import collect, replay_after
from mmrl.training.loop import learnable, train
from tests.support.remembering import MEMORIES, of_memory
from tests.support.resuming import EVERYTHING, assert_alike, killed, resumed
from tests.support.toys import toy_run

TOYS = "tests.support.toys"
GROWS = {"varied": 99}  # the last step in which p0 and p1 have rewards that differ; set by the tests


@per_outcome
def until_then(prompt, outcome):
    """Reward length while answers still differ in it; nothing later."""
    return float(len(outcome.text)) if GROWS["varied"] >= 0 else 0.0


def replaying(folder, *, engine="with_replay", **options):
    listed = [f"{TOYS}:ToyNoting", {"name": engine, **options}]
    changes = options.pop("changes", {})
    listed[1] = {"name": engine, **options}
    usual = {
        "policy": f"{TOYS}:ToyRecalling",
        "rollout": {"engine": listed, "num_prompts": 2, "num_generations": 4},
        "rewards": [f"{__name__}:until_then"],
        "sampler": {"shuffle": False},
    }
    return toy_run(folder, **{**usual, **changes})


def step(run, number):
    run.tick(number)
    collection = collect(run)
    return collection, *replay_after(run, collection, run.advantage(collection.table))


@pytest.fixture(autouse=True)
def varied():
    GROWS["varied"] = 99
    yield
    GROWS["varied"] = 99


def test_rows_without_an_advantage_are_exchanged(tmp_path):
    run = replaying(tmp_path)
    memory = run.method.engine
    assert isinstance(memory, Replay)
    _, fresh, credits = step(run, 0)
    first = credits.values[:, 0, 0].abs() > 1e-6
    assert len(memory.steps) == int(first.sum()) > 2
    GROWS["varied"] = -1  # every reward is 0 now
    collected, mixed, credit = step(run, 1)
    assert len(collected.table) == len(mixed.table) == 8, "as many rows as before"
    back = mixed.table.ids["replay"][:, 0] != 0
    assert int(back.sum()) == int(first.sum())
    assert set(mixed.table.select(back).uids) <= {"p0", "p1"}, "the prompts of the step before"
    # Each keeps the advantage and the log-probabilities of its time.
    values = credits.values[:, 0, 0]
    before = set(zip(fresh.table.uids, values.tolist(), strict=True))
    now = set(zip(mixed.table.uids, credit.values[:, 0, 0].tolist(), strict=True))
    assert now <= before | {("p2", 0.0), ("p3", 0.0)}
    old = {row.outcomes[-1].text: row for row in fresh.rollouts}
    for row in mixed.rollouts:
        if not row.on_policy:
            assert torch.equal(row.notes["logp"], old[row.outcomes[-1].text].notes["logp"].float())
            assert torch.equal(row.steps[1], old[row.outcomes[-1].text].steps[1])


def test_rows_are_forgotten_with_age_and_capacity(tmp_path):
    run = replaying(tmp_path, capacity=3, max_age=1)
    memory = run.method.engine
    step(run, 0)
    assert len(memory.steps) == 3
    run.tick(1)
    GROWS["varied"] = -1
    step(run, 2)  # step 0 is two steps ago
    assert len(memory.steps) == 0 and memory.added == 0


def test_a_prompt_of_this_step_is_not_replayed(tmp_path):
    run = replaying(tmp_path, changes={"data": {"name": f"{TOYS}:prompts", "num": 2}})
    step(run, 0)
    GROWS["varied"] = -1
    _, mixed, _ = step(run, 1)
    assert run.method.engine.added == 0 and "replay" not in mixed.table.ids


class Changing:
    """A sampler that changes the first prompt of a draw: its text, or its name."""

    def __init__(self, sampler, *, ending: str = "", text: str = "") -> None:
        self.sampler, self.ending, self.text = sampler, ending, text

    def draw(self, num_prompts, num_generations):
        drawn = self.sampler.draw(num_prompts, num_generations)
        message = Message("user", (Part(drawn[0].text + self.text),))
        changed = replace(drawn[0], uid=drawn[0].uid + self.ending, messages=(message,))
        return [changed if prompt is drawn[0] else prompt for prompt in drawn]


@pytest.mark.parametrize("change", [{"text": " Hint: 3"}, {"ending": "#noise"}])
def test_answers_to_changed_prompts_are_not_replayed(tmp_path, change):
    samplers = ["uniform", {"name": f"{__name__}:Changing", **change}]
    run = replaying(tmp_path, changes={"sampler": samplers})
    _, _, credit = step(run, 0)
    plain = [uid for uid in credit.uids if uid == credit.uids[-1]]
    assert set(run.method.engine.stored.uids) == set(plain) and len(set(credit.uids)) == 2
    GROWS["varied"] = -1
    step(run, 1)
    assert run.method.engine.added > 0


def test_a_policy_that_cannot_make_rows_again_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the policy ToyText cannot; it needs `recall`"):
        replaying(tmp_path, changes={"policy": f"{TOYS}:ToyText"})


def test_groups_are_exchanged_as_a_whole(tmp_path):
    run = replaying(tmp_path, granularity="group")
    _, _, credit = step(run, 0)
    alive = credit.values[:, 0, 0].abs() > 1e-6
    alive = [uid for uid, kept in zip(credit.uids, alive.tolist(), strict=True) if kept]
    size = {uid: alive.count(uid) for uid in ("p0", "p1")}
    GROWS["varied"] = -1
    _, mixed, _ = step(run, 1)
    back = mixed.table.select(mixed.table.ids["replay"][:, 0] != 0).uids
    assert {uid: back.count(uid) for uid in size} == size
    assert not set(mixed.table.uids) & {"p2", "p3"}, "two groups were there, and both were exchanged"


@per_outcome
def right_now(prompt, outcome):
    """Right while `varied` is 1, half of the time while it is 2, and wrong otherwise."""
    half = len(outcome.text) % 2 == 0
    return {1: 1.0, 2: float(half)}.get(GROWS["varied"], 0.0)


ALONE = {"data": {"name": f"{TOYS}:prompts", "num": 1}, "rewards": [f"{__name__}:right_now"]}


def test_a_group_that_is_all_wrong_meets_stored_right_answers(tmp_path):
    changes = {**ALONE, "advantage": ["total", {"name": "group_normalize", "std": "population", "eps": 1e-6}]}
    run = replaying(tmp_path, engine="with_contrast", changes=changes)
    GROWS["varied"] = 1
    step(run, 0)
    GROWS["varied"] = 0
    _, mixed, credit = step(run, 1)
    # The worked example of the paper's rule: R = [0, 0, 0, 0 | 1, 1], population deviation.
    torch.testing.assert_close(
        credit.values[:, 0, 0],
        torch.tensor([-0.707105] * 4 + [1.414211] * 2, dtype=torch.float64),
        atol=2e-6,
        rtol=0,
    )
    assert mixed.table.learn[:, 0].tolist() == [True] * 4 + [False] * 2
    _, credit, batch = learnable(run, collect(run))
    assert len(batch) == 4, "what was brought back is only compared with"


def test_one_failure_makes_room_for_a_success(tmp_path):
    run = replaying(tmp_path, engine="with_successes", changes=ALONE)
    GROWS["varied"] = 1
    step(run, 0)
    GROWS["varied"] = 0
    _, mixed, credit = step(run, 1)
    assert sorted(mixed.table.reward().tolist()) == [0.0, 0.0, 0.0, 1.0]
    assert credit.values[-1, 0, 0] > 0 > credit.values[0, 0, 0] and bool(mixed.table.learn.all())
    GROWS["varied"] = 1
    _, mixed, _ = step(run, 2)
    assert "replay" not in mixed.table.ids or not mixed.table.ids["replay"].any()


@pytest.mark.parametrize(
    "engine",
    ["with_replay", *(pytest.param(one, marks=pytest.mark.slow) for one in MEMORIES if one != "with_replay")],
)
def test_a_killed_run_with_a_memory_goes_on_exactly(tmp_path, engine):
    changes = of_memory(engine)
    whole = toy_run(tmp_path / "whole", **{**EVERYTHING, **changes})
    train(whole)
    assert sum(record["replay/rows"] for record in whole.journal.read() if "replay/rows" in record) > 0
    killed(tmp_path / "cut", at=5, **changes)
    assert_alike(resumed(tmp_path / "cut", **changes), whole)


def test_an_engine_that_notes_no_tokens_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"reads the notes \['temperature', 'token'\]"):
        toy_run(tmp_path, rollout={"engine": [f"{TOYS}:ToyGenerate", "with_replay"]})
