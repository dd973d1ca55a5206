"""Finished parts of a build on disk."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from mmrl.data.dataset_io import RowError
from mmrl.runtime import shards
from mmrl.runtime.shards import Shards


def one_of(world, rank, *, done=False):
    """Make the process `rank` of a build, of which process 0 says whether all shards are finished."""
    gathered = lambda value: [done, *[value] * (world - 1)]
    return SimpleNamespace(
        rank=rank, world=world, main=rank == 0, all_gather_object=gathered, wait=lambda: None
    )


def test_a_process_waits_for_the_shards_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "PAUSE", 0.01)
    parts, seen, asked, begun = Shards(tmp_path), [], [], threading.Event()
    parts.folder.mkdir()

    def generate(numbers):
        asked.extend(numbers)
        begun.set()

    fill = lambda: seen.append(parts.fill(range(5), one_of(2, 1), dict, generate))
    waiting = threading.Thread(target=fill, daemon=True)
    parts.write_rows(3, [{"id": 3}])
    waiting.start()
    assert begun.wait(60)
    for number in (0, 1, 2, 4):
        assert waiting.is_alive()
        parts.write_rows(number, [{"id": number}])
    waiting.join(60)
    assert seen == [None]
    assert asked == [1], "shards 1 and 3 are its own, and 3 was finished"


def test_nothing_is_generated_for_finished_shards_and_other_inputs_are_refused(tmp_path):
    parts, asked = Shards(tmp_path), []
    parts.write_rows(0, [])
    parts.fill(range(1), one_of(1, 0, done=True), lambda: {"seed": 0}, asked.extend)
    with pytest.raises(RowError, match="holds a build with another seed: 0, not 1"):
        parts.fill(range(1), one_of(1, 0, done=True), lambda: {"seed": 1}, asked.extend)
    assert asked == []
