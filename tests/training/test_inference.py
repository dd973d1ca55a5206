"""Generation with the cache and the transforms of a configuration, in one call."""

from __future__ import annotations

import json

import pytest

import mmrl
from mmrl import build
from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.compression.transforms.visual_computation import drop_visual_layers
from mmrl.config.schema import Config, ConfigError, EvaluateConfig, load
from mmrl.core.rng import Stream
from mmrl.vision.engines.generate import Generate
from mmrl.vision.policies.tokens import Tokens
from tests.support.toys import plan, prompts
from tests.vision import tiny
from tests.vision.conftest import checkpoint

__all__ = ["checkpoint"]
CACHE = {"name": "compression.visual_quant", "nbits": 2}
DROP = {"name": "compression.drop_visual_layers", "after": 1}


def evaluation(model):
    return {
        "policy": {"name": "vision.tokens", "model": str(model), "dtype": "float64", "transform": [DROP]},
        "evaluation": {
            "data": "tests.support.toys:prompts",
            "engine": [{"name": "vision.generate", "max_completion_length": 6, "cache": CACHE}],
            "rewards": ["tests.support.toys:brevity"],
        },
        "settings": {
            "cut": {},
            "whole": {"policy.transform": [], "evaluation.engine.0.cache": None},
            "coded": {"policy.transform": []},
        },
        "seed": 3,
    }


@pytest.fixture
def file(checkpoint, tmp_path):
    path = tmp_path / "evaluation.yaml"
    path.write_text(json.dumps(evaluation(checkpoint("llava"))))
    return path


@pytest.fixture(scope="module")
def asked():
    return [
        tiny.ask("one", tiny.picture(), "what"),
        tiny.ask("two", "is", tiny.picture(seed=1), "like", tiny.picture(seed=2)),
        tiny.ask("words", "the quick fox"),
    ]


def said(rows):
    return [(row.steps.ids.tolist(), row.notes["logp"].tolist()) for row in rows]


def by_hand(checkpoint, asked, transform=(), cache=None):
    policy = Tokens(model=str(checkpoint("llava")), dtype="float64", transform=transform)
    engine = Generate(policy, stream=Stream(3, purpose="inference"), max_completion_length=6, cache=cache)
    return said(engine.rollout(asked))


def two_bits(config, visual, mask):
    return visual_quant(config, visual, mask, nbits=2)


def test_a_file_gives_what_is_put_together_by_hand(file, checkpoint, asked):
    found = said(mmrl.load_engine(file).rollout(asked))
    assert found == by_hand(checkpoint, asked, (lambda model: drop_visual_layers(model, after=1),), two_bits)
    assert found != by_hand(checkpoint, asked)


def test_a_configuration_gives_what_its_file_gives(file, asked):
    config = load(file, kind=EvaluateConfig)
    assert said(mmrl.load_engine(config).rollout(asked)) == said(mmrl.load_engine(str(file)).rollout(asked))


def test_settings_are_loaded_by_their_names(file, checkpoint, asked):
    assert said(mmrl.load_engine(file, setting="whole").rollout(asked)) == by_hand(checkpoint, asked)
    coded = said(mmrl.load_engine(load(file, kind=EvaluateConfig), setting="coded").rollout(asked))
    assert coded == by_hand(checkpoint, asked, (), two_bits) != by_hand(checkpoint, asked)


def test_overrides_change_files_and_configurations_alike(file, checkpoint, asked):
    config = load(file, kind=EvaluateConfig)
    changes = ["policy.transform=[]", "evaluation.engine.0.cache=null"]
    for source in (file, config):
        assert said(mmrl.load_engine(source, changes).rollout(asked)) == by_hand(checkpoint, asked)
    assert config == load(file, kind=EvaluateConfig), "a configuration that is changed stays as it was"


def test_a_training_run_gives_the_engine_of_its_rollouts(checkpoint, tmp_path, asked):
    raw = plan(
        tmp_path,
        policy={"name": "vision.tokens", "model": str(checkpoint("llava")), "dtype": "float64"},
        rollout={"engine": [{"name": "vision.generate", "max_completion_length": 6, "cache": CACHE}]},
        seed=3,
    )
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(raw))
    wanted = by_hand(checkpoint, asked, (), two_bits)
    assert said(mmrl.load_engine(path).rollout(asked)) == wanted
    assert said(mmrl.load_engine(load(path, kind=Config)).rollout(asked)) == wanted
    with pytest.raises(ConfigError, match="'coded' is to be a setting of an evaluation"):
        mmrl.load_engine(path, setting="coded")


def test_rows_that_only_training_learns_from_are_not_made(checkpoint, tmp_path, asked):
    raw = plan(
        tmp_path,
        policy={"name": "vision.tokens", "model": str(checkpoint("llava")), "dtype": "float64"},
        rollout={"engine": [{"name": "vision.generate", "max_completion_length": 6}, "vision.with_exits"]},
        seed=3,
    )
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(raw))
    assert said(mmrl.load_engine(path).rollout(asked * 2)) == by_hand(checkpoint, asked * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["policy.transfrm=[]"], "did you mean 'transform'?"),
        (
            ["evaluation.engine.0.cache.nbit=1"],
            "evaluation.engine[0].cache: cache 'compression.visual_quant'",
        ),
        (["evaluation.engine=[]"], "'evaluation.engine' is empty; name the engine that answers"),
        (["sed=1"], "there is no key 'sed'; did you mean 'seed'?"),
    ],
)
def test_mistakes_are_found_before_weights_are_loaded(file, monkeypatch, changes, message):
    monkeypatch.setattr(build, "_load_policy", lambda *given: pytest.fail("weights were loaded"))
    for source in (file, load(file, kind=EvaluateConfig)):
        with pytest.raises(ConfigError) as raised:
            mmrl.load_engine(source, changes)
        assert message in str(raised.value)


def test_toys_are_loaded_from_an_object(tmp_path):
    raw = plan(tmp_path, policy={"name": "tests.support.toys:ToyText", "length": 5})
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(raw))
    engine = mmrl.load_engine(load(path), ["policy.length=1"])
    assert all(row.length == 1 for row in engine.rollout(prompts()))
