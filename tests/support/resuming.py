"""Runs that fall over and go on, and how to compare them: what the tests of resuming share."""

from __future__ import annotations

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file

from mmrl.runtime import checkpoint
from mmrl.runtime.state_tree import flatten
from mmrl.training.loop import train
from tests.support.toys import toy_run

EVERYTHING = {
    "rollout": {"num_prompts": 3, "num_generations": 3, "max_rounds": 2, "policy": "slow"},
    "group_filter": "varied",
    "advantage": ["total", "tests.support.toys:RunningMean", "group_normalize"],
    "objective": {"penalty": ["k3"], "surrogate": {"name": "clip", "epsilon": 0.2}},
    "references": {"ref": "frozen", "slow": {"name": "ema", "decay": 0.5}},
    "learn": {
        "learning_rate": {"name": "cosine", "start": 0.3, "end": 0.0, "steps": 8},
        "num_iterations": 2,
        "minibatches": 2,
    },
    "evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 2}},
    "eval_steps": 3,
    "eval_on_start": True,
    "max_steps": 7,
    "save_steps": 3,
}


class Killed(BaseException):
    """The end of a process, at a bad moment."""


def killed(folder, *, at: int, **changes):
    """Train until the end of a step, and fall over before it is reported."""
    run = toy_run(folder, **{**EVERYTHING, **changes})
    finish = run.finish

    def dying(step, collection, credit):
        if step == at:
            raise Killed
        finish(step, collection, credit)

    run.finish = dying
    with pytest.raises(Killed):
        train(run)


def resumed(folder, **changes):
    run = toy_run(folder, **{**EVERYTHING, **changes})
    train(run)
    return run


def without_times(records):
    """Leave out of records what a clock measured, or what follows from it."""
    return [
        {name: value for name, value in record.items() if "time" not in name and "seconds" not in name}
        for record in records
    ]


def assert_alike(found, expected):
    """Compare two finished runs bit for bit."""
    assert torch.equal(found.policy.table, expected.policy.table)
    assert str(without_times(found.journal.read())) == str(without_times(expected.journal.read()))
    written = [name for name in ("completions", "predictions") if (expected.folder / name).exists()]
    for folder in written:
        names = [path.name for path in sorted((expected.folder / folder).iterdir())]
        assert [path.name for path in sorted((found.folder / folder).iterdir())] == names
        for name in names:
            tables = [parquet.read_table(run.folder / folder / name) for run in (found, expected)]
            # As texts, in which a reward that does not apply (NaN) is equal to itself.
            assert str(tables[0].to_pydict()) == str(tables[1].to_pydict()), name
    last, wanted = (checkpoint.checkpoints(run.folder)[0] for run in (found, expected))
    assert last.name == wanted.name
    tensors = [load_file(folder / checkpoint.TENSORS) for folder in (last, wanted)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[1].items():  # a note that was not taken is NaN on both sides
        torch.testing.assert_close(tensors[0][name], tensor, rtol=0, atol=0, equal_nan=True)
    trees = [flatten(checkpoint.read_state(folder)["pieces"], {}) for folder in (last, wanted)]
    assert trees[0] == trees[1]
