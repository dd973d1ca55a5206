"""Builds of preference pairs that were started on other rows or other weights are refused, not mixed."""

from __future__ import annotations

import json

import pytest

from mmrl.data.dataset_io import RowError
from tests.vision.test_clip_pairs import build, paint, rows_of

COUNT = {"tau_keep": 0.0, "tau_flip": 0.0}


def written(tmp_path, prompt):
    rows = [{"image": f"{i:02d}.png", "prompt": prompt} for i in range(10)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_the_same_size_with_another_prompt_are_another_build(tmp_path):
    paint(tmp_path, [f"{i:02d}.png" for i in range(10)])
    before = written(tmp_path, "What is it?")
    size = before.stat().st_size
    build(before, tmp_path / "pairs", **COUNT)
    assert {row["prompt"][0]["content"] for row in rows_of(tmp_path / "pairs")} == {"What is it?"}
    build(before, tmp_path / "pairs", **COUNT)  # the same rows go on
    after = written(tmp_path, "Where is it")
    assert after.stat().st_size == size
    with pytest.raises(RowError, match="holds a build with another images_hash: .*choose another output"):
        build(after, tmp_path / "pairs", **COUNT)


def test_other_files_of_the_model_are_another_build_though_no_weight_is_loaded(tmp_path):
    paint(tmp_path / "pictures", [f"{i:02d}.png" for i in range(10)])
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"1")
    model = {"name": "tests.vision.test_pair_builds:talker_of", "model": str(weights)}
    build(tmp_path / "pictures", tmp_path / "pairs", model=model, **COUNT)
    build(tmp_path / "pictures", tmp_path / "pairs", model=model, **COUNT)
    (weights / "model.safetensors").write_bytes(b"2")
    with pytest.raises(RowError, match="another model_files"):
        build(tmp_path / "pictures", tmp_path / "pairs", model=model, **COUNT)


def talker_of(*, model):
    """Make a policy whose option names a folder."""
    from tests.vision.pair_toys import Talker

    return Talker()
