"""A transform that leaves nothing to train is refused before anything is loaded."""

from __future__ import annotations

import json

import pytest

from mmrl.cli import main
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece
from mmrl.config.trainable import check_trainable
from tests.support.toys import plan

LOW = {"transform": [{"name": "compression.bnb_quantize", "nbits": 4}]}


@pytest.mark.parametrize(
    "options",
    [
        {**LOW, "lora_rank": 4},
        {**LOW, "adapter": "runs/a/model"},
        {"transform": [*LOW["transform"], {"name": "vision.steering", "layer": 0}]},
        {"transform": ["compression.yopo25"]},
        {"transform": None},
        {},
    ],
)
def test_adapters_and_added_parts_are_trained(options):
    check_trainable(Piece("vision.tokens", options))


@pytest.mark.parametrize("options", [LOW, {**LOW, "lora_rank": 0}, {"transform": "compression.bnb_quantize"}])
def test_low_bits_alone_are_refused(options):
    with pytest.raises(ConfigError, match="'compression.bnb_quantize' makes weights that cannot be trained"):
        check_trainable(Piece("vision.tokens", options))


@pytest.mark.parametrize("name", ["vision.tokens", "diffusion.flow"])
def test_check_refuses_low_bits_alone(name, tmp_path, capsys):
    raw = {**plan(tmp_path / "out"), "policy": {"name": name, "model": "owner/name", **LOW}}
    if name == "diffusion.flow":
        raw["rollout"] = {**raw["rollout"], "engine": [{"name": "diffusion.denoise"}]}
    (tmp_path / "run.yaml").write_text(json.dumps(raw))
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "policy.lora_rank is 0, so nothing would learn; set for instance policy.lora_rank=16" in line
