"""Samplers draw from rows that are read when they are asked for as they draw from a list."""

from __future__ import annotations

import gc

import pytest

from mmrl.core.types import Message, Part, Prompt
from mmrl.data.dataset_io import Rows, read_prompts, write_rows
from mmrl.data.row_prompts import RowPrompts
from mmrl.papers.craft_gui import Pools
from mmrl.papers.dump import SourceBandit
from mmrl.papers.mmr1_vas import VarianceAware
from mmrl.samplers.pools import SelectedByDifficulty
from mmrl.samplers.uniform import Uniform
from tests.support.observing import made, uids

COUNT = 12
SAMPLERS = {
    "uniform": (Uniform, {}),
    "pools": (Pools, {"by": "source", "pools": ("a", "b")}),
    "selected": (SelectedByDifficulty, {"by": "score", "rule": "0070_all", "num_selected": 5}),
    "source_bandit": (SourceBandit, {"by": "source"}),
    "variance_aware": (VarianceAware, {}),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_prompts_are_drawn(tmp_path, name):
    write_rows(
        tmp_path / "train.jsonl",
        [{"id": f"r{i}", "q": "?", "source": "ab"[i % 2], "score": i / COUNT} for i in range(COUNT)],
    )
    make = lambda row, number: Prompt(
        row.columns["id"], (Message("user", (Part(row.columns["q"]),)),), columns=row.columns
    )
    prompts = read_prompts("rows", Rows(tmp_path / "train.jsonl", tmp_path), make)
    assert isinstance(prompts, RowPrompts)
    kind, options = SAMPLERS[name]
    drawn = []
    for data in (list(prompts), prompts):
        sampler = made(kind, data=data, **options)
        drawn.append([uids(sampler.draw(3, 2)) for _ in range(4)])
        del data, sampler
    assert drawn[0] == drawn[1] and len(drawn[0][0]) == 6
    sampler = made(kind, data=prompts, **options)
    gc.collect()
    assert not prompts.places.alive, "a sampler keeps no prompts"
    one, same, *_ = sampler.draw(3, 2)
    assert one is same
