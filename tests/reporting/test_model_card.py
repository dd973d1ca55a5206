"""Model cards: what made a model cheaper, what it was made of, and how it is loaded."""

from __future__ import annotations

import pytest

from mmrl.config.schema import Config, Piece, parse
from mmrl.reporting.methods import all_methods
from mmrl.reporting.model_card import describe_method, render_card, write_card
from tests.support.toys import plan

CUT = {"name": "compression.yopo25", "causal": False}


@pytest.fixture
def card(tmp_path):
    return (tmp_path / "README.md").read_text


def test_transforms_and_caches_are_named_with_their_options(card, tmp_path):
    engine = {"transform": [CUT], "cache": {"name": "compression.visual_quant", "nbits": 1}}
    policy = Piece("vision.tokens", {"model": "me/base", "transform": ["compression.layer_cast"]})
    render_card(tmp_path, "mine", policy, [Piece("vision.generate", engine)], ["Load it so."])
    text = card()
    assert "# mine\n\nExported with mmrl.\nLoad it so.\n" in text and 'base_model: "me/base"' in text
    rows = [line for line in text.splitlines() if line.startswith(("| transform", "| cache"))]
    assert rows == [
        "| transform | compression.layer_cast |",
        "| transform | compression.yopo25 (causal False) |",
        "| cache | compression.visual_quant (nbits 1) |",
    ]
    assert "tags: [mmrl]" in text and "| method |" not in text


def test_a_trained_model_says_that_only_its_rollouts_were_cheaper(card, tmp_path):
    engine = {"name": "tests.support.toys:ToyGenerate", "cache": "compression.kivi"}
    config = parse(plan(tmp_path, rollout={"engine": [engine]}), Config)
    measured = {"eval_accuracy": 0.5, "eval_accuracy/low": 0.25, "eval_accuracy/high": 0.75, "reward": 3.0}
    write_card(config, 2, measured, tmp_path)
    text = card()
    assert "| cache of rollouts | compression.kivi |" in text
    assert "| accuracy | 0.5 | 0.25 to 0.75 |" in text and "| reward | 3" not in text
    assert "tags: [mmrl, reinforcement-learning]" in text


def test_a_model_of_a_program_has_its_own_name(card, tmp_path):
    render_card(tmp_path, "mine", Piece("vision.tokens", {"model": "python:Qwen/Qwen2-VL-2B"}), [])
    assert 'base_model: "Qwen/Qwen2-VL-2B"' in card() and "| base model | Qwen/Qwen2-VL-2B |" in card()
    assert "python:" not in card()


def test_a_card_says_nothing_of_the_rewards_of_a_method_that_the_run_replaced(tmp_path):
    (method,) = (method for method in all_methods() if method.name == "time_r1")
    raw = {**plan(tmp_path), **{key: method.raw[key] for key in ("rewards", "advantage", "objective")}}
    text = describe_method(parse(raw, Config))
    assert text.startswith("time_r1 ([arXiv 2503.13377](https://arxiv.org/abs/2503.13377)): Time-R1")
    assert "Differs from GRPO: rewards: IoU times nearness" in text
    text = describe_method(parse({**raw, "rewards": ["exact_match"]}, Config))
    assert "Differs from GRPO: surrogate: no clip; " in text and "rewards:" not in text
