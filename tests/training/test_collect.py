"""Rounds of a collection: asking again for what a filter dropped, and rows that stand in order."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Outcome, Trajectory
from mmrl.rewards.adapters import per_outcome
from mmrl.training.collect import collect, in_order, pick
from mmrl.training.loop import learnable, train
from tests.support.tables import reward_table
from tests.support.toys import ToyGenerate, prompts, toy_run

pytestmark = pytest.mark.usefixtures("no_page")

FAILING = "p0"


@per_outcome
def known_rewards(prompt, outcome):
    """Vary inside the groups of p1 and p3 only."""
    return float(len(outcome.text)) if prompt.uid in ("p1", "p3") else 0.5


@per_outcome
def broken_for_one(prompt, outcome):
    if prompt.uid == FAILING:
        return float("nan")
    return float(len(outcome.text))


class Backwards:
    """An engine that answers all prompts in the wrong order."""

    notes = ToyGenerate.notes

    def __init__(self, engine) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, asked):
        return self.engine.rollout(list(asked))[::-1]


class Listening:
    """A filter that drops all but the named groups, and an observer of what it is shown."""

    def __init__(self, *, keep: tuple[str, ...] = ()) -> None:
        self.keep, self.seen, self.texts = keep, [], []

    def __call__(self, table: RewardTable):
        return torch.tensor([uid in self.keep for uid in table.uids])

    def observe(self, rollouts, table):
        self.seen.append(([row.prompt.uid for row in rollouts], len(table)))
        texts = [row.outcomes[-1].text for row in rollouts]
        self.texts.append((texts[:3], texts[3:]))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Counted:
    """A sampler that writes down what it is asked for, and runs dry."""

    def __init__(self, data, *, dry_after: int = 99) -> None:
        self.data, self.asked, self.dry_after = data, [], dry_after

    def draw(self, num_prompts, num_generations):
        self.asked.append((num_prompts, num_generations))
        if len(self.asked) > self.dry_after:
            return []
        # Every round begins anew, so dropped prompts are asked again.
        return [prompt for prompt in self.data[:num_prompts] for _ in range(num_generations)]


IN_ORDER = {"name": "uniform", "shuffle": False}


def collecting(folder, *, rounds=1, **changes):
    usual = {"rollout": {"num_prompts": 2, "num_generations": 3, "max_rounds": rounds}, "sampler": IN_ORDER}
    return toy_run(folder, **{**usual, **changes})


def test_one_round_is_the_prompts_of_one_draw(tmp_path):
    collection = collect(collecting(tmp_path))
    assert [row.prompt.uid for row in collection.rollouts] == ["p0"] * 3 + ["p1"] * 3
    assert collection.table.uids == ("p0",) * 3 + ("p1",) * 3
    assert collection.seen is not None and len(collection.seen) == 6


def test_rows_of_the_table_are_the_rollouts_in_order(tmp_path):
    engine = ["tests.support.toys:ToyGenerate", f"{__name__}:Backwards"]
    usual = {"num_prompts": 3, "num_generations": 2, "engine": engine}
    run = collecting(tmp_path, rollout=usual)
    collection = collect(run)
    # The engine gives p2, p2, p1, ...; rows are sorted to where their prompt was first asked.
    assert collection.table.uids == ("p0", "p0", "p1", "p1", "p2", "p2")
    assert [row.prompt.uid for row in collection.rollouts] == list(collection.table.uids)
    lengths = [row.length for row in collection.rollouts]
    assert collection.table.length.tolist() == lengths != lengths[::-1]


def test_rows_of_one_prompt_keep_the_order_of_the_engine():
    rows = tuple(
        Trajectory(prompts()[p], f"p{p}", (Outcome(text=str(i)),), None, 1)
        for i, p in enumerate((1, 0, 1, 0))
    )
    given = [row.outcomes[0].text for row in in_order(rows, ["p0", "p0", "p1", "p1"])]
    assert given == ["1", "3", "0", "2"]


def test_the_filter_is_made_up_for_by_other_prompts(tmp_path):
    run = collecting(tmp_path, rounds=4, rewards=[f"{__name__}:known_rewards"], group_filter="varied")
    collection = collect(run)
    # p0 and p1: p1 varies. One is missing: p2 does not vary, p3 does.
    assert collection.table.uids == ("p1",) * 3 + ("p3",) * 3
    assert collection.seen.uids == ("p0",) * 3 + ("p1",) * 3 + ("p2",) * 3 + ("p3",) * 3
    assert [row.prompt.uid for row in collection.rollouts] == ["p1"] * 3 + ["p3"] * 3
    assert run.method.sampler.drawn == 4
    assert run.stream.round == 0


def test_rounds_end_at_max_rounds(tmp_path):
    run = collecting(tmp_path, rounds=2, rewards=[f"{__name__}:known_rewards"], group_filter="varied")
    collection = collect(run)
    assert set(collection.table.uids) == {"p1"}
    assert run.method.sampler.drawn == 3


def test_only_what_is_missing_is_asked_for_and_the_sampler_may_run_dry(tmp_path):
    sampler = {"name": f"{__name__}:Counted", "dry_after": 2}
    keep = {"name": f"{__name__}:Listening", "keep": ["p1"]}
    run = collecting(tmp_path, rounds=9, sampler=sampler, group_filter=keep)
    collection = collect(run)
    # Of p0 and p1 only p1 is kept, so one more is wanted; p0 comes, is dropped, and then nothing comes.
    assert run.method.sampler.asked == [(2, 3), (1, 3), (1, 3)]
    assert collection.table.uids == ("p1",) * 3
    # p0 was asked twice: its six rows are one group, and other draws.
    assert collection.seen.uids == ("p0",) * 3 + ("p1",) * 3 + ("p0",) * 3
    assert collection.seen.group.unique().numel() == 2
    assert collection.seen.ids["row"][:, 0].tolist() == list(range(9))


def test_a_sampler_without_any_question_is_an_error(tmp_path):
    run = collecting(tmp_path, sampler={"name": f"{__name__}:Counted", "dry_after": 0})
    with pytest.raises(ValueError, match="the sampler named no prompt at step 0"):
        collect(run)


def test_observers_see_every_round_before_anything_is_dropped(tmp_path):
    keep = {"name": f"{__name__}:Listening", "keep": ["p1"]}
    run = collecting(tmp_path, rounds=2, group_filter=keep)
    collect(run)
    assert run.observers[0].seen == [(["p0"] * 3 + ["p1"] * 3, 6), (["p2"] * 3, 3)]


def test_groups_may_be_uneven(tmp_path):
    class Budget:
        def draw(self, num_prompts, num_generations):
            return [prompts()[0]] * 4 + [prompts()[1]]

    run = collecting(tmp_path)
    run.method.sampler = Budget()
    collection = collect(run)
    assert collection.table.uids == ("p0",) * 4 + ("p1",)
    credit = run.advantage(collection.table)
    assert credit.values[4, 0, 0] == 0.0, "alone, there is nothing to compare with"
    assert credit.values[:4].sum().abs() < 1e-12


def test_a_prompt_that_is_asked_again_draws_anew(tmp_path):
    sampler = f"{__name__}:Counted"
    run = collecting(tmp_path, rounds=2, sampler=sampler, group_filter=f"{__name__}:Listening")
    collect(run)
    (first, _), (second, _) = run.observers[0].texts
    assert first != second


def test_a_filter_that_keeps_nothing_leaves_a_stand_in_to_blank(tmp_path):
    run = collecting(tmp_path, group_filter=f"{__name__}:Listening")
    collection = collect(run)
    assert len(collection.table) == 0 and len(collection.seen) == 6
    assert collection.rollouts == ()
    assert collection.stand_in.prompt.uid == collection.seen.uids[0]
    _, credit, batch = learnable(run, collection)
    assert len(credit) == 0 and len(batch) == 1 and not batch.mask.any()


@pytest.mark.parametrize("rounds", [1, 2])
def test_groups_with_a_faulty_reward_are_asked_anew(tmp_path, rounds):
    reward = {"name": f"{__name__}:broken_for_one", "on_error": "skip"}
    collection = collect(collecting(tmp_path, rounds=rounds, rewards=[reward]))
    assert set(collection.table.uids) == ({"p1"} if rounds == 1 else {"p1", "p2"})
    assert set(collection.seen.uids) >= {FAILING}


def test_draws_do_not_depend_on_who_else_is_asked(tmp_path):
    both, one = collecting(tmp_path), collecting(tmp_path / "b")
    one.method.sampler.drawn = 1
    together = collect(both).rollouts[3:]
    alone = collect(one).rollouts[:3]
    assert [row.outcomes[0].text for row in together] == [row.outcomes[0].text for row in alone]
    assert len({row.outcomes[0].text for row in alone}) > 1


def test_pick_counts_only_the_rows_of_this_process():
    # Rows 0 and 3 are elsewhere; of ours, rows 1 and 2, the filter keeps the second.
    table = reward_table([1.0, 2.0, 3.0, 4.0], process=[1, 0, 0, 1])
    rollouts, kept = pick(("one", "two"), table, torch.tensor([True, False, True, False]))
    assert rollouts == ("two",)
    assert kept.scored["reward"][:, 0].tolist() == [1.0, 3.0]


def test_a_process_without_prompts_keeps_a_stand_in_that_no_table_counts(tmp_path, monkeypatch):
    run = collecting(tmp_path)
    monkeypatch.setattr(run.processes, "assign_prompts", lambda prompts, table: (prompts[:1], False))
    monkeypatch.setattr(run.processes, "gather", lambda local, order: local)
    for observer in run.observers:
        monkeypatch.setattr(observer, "observe", lambda rollouts, table: None)
    run.method.group_filter = lambda table: torch.zeros(len(table), dtype=torch.bool)
    collection = collect(run)
    assert collection.rollouts == () and len(collection.seen) == 0
    assert collection.stand_in.prompt.uid == "p0"


def test_pick_of_a_process_without_rows_is_empty():
    table = reward_table([1.0, 2.0], process=[1, 1])
    rollouts, kept = pick((), table, torch.tensor([True, True]))
    assert rollouts == () and len(kept) == 2
    assert len(kept.select(kept.mine)) == 0


class WithStranger:
    """An engine that adds an answer to a prompt that was not drawn, before the others."""

    notes = ToyGenerate.notes

    def __init__(self, engine) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, asked):
        stranger = prompts()[7]
        return self.policy.encode(stranger, stranger.answers[0]), *self.engine.rollout(asked)


def test_rows_of_prompts_that_were_not_drawn_stand_last(tmp_path):
    engine = ["tests.support.toys:ToyGenerate", f"{__name__}:WithStranger"]
    run = collecting(tmp_path, rollout={"num_prompts": 2, "num_generations": 3, "engine": engine})
    found = collect(run)
    assert found.table.uids == ("p0",) * 3 + ("p1",) * 3 + ("p7",)
    assert [row.prompt.uid for row in found.rollouts] == list(found.table.uids)


class Every:
    """A sampler around another that asks every prompt once more than it said, and notes what it is shown."""

    def __init__(self, sampler, *, more: int = 1) -> None:
        self.sampler, self.more, self.seen = sampler, more, []

    def draw(self, num_prompts, num_generations):
        return self.sampler.draw(num_prompts, num_generations + self.more)

    def observe(self, rollouts, table):
        self.seen.append(("rewards", len(table)))

    def observe_advantages(self, credit):
        self.seen.append(("advantages", credit.values.shape))

    def state_dict(self):
        return {"seen": len(self.seen)}

    def load_state_dict(self, state):
        pass


def test_samplers_are_nested_and_each_may_observe(tmp_path):
    run = collecting(tmp_path, sampler=[IN_ORDER, {"name": f"{__name__}:Every", "more": 2}])
    collection = collect(run)
    assert collection.table.uids == ("p0",) * 5 + ("p1",) * 5
    learnable(run, collection)
    assert run.method.sampler.seen == [("rewards", 10), ("advantages", (10, 1, 1))]
    assert set(run.stateful["pieces"]) >= {"sampler[0]", "sampler[1]"}


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ([f"{__name__}:Every"], r"sampler\[0\]: '.*Every' wraps another sampler; name that one before it"),
        (["uniform", "uniform"], r"sampler\[1\]: 'uniform' wraps no other sampler; name it first"),
        ([], "'sampler' is empty; name the sampler that chooses prompts"),
    ],
)
def test_samplers_that_cannot_be_nested_are_refused(tmp_path, listed, words):
    with pytest.raises(ConfigError, match=words):
        collecting(tmp_path, sampler=listed)


def test_a_run_may_only_observe(tmp_path):
    run = toy_run(tmp_path, max_steps=2, learn={"num_iterations": 0})
    before = run.policy.table.clone()
    train(run)
    assert torch.equal(run.policy.table, before)
    assert len(run.journal.read()) == 2
