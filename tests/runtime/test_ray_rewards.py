"""Rewards in Ray actors: those of the run's own process, whatever dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time

import pytest
import torch

from mmrl.build import check
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.rewards.adapters import log_metric, per_outcome
from mmrl.runtime.ray_actors import check_environments, dumps, loads
from mmrl.runtime.ray_rewards import shared
from mmrl.training.loop import train
from mmrl.training.score import RewardFault
from tests.support.ray_cluster import local_cluster
from tests.support.resuming import without_times
from tests.support.toys import plan, prompts, toy_run

pytest.importorskip("ray")
TOYS, HERE = "tests.support.toys", __name__


@pytest.fixture(scope="module")
def cluster():
    with local_cluster():
        yield


# ---- rewards


class Noisy:
    """Draw by prompt, log, and depend on an option that follows a schedule."""

    def __init__(self, *, stream: Stream, scale: float = 1.0) -> None:
        self.stream, self.scale = stream, scale

    def __call__(self, prompts, outcomes):
        log_metric("noisy/process", float(len(outcomes) > 0))
        for outcome in outcomes:
            log_metric("noisy/words", len(outcome.text.split()) / 3)
        noise = [torch.rand((), generator=self.stream.generator("noisy", p.uid)).item() for p in prompts]
        return [self.scale * x + len(o.text.split()) / 7 for x, o in zip(noise, outcomes, strict=True)]


def in_words(prompts, completions, completion_ids, trainer_state, log_extra, **columns):
    """Count tokens, in TRL's form."""
    log_extra("words", [len(c.split()) for c in completions])
    return [trainer_state.global_step + len(ids) / 9 for ids in completion_ids]


async def slowly(prompts, completions, **columns):
    """Wait, and give nothing to some."""
    await asyncio.sleep(0.01)
    return [None if "3" in completion else 0.25 for completion in completions]


def rivals(prompts, outcomes):
    """Compare the answers of a group."""
    best: dict[str, int] = {}
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        best[prompt.uid] = max(best.get(prompt.uid, 0), len(outcome.text))
    return [len(o.text) / max(1, best[p.uid]) for p, o in zip(prompts, outcomes, strict=True)]


@per_outcome
def variable(prompt, outcome, *, name: str = "MMRL_TEST"):
    """Read the environment."""
    return float(os.environ.get(name, "0"))


@per_outcome
def process(prompt, outcome):
    """Say which process this is."""
    return float(os.getpid())


class Faulty:
    """Fail as it is told, as long as a file is there."""

    def __init__(self, *, how: str, until: str = "") -> None:
        self.how, self.until = how, until

    def __call__(self, prompts, outcomes):
        if self.until and os.path.exists(self.until):
            return [1.0] * len(outcomes)
        if self.until:
            open(self.until, "w").close()
        if self.how == "raise":
            raise LookupError("no span in p0")
        if self.how == "exit":
            sys.exit("enough")
        if self.how == "hang":
            time.sleep(600)
        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.5  # no list


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
        (f"{HERE}:rivals", None),
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
        toy_run(tmp_path, rewards=[{"name": f"{HERE}:rivals", "workers": {"num": 0}}])
    with pytest.raises(ConfigError, match="there is no key 'rewards.0..workers.gpus'"):
        toy_run(tmp_path, rewards=[{"name": f"{HERE}:rivals", "workers": {"gpus": 1}}])


