"""A state on disk: whole or not at all, and nothing in it is code."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mmrl import checkpoint
from mmrl.checkpoint import CheckpointError, read_state, write_state

STATE = {
    "step": 3,
    "reported": {"reward": 0.1, "kl": math.nan, "best": math.inf},
    "optimizer": {"state": {0: {"exp_avg": torch.arange(6.0).view(2, 3)}}, "param_groups": [{"lr": 1e-6}]},
    "pieces": {"sampler": {"order": [3, 1, 2], "name": "p1", "done": False, "left": None}},
}


def test_a_state_comes_back_as_it_was(tmp_path):
    write_state(tmp_path, STATE)
    found = read_state(tmp_path)
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], STATE["optimizer"]["state"][0]["exp_avg"])
    assert list(found["optimizer"]["state"]) == [0], "whole-number keys stay numbers"
    assert found["optimizer"]["param_groups"] == [{"lr": 1e-6}]
    assert found["pieces"] == STATE["pieces"]
    assert found["pieces"]["sampler"]["done"] is False
    assert (found["reported"]["reward"], found["reported"]["best"]) == (0.1, math.inf)
    assert math.isnan(found["reported"]["kl"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_tensors_keep_their_type_and_bits(tmp_path, dtype):
    tensor = torch.tensor([[0, 1], [3, 2]]).to(dtype)
    write_state(tmp_path, {"turned": tensor.t(), "empty": tensor[:0], "scalar": tensor[0, 0]})
    found = read_state(tmp_path)
    for name, wanted in (("turned", tensor.t()), ("empty", tensor[:0]), ("scalar", tensor[0, 0])):
        assert found[name].dtype == dtype
        assert torch.equal(found[name], wanted)


def test_a_tensor_that_is_held_twice_is_saved_twice(tmp_path):
    shared = torch.ones(2)
    write_state(tmp_path, {"a": shared, "b": shared, "part": shared[:1]})
    found = read_state(tmp_path)
    found["a"].zero_()
    assert (found["b"].tolist(), found["part"].tolist()) == ([1.0, 1.0], [1.0])


def test_what_is_no_state_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="cannot save '/pieces/sampler/hidden': .* not set"):
        write_state(tmp_path, {"pieces": {"sampler": {"hidden": {1, 2}}}})


@pytest.mark.parametrize("name", [checkpoint.STATE, checkpoint.TENSORS, "model/weights.bin"])
@pytest.mark.parametrize("left", [None, 0, 0.5])
def test_half_a_checkpoint_is_recognised(tmp_path, name, left):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"x" * 100)
    write_state(tmp_path, STATE)
    read_state(tmp_path)
    file = tmp_path / name
    data = file.read_bytes()
    file.unlink()
    if left is not None:
        file.write_bytes(data[: int(len(data) * left)])
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}' is not a whole checkpoint of mmrl"):
        read_state(tmp_path)


def test_a_tensor_that_is_missing_is_named(tmp_path):
    write_state(tmp_path, STATE)
    written = json.loads((tmp_path / checkpoint.STATE).read_text())
    written["tensors"].append("/references/ref/table")
    (tmp_path / checkpoint.STATE).write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match="lacks the tensors .'/references/ref/table'"):
        read_state(tmp_path)


def test_publishing_replaces_what_was_there(tmp_path):
    beside, folder = tmp_path / "checkpoint-1.tmp", tmp_path / "checkpoint-1"
    for place, word in ((folder, "old"), (beside, "new")):
        place.mkdir()
        (place / "word").write_text(word)
    (folder / "rest").write_text("of an earlier one")
    checkpoint.publish(beside, folder)
    assert [path.name for path in folder.iterdir()] == ["word"]
    assert (folder / "word").read_text() == "new"
    assert not beside.exists()


def test_checkpoints_are_ordered_by_number(tmp_path):
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-9", "checkpoint-11.tmp", "checkpoint-best"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-2",
    ]


@pytest.mark.parametrize(
    ("limit", "left"), [(0, [2, 4, 6, 9]), (1, [6, 9]), (2, [4, 6, 9]), (9, [2, 4, 6, 9])]
)
def test_the_latest_checkpoints_up_to_here_are_kept(tmp_path, limit, left):
    # 9 is a broken one that the run went back from: it must not push out those that it makes.
    for number in (2, 4, 6, 9):
        (tmp_path / f"checkpoint-{number}").mkdir()
    checkpoint.prune(tmp_path, limit, 6)
    assert sorted(map(checkpoint.step_of, checkpoint.checkpoints(tmp_path))) == left
