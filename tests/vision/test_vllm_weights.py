"""The weights that vLLM servers are brought: whether they changed, and who uses a folder of them."""

from __future__ import annotations

import fcntl
import gc
import logging
import shutil

import pytest
import torch

from mmrl.references import Reference
from mmrl.runtime import files
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving import weights
from mmrl.vision.serving.servers import LOCK, locked
from mmrl.vision.serving.weights import WeightsWriter
from tests.support.distributed_worker import start

LORA = {"lora_rank": 4, "freeze_vision_tower": False}


@pytest.fixture
def policy(checkpoint):
    return Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", **LORA)


def shift(policy, size=0.05):
    with torch.no_grad():
        for weight in policy.module.parameters():
            if weight.requires_grad:
                weight.add_(size)


def test_an_acting_reference_is_other_weights(policy, tmp_path):
    """Its weights are swapped in as `.data`, which changes neither the tensor nor its version."""
    writer, reference = WeightsWriter(policy, tmp_path), Reference(policy, 0.5)
    start_version = writer().version
    shift(policy)
    live = writer().version
    with reference.rollout_weights():
        assert writer().version == start_version != live
    assert writer().version == live


def test_weights_that_change_behind_a_tensor_are_noticed(policy, tmp_path):
    """As those of ZeRO-1 do, which are views of a flat copy."""
    writer = WeightsWriter(policy, tmp_path)
    weight = next(p for p in policy.module.parameters() if p.requires_grad)
    flat = weight.detach().clone()
    weight.data = flat.view_as(weight)
    before, stamp = writer().version, weight._version
    flat.add_(1.0)
    assert weight._version == stamp and writer().version != before


def test_a_folder_stays_while_another_learner_uses_it(policy, tmp_path):
    one, other = WeightsWriter(policy, tmp_path), WeightsWriter(policy, tmp_path)
    shared = one().folder
    assert other().folder == shared
    for _ in range(2):
        shift(policy)
        one()
    assert shared.is_dir(), "the other learner's servers may read it"
    del other
    gc.collect()
    assert not shared.exists()
    latest = one().folder
    del one
    gc.collect()
    assert not latest.exists() and {path.name for path in tmp_path.iterdir()} <= {LOCK}


def test_a_folder_that_a_user_removed_is_let_go_without_a_word(policy, tmp_path, monkeypatch):
    failed = []
    monkeypatch.setattr("sys.unraisablehook", failed.append)  # what a finalizer raises is only printed
    writer = WeightsWriter(policy, tmp_path / "weights")
    writer()
    shutil.rmtree(tmp_path / "weights")
    del writer
    gc.collect()
    assert not failed and not (tmp_path / "weights").exists()


def test_the_garbage_collector_does_not_wait_for_a_lock(policy, tmp_path, monkeypatch):
    """It may run in the thread that has the lock, which would then wait for itself."""
    writer = WeightsWriter(policy, tmp_path)
    kept, at_exit = writer().folder, []
    with locked(tmp_path / LOCK), monkeypatch.context() as patched:
        patched.setattr(
            weights.weakref, "finalize", lambda _, *call, **options: at_exit.append((call, options))
        )
        del writer
        gc.collect()
        assert kept.is_dir()
    (((remove, written), options),) = at_exit
    remove(written, **options)
    assert not kept.exists()


def test_file_systems_without_locks_are_warned_of_once(tmp_path, monkeypatch, caplog):
    def unable(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unable)
    files._warn_of_no_locks.cache_clear()
    with caplog.at_level(logging.WARNING, "mmrl"):
        for _ in range(3):
            with locked(tmp_path / LOCK):
                pass
    (record,) = caplog.records
    assert "make sure that only one process writes there" in record.message


@pytest.mark.slow
def test_sharded_weights_are_written_whole_after_every_update(checkpoint, tmp_path):
    arguments = [str(tmp_path), str(checkpoint("qwen2_5_vl"))]
    processes = start("tests.support.sharded_serving", arguments, 2)
    try:
        printed = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(2)), "\n".join(printed)
