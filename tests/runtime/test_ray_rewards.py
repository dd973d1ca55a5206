"""Rewards in Ray actors: those of the run's own process, whatever dies."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch

from mmrl.build import check
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Config, parse
from mmrl.core.types import Outcome
from mmrl.runtime.ray_actors import check_environments, dumps, loads
from mmrl.runtime.ray_rewards import shared
from mmrl.training.loop import train
from mmrl.training.score import RewardFault
from tests.support.ray_cluster import NEEDS_RAY, local_cluster
from tests.support.resuming import without_times
from tests.support.toys import plan, prompts, toy_run

pytestmark = [NEEDS_RAY, pytest.mark.usefixtures("no_page")]
TOYS, PIECES, HERE = "tests.support.toys", "tests.support.ray_pieces", __name__


@pytest.fixture(scope="module")
def cluster():
    with local_cluster():
        yield


class Memory:
    """Remember."""

    def __call__(self, prompts, outcomes):
        return [0.0] * len(outcomes)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def drawing(prompts, outcomes, *, generator: torch.Generator):
    """Draw for all answers in turn."""
    return torch.rand(len(outcomes), generator=generator).tolist()


# ---- parts


def test_groups_stay_whole_and_actors_get_as_much():
    rows = [prompts()[int(i)] for i in "0120012"]
    assert shared(rows, 2) == [[0, 3, 4], [1, 2, 5, 6]]
    assert shared(rows[:1], 3) == [[0]]


def test_tensors_travel_without_what_they_are_cut_from():
    batch = torch.arange(3 * 4000, dtype=torch.bfloat16).view(3, 4000)
    assert len(dumps(batch[1])) < 9000 < len(dumps(batch))
    assert torch.equal(loads(dumps(batch[1])), batch[1])
    for other in (torch.tensor(3.5), torch.zeros(2, 0), torch.eye(3).T[1:], torch.tensor([True, False])):
        again = loads(dumps({"x": other}))["x"]
        assert torch.equal(again, other) and again.dtype == other.dtype and again.shape == other.shape


class Locked:
    """An environment that cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()


def test_an_environment_that_cannot_travel_is_named():
    check_environments([Outcome("a"), Outcome("b", environment={"score": 1})])
    with pytest.raises(TypeError, match=r"the environment 'Locked' of an answer cannot travel.*_thread.lock"):
        check_environments([Outcome("a", environment=Locked())])


@pytest.mark.parametrize(
    "reward, wanted",
    [
        (f"{HERE}:Memory", "remembers earlier answers"),
        (f"{HERE}:drawing", r"set `workers.num: 1`"),
        (f"{PIECES}:rivals", None),
    ],
)
def test_what_actors_cannot_make_is_refused(tmp_path, reward, wanted):
    asked = {"name": reward, "workers": {"num": 2}}
    if wanted is None:
        toy_run(tmp_path, rewards=[asked])
        return
    with pytest.raises(ConfigError, match=wanted):
        toy_run(tmp_path, rewards=[asked])


def test_settings_of_workers_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"rewards\[0\].workers.num' must be at least 1, not 0"):
        toy_run(tmp_path, rewards=[{"name": f"{PIECES}:rivals", "workers": {"num": 0}}])
    with pytest.raises(ConfigError, match="there is no key 'rewards.0..workers.gpus'"):
        toy_run(tmp_path, rewards=[{"name": f"{PIECES}:rivals", "workers": {"gpus": 1}}])


def test_gpus_for_each_of_several_processes_need_a_cluster_that_they_share(tmp_path, monkeypatch):
    def checked(**workers):
        rewards = [{"name": f"{PIECES}:rivals", "workers": {"num_gpus": 1, **workers}}]
        check(parse(plan(tmp_path, rewards=rewards), Config))

    checked()
    monkeypatch.setenv("WORLD_SIZE", "8")
    checked(address="10.0.0.9:6379")
    with pytest.raises(
        ConfigError, match="`num_gpus: 1` in a run of 8 processes.*`address` or set RAY_ADDRESS"
    ):
        checked()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    checked()