def test_gpus_for_each_of_several_processes_need_a_cluster_that_they_share(tmp_path, monkeypatch):
    def checked(**workers):
        rewards = [{"name": f"{HERE}:rivals", "workers": {"num_gpus": 1, **workers}}]
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
    one = {"name": f"{HERE}:rivals", "workers": {"num": 1}, "label": "one"}
    changes = {"evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 3}}}
    run = toy_run(tmp_path, rewards=[one, {**one, "label": "other"}], **changes)
    first, second = (bound.function.actors for bound in run.method.rewards)
    assert first is not second
    assert [bound.function.actors for bound in run.evaluator.rewards] == [first, second]


# ---- runs

NOISY = {"name": f"{HERE}:Noisy", "scale": {"name": "linear", "start": 0.5, "end": 3.0, "steps": 4}}
REWARDS = [NOISY, f"{HERE}:in_words", f"{HERE}:slowly", f"{HERE}:rivals"]
EVALUATED = {
    "evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 3}},
    "eval_steps": 2,
}


def run_with(folder, workers, rewards=REWARDS, **changes):
    rewards = [{"name": r} if isinstance(r, str) else r for r in rewards]
    rewards = [{**r, "workers": workers} if workers else r for r in rewards]
    return toy_run(folder, rewards=rewards, **{"max_steps": 4, **changes})


def same(found, wanted):
    assert torch.equal(found.policy.table, wanted.policy.table)
    assert str(without_times(found.journal.read())) == str(without_times(wanted.journal.read()))


def processes_of(run):
    return [p for bound in run.method.rewards for p in bound.function.actors.processes.values()]


@pytest.mark.parametrize(
    "num, rewards", [(1, REWARDS), pytest.param(2, [NOISY, f"{HERE}:in_words"], marks=pytest.mark.slow)]
)
def test_a_run_is_that_of_one_process(tmp_path, cluster, num, rewards):
    toys = {"policy": f"{TOYS}:ToyRecalling", "rollout": {"engine": [f"{TOYS}:ToyNoting"]}, **EVALUATED}
    alone = run_with(tmp_path / "alone", None, rewards, **toys)
    train(alone)
    shared = run_with(tmp_path / "shared", {"num": num}, rewards, **toys)
    train(shared)
    calls = "noisy/process"  # a mean over calls, of 1
    assert {record[calls] for record in shared.journal.read()} == {1.0}
    same(shared, alone)
    assert len(set(processes_of(shared))) == len(rewards) * num and os.getpid() not in processes_of(shared)
    for trained, evaluated in zip(shared.method.rewards, shared.evaluator.rewards, strict=True):
        assert trained.function.actors is evaluated.function.actors  # no second model on a GPU


@pytest.mark.slow
def test_actors_that_are_killed_at_random_instants_leave_no_mark(tmp_path, cluster):
    alone = run_with(tmp_path / "alone", None, [NOISY])
    train(alone)
    run = run_with(tmp_path / "killed", {"num": 2, "max_restarts": 20}, [NOISY])
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
    run = run_with(tmp_path, {"num": 1, "runtime_env": env}, [f"{HERE}:variable"], max_steps=1)
    train(run)
    assert run.journal.read()[0]["rewards/variable/mean"] == 2.5


# ---- faults


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, wanted",
    [
        ("raise", "reward 'Faulty' raised LookupError: no span in p0; prompt 'p"),
        ("exit", "reward 'Faulty' raised SystemExit: enough; prompt 'p"),
        ("number", "reward 'Faulty' gave 0.5, not a number per outcome; prompt 'p"),
        ("hang", r"reward 'Faulty' raised TimeoutError: no answer within 8 s; prompt 'p"),
    ],
)
def test_a_fault_is_that_of_one_process(tmp_path, cluster, how, wanted):
    faulty = {"name": f"{HERE}:Faulty", "how": how, "timeout": 8.0 if how == "hang" else 600.0}
    with pytest.raises(RewardFault, match=wanted):
        train(run_with(tmp_path, {"num": 1}, [faulty]))


@pytest.mark.slow
@pytest.mark.parametrize("how, policy", [("raise", {"retries": 1}), ("hang", {"on_error": "skip"})])
def test_an_actor_answers_after_a_fault(tmp_path, cluster, how, policy):
    faulty = {"name": f"{HERE}:Faulty", "how": how, "until": str(tmp_path / "x"), **policy}
    faulty["timeout"] = 30.0 if how == "hang" else 600.0
    run = run_with(tmp_path / "run", {"num": 1}, [faulty], max_steps=2)
    train(run)
    assert run.journal.read()[-1]["rewards/Faulty/mean"] == 1.0


@pytest.mark.slow
def test_too_many_deaths_end_the_run(tmp_path, cluster):
    faulty = {"name": f"{HERE}:Faulty", "how": "die", "on_error": "skip"}
    with pytest.raises(RewardFault, match="`max_restarts: 1` allows"):
        train(run_with(tmp_path, {"num": 1, "max_restarts": 1}, [faulty]))
