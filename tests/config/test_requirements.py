"""Packages that a plain installation does not bring are asked for before anything is loaded or measured."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from mmrl import pareto
from mmrl.build import build, check, load_evaluator
from mmrl.config.registry import HOMES, pieces
from mmrl.config.schema import Config, ConfigError, EvaluateConfig, parse
from tests.support.toys import plan

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
LOWBIT = {"name": "vision.generate", "transform": ["compression.bnb_quantize"]}
SWEEP = {
    "policy": {"name": "vision.tokens", "model": "nowhere"},
    "evaluation": {
        "data": "tests.support.toys:prompts",
        "engine": ["vision.generate"],
        "rewards": ["exact_match"],
    },
    "settings": {"exact": {}, "four bits": {"evaluation.engine": [LOWBIT]}},
}


@pytest.fixture
def bare(monkeypatch):
    """Take a package away."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


def test_every_extra_that_a_piece_names_exists():
    named = {extra for kind in HOMES for entry in pieces(kind) for extra in entry.packages.values()}
    assert {"diffusion", "clip", "lowbit"} <= named <= set(PROJECT["optional-dependencies"])


def test_what_draws_charts_is_a_dependency():
    assert any(line.startswith("matplotlib") for line in PROJECT["dependencies"])


def test_a_run_that_needs_an_extra_is_refused_before_anything_is_made(tmp_path, bare, monkeypatch):
    bare("bitsandbytes")
    monkeypatch.setattr("mmrl.build.Processes", lambda: pytest.fail("made something"))
    config = parse(plan(tmp_path, learn={"optimizer": "adamw_8bit"}), Config)
    check(config)  # a file is checked on machines that will not run it
    with pytest.raises(ConfigError, match=r"'adamw_8bit' needs the package bitsandbytes, .*'mmrl\[lowbit\]'"):
        build(config)


def test_a_sweep_asks_for_the_packages_of_every_setting_first(tmp_path, bare, monkeypatch):
    bare("bitsandbytes")
    monkeypatch.setattr(pareto, "load_evaluator", lambda config: pytest.fail("measured something"))
    with pytest.raises(ConfigError, match="'compression.bnb_quantize' needs the package bitsandbytes"):
        pareto.compare(parse(SWEEP, EvaluateConfig), tmp_path)


def test_a_sweep_asks_for_what_draws_it_first(tmp_path, bare, monkeypatch):
    bare("matplotlib")
    monkeypatch.setattr(pareto, "load_evaluator", lambda config: pytest.fail("measured something"))
    with pytest.raises(ImportError, match="matplotlib"):
        pareto.compare(parse({**SWEEP, "settings": {"exact": {}}}, EvaluateConfig), tmp_path)


def test_an_evaluation_asks_for_packages_before_a_model_is_loaded(bare):
    bare("diffusers")
    raw = {**SWEEP, "settings": {}, "policy": {"name": "diffusion.flow", "model": "nowhere"}}
    with pytest.raises(ConfigError, match=r"needs the package diffusers, .*'mmrl\[diffusion\]'"):
        load_evaluator(parse(raw, EvaluateConfig))
