"""A state on disk: whole or not at all, and nothing in it is code."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from mmrl.runtime import checkpoint
from mmrl.runtime.checkpoint import CheckpointError, read_state, write_state
from mmrl.runtime.folders import mark
from mmrl.runtime.state_tree import apart

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


@pytest.mark.parametrize("name", [checkpoint.STATE, checkpoint.TENSORS, "model/weights.bin", checkpoint.SUMS])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
def test_one_wrong_bit_is_recognised(tmp_path, name, place):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(bytes(100))
    write_state(tmp_path, STATE)
    file = tmp_path / name
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}' is not a whole checkpoint of mmrl"):
        read_state(tmp_path)


def test_the_sums_are_those_that_other_programs_check(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("a card, which may be written anew")
    (tmp_path / "model" / "weights.bin").write_bytes(b"abc")
    write_state(tmp_path, STATE)
    (tmp_path / "model" / "README.md").write_text("measured anew")
    (tmp_path / "model" / "added.txt").write_text("by its owner")
    read_state(tmp_path)
    first, *others = (tmp_path / checkpoint.SUMS).read_text().splitlines()
    # SHA-256 of "abc", from FIPS 180-2.
    wanted = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert first == f"{wanted}  model/weights.bin"
    assert [line.split("  ")[1] for line in others] == [checkpoint.STATE, checkpoint.TENSORS]


@pytest.mark.parametrize("lines", [0, 1])
def test_sums_that_lack_a_file_do_not_vouch_for_it(tmp_path, lines):
    write_state(tmp_path, STATE)
    sums = (tmp_path / checkpoint.SUMS).read_text().splitlines(keepends=True)
    (tmp_path / checkpoint.SUMS).write_text("".join(sums[:lines]))
    with pytest.raises(CheckpointError, match="is not a whole checkpoint of mmrl"):
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


def test_half_a_removed_checkpoint_does_not_have_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-4"
    write_state(folder, STATE)

    def dies(path):
        (path / checkpoint.TENSORS).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", dies)
        checkpoint.discard(folder)
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 1
    checkpoint.tidy(tmp_path)
    assert not list(tmp_path.iterdir())


def finished(folder, run=""):
    """Make a folder that counts as a checkpoint, of a run by name."""
    folder.mkdir()
    for name in (checkpoint.SUMS, checkpoint.STATE):
        (folder / name).write_text("")
    if run:
        mark(folder, "train", run=run)


def test_checkpoints_of_others_count_for_nothing_and_stay(tmp_path):
    mark(tmp_path, "train", run="mine")
    for number, run in ((2, "mine"), (4, "mine"), (5, "other"), (7, "")):
        finished(tmp_path / f"checkpoint-{number}", run)
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "pytorch_model.bin").write_text("of another program")
    assert [path.name for path in checkpoint.finished(tmp_path)] == ["checkpoint-4", "checkpoint-2"]
    checkpoint.prune(tmp_path, 1, 9)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        f"checkpoint-{i}" for i in (4, 5, 6, 7, 8)
    }
    for number in (4, 6, 8):  # written anew: only what is nobody else's goes
        finished(tmp_path / "made.tmp", "mine")
        checkpoint.publish(tmp_path / "made.tmp", tmp_path / f"checkpoint-{number}")
    assert (tmp_path / "checkpoint-8.other1" / "pytorch_model.bin").is_file()
    assert [path.name for path in tmp_path.glob("*.other*")] == ["checkpoint-8.other1"]
    assert [checkpoint.step_of(path) for path in checkpoint.finished(tmp_path)] == [8, 6, 4]


def test_checkpoints_are_ordered_by_number(tmp_path):
    (tmp_path / "checkpoint-12").write_text("a file")
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-9", "checkpoint-11.tmp", "checkpoint-best"):
        finished(tmp_path / name)
    (tmp_path / "checkpoint-13").mkdir()  # an empty folder is none
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
        finished(tmp_path / f"checkpoint-{number}")
    checkpoint.prune(tmp_path, limit, 6)
    assert sorted(map(checkpoint.step_of, checkpoint.checkpoints(tmp_path))) == left


def test_only_tensors_that_share_memory_are_copied():
    base = torch.arange(4.0)
    alone = torch.ones(2)
    found = apart(
        {"alone": alone, "whole": base, "again": base.view(2, 2), "part": base[1:3], "none": base[:0]}
    )
    assert found["alone"] is alone and found["whole"] is base
    assert all(found[name].data_ptr() != base.data_ptr() for name in ("again", "part"))
    assert found["part"].untyped_storage().nbytes() == 8 and found["part"].tolist() == [1.0, 2.0]
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values() if len(tensor)}) == 4


def test_an_old_folder_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    for number in (2, 4, 6):
        finished(tmp_path / f"checkpoint-{number}")
    (tmp_path / "checkpoint-1.tmp").mkdir()

    def busy(path):
        raise OSError(16, "Device or resource busy")

    warned = []
    monkeypatch.setattr(checkpoint, "remove", busy)
    checkpoint.prune(tmp_path, 1, 6, warn=warned.append)
    checkpoint.tidy(tmp_path, warned.append)
    assert not any("checkpoint-6'" in text for text in warned)
    assert len(warned) == 3 and all("Device or resource busy; remove it by hand" in text for text in warned)
