"""The builder of codebooks for `binary_codebook`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from mmrl.compression.builders import CalibrateCodebook
from mmrl.compression.caches.binary_codebook import binary_codebook
from mmrl.config.binding import Pieces
from mmrl.config.registry import find
from mmrl.config.schema import ConfigError
from mmrl.core.rng import Stream
from tests.vision import mixed


def test_books_are_fitted_on_the_prompts_of_a_data_set(exact, tmp_path, monkeypatch):
    policy = exact("qwen2_5_vl")
    asked = [one for one in mixed.prompts("qwen2_5_vl") if one.uid != "words"][:3]
    pieces = {"policy": policy, "data": asked}
    monkeypatch.setattr(Pieces, "make", lambda self, kind, piece, **named: pieces[kind])
    model = {"name": "vision.tokens", "model": "any"}
    prompts = {"name": "vision.grounding", "path": "any", "root": "any"}
    told, found = [], []
    for number in (0, 0, 2):
        made = CalibrateCodebook(
            stream=Stream(0), model=model, prompts=prompts, first=0, num_prompts=number, num_tokens=3
        )
        told.append(made.build(tmp_path / "out"))
        found.append(load_file(tmp_path / "out" / "codebook.safetensors"))
    assert [one["prompts"] for one in told] == [len(asked), len(asked), 2]
    assert told[0]["bytes"] == (tmp_path / "out" / "codebook.safetensors").stat().st_size
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(found[0]["keys.mean"], found[2]["keys.mean"])
    layers, heads, many, size = found[0]["values.vectors"].shape
    assert many == size and found[0]["values.mean"].shape == (layers, heads, 1, size)
    cache = partial(binary_codebook, of="visual", codebook=str(tmp_path / "out" / "codebook.safetensors"))
    together = mixed.generate(policy, asked, cache=cache)
    alone = mixed.generate(policy, asked, cache=cache, batch_size=1)
    assert [row.steps.ids.tolist() for row in together] == [row.steps.ids.tolist() for row in alone]


def test_pieces_are_checked_before_a_weight_is_loaded():
    with pytest.raises(ConfigError, match=r"build\.model"):
        CalibrateCodebook(
            stream=Stream(0), model={"name": "vision.nothing"}, prompts={"name": "vision.grounding"}
        )


def test_the_registry_knows_it():
    assert find("builder", "compression.calibrate_codebook").target is CalibrateCodebook


def test_a_file_that_is_no_book_is_an_error_that_names_it(tmp_path):
    config, seen = LlamaConfig(num_hidden_layers=1), torch.ones(1, 4, dtype=torch.bool)
    path = tmp_path / "codebook.safetensors"
    open_it = partial(binary_codebook, config, seen, seen, codebook=str(path))
    with pytest.raises(ValueError, match=r"cannot read the codebook .*codebook\.safetensors"):
        open_it()
    path.write_bytes(b"words")
    with pytest.raises(ValueError, match=r"cannot read the codebook .*codebook\.safetensors"):
        open_it()
    save_file({"keys.mean": torch.zeros(1, 1, 1, 4)}, path)
    with pytest.raises(
        ValueError, match=r"not a codebook .* lacks keys\.metric, keys\.vectors, values\.mean"
    ):
        open_it()