def test_rewards_with_labels_of_their_own_do_not_wait_for_each_other(tmp_path):
    one = {"name": f"{PIECES}:rivals", "workers": {"num": 1}, "label": "one"}
    changes = {"evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 3}}}
    run = toy_run(tmp_path, rewards=[one, {**one, "label": "other"}], **changes)
    first, second = (bound.function.actors for bound in run.method.rewards)
    assert first is not second
    assert [bound.function.actors for bound in run.evaluator.rewards] == [first, second]


# ---- runs

NOISY = {"name": f"{PIECES}:Noisy", "scale": {"name": "linear", "start": 0.5, "end": 3.0, "steps": 4}}
REWARDS = [NOISY, *({"name": f"{PIECES}:{name}"} for name in ("in_words", "slowly", "rivals"))]
NUMBERS = 2, 2, 1, 1  # actors of each
EVALUATED = {
    "evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 3}},
    "eval_steps": 2,
}


def with_workers(reward, num, **options):
    return {**reward, "workers": {"num": num, **options}}


def run_with(folder, *rewards, **changes):
    return toy_run(folder, rewards=list(rewards), **{"max_steps": 4, **changes})


def same(found, wanted):
    assert torch.equal(found.policy.table, wanted.policy.table)
    assert str(without_times(found.journal.read())) == str(without_times(wanted.journal.read()))


def processes_of(run):
    return [p for bound in run.method.rewards for p in bound.function.actors.processes.values()]


def test_a_run_is_that_of_one_process(tmp_path, cluster):
    toys = {"policy": f"{TOYS}:ToyRecalling", "rollout": {"engine": [f"{TOYS}:ToyNoting"]}, **EVALUATED}
    alone = run_with(tmp_path / "alone", *REWARDS, **toys)
    train(alone)
    shared = run_with(tmp_path / "shared", *map(with_workers, REWARDS, NUMBERS), **toys)
    train(shared)
    calls = "noisy/process"  # a mean over calls, of 1
    assert {record[calls] for record in shared.journal.read()} == {1.0}
    same(shared, alone)
    processes = processes_of(shared)
    assert len(set(processes)) == sum(NUMBERS) and os.getpid() not in processes
    for trained, evaluated in zip(shared.method.rewards, shared.evaluator.rewards, strict=True):
        assert trained.function.actors is evaluated.function.actors  # no second model on a GPU


@pytest.mark.slow
def test_actors_that_are_killed_at_random_instants_leave_no_mark(tmp_path, cluster):
    alone = run_with(tmp_path / "alone", NOISY)
    train(alone)
    run = run_with(tmp_path / "killed", with_workers(NOISY, 2, max_restarts=20))
    over, killed, draw = threading.Event(), [], random.Random(0)

    def kill():
        while not over.wait(draw.uniform(0.02, 0.3)):
            if (alive := processes_of(run)) and len(killed) < 3:
                victim = draw.choice(alive)
                if victim not in killed:
                    killed.append(victim)
                    os.kill(victim, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    call = run.method.rewards[0].function
    begin = call.actors.begin

    def slower(*given, **options):  # so that kills meet runs of milliseconds
        time.sleep(0.3)
        return begin(*given, **options)

    call.actors.begin = slower
    train(run)
    over.set()
    thread.join()
    assert killed and call.actors.restarts
    same(run, alone)


@pytest.mark.slow
def test_actors_have_an_environment_of_their_own(tmp_path, cluster):
    env = {"env_vars": {"MMRL_TEST": "2.5"}}
    reading = with_workers({"name": f"{PIECES}:variable"}, 1, runtime_env=env)
    run = run_with(tmp_path, reading, max_steps=1)
    train(run)
    assert run.journal.read()[0]["rewards/variable/mean"] == 2.5


# ---- faults


def faulty_run(folder, file, **options):
    workers = {"max_restarts": 1}
    faulty = with_workers({"name": f"{PIECES}:Faulty", "file": str(file), **options}, 1, **workers)
    return run_with(folder, faulty, max_steps=2)


FAULTS = {
    "raise": "reward 'Faulty' raised LookupError: no span in p0; prompt 'p",
    "exit": "reward 'Faulty' raised SystemExit: enough; prompt 'p",
    "number": "reward 'Faulty' gave 0.5, not a number per outcome; prompt 'p",
    "hang": r"reward 'Faulty' raised TimeoutError: no answer within 40 s; prompt 'p",
}


@pytest.mark.slow
def test_a_fault_is_that_of_one_process_and_an_actor_answers_after_it(tmp_path, cluster):
    processes = []
    for how, wanted in FAULTS.items():
        faulty = tmp_path / "faulty"
        faulty.write_text(how)
        run = faulty_run(tmp_path / how, faulty, timeout=40.0)  # of the actor of the run before
        with pytest.raises(RewardFault, match=wanted):
            train(run)
        train(again := faulty_run(tmp_path / f"{how}-again", faulty, timeout=40.0))
        assert again.journal.read()[-1]["rewards/Faulty/mean"] == 1.0
        processes += processes_of(again)
    assert len(set(processes[:3])) == 1 and processes[3] != processes[0]  # one that hangs is replaced


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{"retries": 1}, {"on_error": "skip"}], ids=str)
def test_a_fault_leaves_no_mark_where_it_is_allowed(tmp_path, cluster, policy):
    faulty = tmp_path / "faulty"
    faulty.write_text("raise")
    train(run := faulty_run(tmp_path / "run", faulty, **policy))
    assert not faulty.exists() and run.journal.read()[-1]["rewards/Faulty/mean"] == 1.0


@pytest.mark.slow
def test_too_many_deaths_end_the_run(tmp_path, cluster):
    faulty = tmp_path / "faulty"
    faulty.write_text("die")
    with pytest.raises(RewardFault, match="`max_restarts: 1` allows"):
        train(faulty_run(tmp_path / "run", faulty, on_error="skip"))
