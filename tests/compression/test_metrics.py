"""Greedy answers of several evaluations: where they part, and what varies before."""

from __future__ import annotations

import json
import math

import pytest
import torch
import yaml

from mmrl.cli import main
from mmrl.compression.metrics import measure
from mmrl.config.consistency import check_evaluation
from mmrl.config.schema import ConfigError, EvaluateConfig, parse
from mmrl.training import evaluate
from tests.support.toys import STOP, ToyNoting

NAN = float("nan")


class Greedy(ToyNoting):
    """Answer greedily; words of another number of processes or batch size are stood in for by `other`."""

    temperature = 0.0

    def __init__(self, policy, *, stream, other: bool = False) -> None:
        super().__init__(policy, stream=stream)
        with torch.no_grad():
            for place, token in enumerate((1, 2, STOP)):
                policy.table[:, place, token] = 9.0
            policy.table[2, 1, 3] = 10.0 if other else 0.0


RAW = {
    "policy": "tests.support.toys:ToyText",
    "evaluation": {
        "data": {"name": "tests.support.toys:prompts", "num": 4},
        "engine": [{"name": f"{__name__}:Greedy"}],
        "rewards": [{"name": "tests.support.toys:brevity", "label": "short"}],
        "metrics": [{"name": "compression.divergence", "of": "short"}],
    },
}


def test_the_metrics_of_two_evaluations_by_hand():
    # Answer 0: equal. Answer 1 parts at its second token. Answer 2: one goes on after two equal tokens.
    first = torch.tensor([[5.0, 6, NAN], [5, 6, 7], [8, 9, NAN]])
    other = torch.tensor([[5.0, 6, NAN], [5, 7, NAN], [8, 9, 1]])
    chance = torch.tensor([[0.5, 0.5, NAN], [0.4, 0.9, 0.9], [1, 1, NAN]])
    others = torch.tensor([[0.5, 0.7, NAN], [0.2, 0.1, NAN], [1, 1, 0.3]])
    values = measure([(first, chance), (other, others)])
    # Deviations of two values are |a - b| / sqrt(2): means 0.1, 0.2 and 0 before the parting, sum 0.3.
    assert values["top1_std"] == pytest.approx(0.3 / 3 / 2**0.5)
    assert values["share"] == pytest.approx(2 / 3)
    assert values["index"] == 1.5  # after 1 and 2 tokens
    assert values["length_std"] == pytest.approx((0 + 1 + 1) / 3 / 2**0.5)


def test_evaluations_are_compared_with_the_answers_of_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "RESAMPLES", 20)

    def evaluated(name, *overrides):
        asked = ["evaluate", str(tmp_path / "config.yaml"), f"output_dir={tmp_path / name}", *overrides]
        assert main(asked) == 0
        return json.loads((tmp_path / name / "evaluation.json").read_text())

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(RAW))
    assert math.isnan(evaluated("one")["metrics"]["divergence/share"])  # nothing to compare with
    against = f"evaluation.metrics.0.against=[{tmp_path}/one/predictions*.parquet]"
    settings = "settings={same: {}, other: {evaluation.engine.0.other: true}}"
    values = {name: row["metrics"] for name, row in evaluated("two", against, settings)["settings"].items()}
    assert values["same"]["divergence/share"] == values["same"]["divergence/accuracy_std"] == 0.0
    assert values["other"]["divergence/share"] == 0.25  # one prompt of four, from its second token
    assert values["other"]["divergence/index"] == 1.0


def test_bad_inputs_are_named(tmp_path):
    plain = {**RAW["evaluation"], "engine": ["tests.support.toys:ToyGenerate"]}
    with pytest.raises(ConfigError, match=r"read the notes \['token'\]"):
        check_evaluation(parse(RAW | {"evaluation": plain}, EvaluateConfig))
    (tmp_path / "a.jsonl").write_text('{"uid": "a"}\n')
    raw = RAW | {"output_dir": str(tmp_path / "out")}
    raw["evaluation"] = {**RAW["evaluation"]}
    raw["evaluation"]["metrics"] = [
        {"name": "compression.divergence", "against": [str(tmp_path / "a.jsonl")]}
    ]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
    assert main(["evaluate", str(tmp_path / "config.yaml")]) == 2
