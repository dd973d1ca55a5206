"""Two real processes train as one, and what is behind it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from mmrl import page
from mmrl.batch import Batch
from mmrl.distributed import Processes
from mmrl.report import Journal
from mmrl.table import RewardTable
from mmrl.train import train
from tests.distributed_worker import launch
from tests.toys import ToyText, prompts, toy_run


def process(rank: int, world: int) -> Processes:
    """Make one of several processes without a launcher: enough for what needs no exchange."""
    one = object.__new__(Processes)
    one.rank, one.world = rank, world
    return one


def test_groups_are_shared_whole_and_evenly():
    # 4, 2, 2 and 1 rollouts on two processes: the 4 go to the first, the next 2 to the idle second, whose
    # 2 are still fewer than 4, so the third group follows; then both have 4, and ties go to the first.
    asked = [prompts()[i] for i, count in enumerate((4, 2, 2, 1)) for _ in range(count)]
    parts = [process(rank, 2).share(asked, RewardTable.empty()) for rank in range(2)]
    assert [[p.uid for p in mine] for mine, _ in parts] == [["p0"] * 4 + ["p3"], ["p1", "p1", "p2", "p2"]]
    assert [counts for _, counts in parts] == [True, True]


def test_a_group_stays_where_it_began():
    began = RewardTable.empty().replace(uids=("p0", "p1"), process=torch.tensor([1, 1]))
    asked = [prompts()[i] for i in (0, 1, 2)]
    parts = [process(rank, 2).share(asked, began)[0] for rank in range(2)]
    assert [[p.uid for p in mine] for mine in parts] == [["p2"], ["p0", "p1"]]


def test_a_process_without_work_keeps_step_with_a_rollout_that_does_not_count():
    mine, counts = process(2, 3).share([prompts()[0]] * 4, RewardTable.empty())
    assert ([p.uid for p in mine], counts) == (["p0"], False)


def test_micro_batches_are_repeated_without_counting(monkeypatch):
    row = ToyText().encode(prompts()[0], prompts()[0].answers[0])
    micros: list[Batch] = ToyText().collate((row, row)).split(1, 1)
    one = process(0, 2)
    one.device = "cpu"
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda length, op: length.fill_(4))
    assert [(counts, last) for _, counts, last in one.even(micros)] == [
        (1.0, False),
        (1.0, False),
        (0.0, False),
        (0.0, True),
    ]


def test_a_number_that_a_process_lacks_is_zero_there(monkeypatch):
    one = process(0, 2)
    one._all_bytes = lambda data: [data, b'{"loss": 3.0, "sampling/kl": 1.0}']
    # (1 + 3) / 2, and (0 + 1) / 2.
    assert one.means({"loss": 1.0}) == {"loss": 2.0, "sampling/kl": 0.5}


PLANS = {
    "uneven": {
        "rollout": {"num_prompts": 5, "max_rounds": 3},
        "group_filter": "varied",
        "advantage": ["total", "group_normalize", {"name": "high_entropy", "top": 0.5}],
        "objective": {"aggregate": "step_mean", "penalty": [{"name": "k3", "coef": 0.1}]},
        "references": {"ref": "frozen"},
        "learn": {"num_iterations": 2, "micro_batch_steps": 9},
        "evaluation": {"data": {"name": "tests.toys:prompts", "num": 3}, "num_generations": 2},
        "eval_steps": 2,
    },
    "minibatches": {  # of 1, 2, 1 and 2 groups, where each process for itself would make 0, 2, 2 and 2
        "rollout": {"num_prompts": 6},
        "advantage": ["total", "group_normalize"],
        "learn": {"minibatches": 4, "num_iterations": 2},
    },
    "nothing to do": {  # on the second process
        "data": {"name": "tests.toys:prompts", "num": 1},
        "rollout": {"num_prompts": 1},
        "advantage": ["total", "tests.toys:RunningMean"],
        "learn": {"optimizer": "adamw"},
    },
    "only a demonstration": {  # on one process, and sampled rollouts on the other
        "data": "tests.toys:half_shown",
        "sampler": {"name": "uniform", "shuffle": False},
        "rollout": {
            "num_prompts": 2,
            "num_generations": 1,
            "engine": ["tests.toys:ToyGenerate", "with_demos"],
            "policy": "slow",
        },
        "advantage": ["total"],
        "objective": {"focus": ["truncated_importance"], "aggregate": "length_weighted"},
        "references": {"slow": {"name": "ema", "decay": 0.5}},
    },
}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Train every plan on two processes, all of them in one pair of processes: they start slowly."""
    folder = tmp_path_factory.mktemp("two")
    usual = {"policy": {"name": "tests.toys:ToyText", "double": True}}
    plans = {}
    for name, plan in PLANS.items():
        learn = {"optimizer": "sgd", "learning_rate": 0.5, **plan.get("learn", {})}
        plans[name] = {**usual, **plan, "learn": learn}
    launch([{"folder": str(folder / name), **plan} for name, plan in plans.items()], folder)
    return folder, plans


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_two_processes_train_as_one(name, two_processes, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "curves", lambda runs: [])
    folder, plans = two_processes
    run = toy_run(tmp_path / "one", **plans[name])
    train(run)
    assert run.policy.table.abs().max() > 0.01
    for rank in range(2):
        weights = load_file(folder / name / f"weights-{rank}" / "model.safetensors")["table"]
        torch.testing.assert_close(weights, run.policy.table.data, rtol=1e-12, atol=1e-12)
    records = zip(Journal(folder / name).read(), run.journal.read(), strict=True)
    for found, expected in records:
        timed = {key for key in expected if "time" in key or "seconds" in key}
        assert found.keys() == expected.keys()
        for key in expected.keys() - timed:
            assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-7, nan_ok=True), key
