"""What a user may name (configurations, runs, checkpoints, models), as the configuration of an engine."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest

import mmrl
from mmrl.build import build, check_source
from mmrl.config.schema import Config, ConfigError, EvaluateConfig, parse
from mmrl.inference.sources import CACHE, TRANSFORMS, resolve
from mmrl.training.loop import train
from tests.support.toys import plan
from tests.vision.conftest import checkpoint

__all__ = ["checkpoint"]
ASKED = "the quick fox"


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    """Train two steps, with an adapter or the whole model; nobody writes to these folders."""

    @cache
    def make(**policy) -> Path:
        folder = tmp_path_factory.mktemp("run")
        policy = {"name": "vision.tokens", "model": str(checkpoint("llava")), "dtype": "float32", **policy}
        engine = {"name": "vision.generate", "max_completion_length": 6}
        raw = plan(folder, policy=policy, rollout={"engine": [engine]}, max_steps=2, save_steps=1)
        raw["learn"] = {"learning_rate": 0.1}
        train(build(parse({**raw, "rewards": [f"{__name__}:letters"]}, Config), quiet=True))
        return folder

    return make


def letters(prompts, completions, **columns):
    return [float(text.count("e")) + len(text) / 100 for text in completions]


def said(source, *overrides, **options):
    return mmrl.load_engine(source, overrides, temperature=0, **options).answer(ASKED)


@pytest.mark.parametrize("policy", [{}, {"lora_rank": 4}], ids=["whole", "adapter"])
def test_a_run_gives_its_last_checkpoint_and_a_folder_its_own(run, policy):
    folder = run(**policy)
    last = said(folder)
    assert last == said(folder / "checkpoint-2") == said(folder / "checkpoint-2" / "model")
    before = said(folder / "config.yaml")
    assert len({before, said(folder / "checkpoint-1"), last}) > 1, "training changed nothing"
    assert resolve(folder).run == folder


def test_a_checkpoint_of_the_whole_model_needs_no_other(run):
    found = resolve(run())
    assert found.weights is None and found.config.policy.options["model"].endswith("checkpoint-2/model")


def test_a_run_without_a_checkpoint_is_an_error(tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps(plan(tmp_path)))
    with pytest.raises(ConfigError, match="has no checkpoint yet; train on, or name its config.yaml"):
        resolve(tmp_path)


# ---- models without a configuration


def test_a_folder_of_transformers_gets_the_preset(checkpoint):
    found = resolve(checkpoint("llava"), ["policy.dtype=float32", "rollout.engine.0.top_p=0.9"])
    check_source(found)
    assert (found.config.policy.name, found.config.policy.options["dtype"]) == ("vision.tokens", "float32")
    (engine,) = found.engines
    assert engine.name == "vision.generate"
    # As `transformers chat`: sampling, and 256 tokens.
    assert engine.options == {"max_completion_length": 256, "temperature": 1.0, "top_p": 0.9}


def test_a_folder_of_diffusers_gets_the_preset(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    found = resolve(tmp_path, options={"num_inference_steps": 4, "seed": 3})
    check_source(found)
    assert (found.config.policy.name, found.engines[0].name) == ("diffusion.flow", "diffusion.denoise")
    assert (found.engines[0].options["num_inference_steps"], found.config.seed) == (4, 3)


def test_a_model_of_the_hub_is_told_apart_by_its_files(monkeypatch, tmp_path):
    files = {"me/images": "model_index.json", "me/small": CACHE}
    monkeypatch.setattr("mmrl.inference.sources._on_hub", lambda name, file: files.get(name) == file)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name: str(tmp_path / name))
    recipe = {"name": "compression.visual_quant", "nbits": 1}
    (tmp_path / "me" / "small").mkdir(parents=True)
    (tmp_path / "me" / "small" / CACHE).write_text(json.dumps(recipe))
    assert resolve("me/images").config.policy.name == "diffusion.flow"
    assert resolve("me/words").config.policy.name == "vision.tokens"
    small = resolve("me/small")
    assert small.engines[0].options["cache"] == recipe
    assert small.config.policy.options == {"model": "me/small"}


def test_an_adapter_of_peft_brings_its_base_model(run, checkpoint, tmp_path):
    trained = run(lora_rank=4) / "checkpoint-2" / "model"
    adapter = tmp_path / "adapter"  # outside of the run
    shutil.copytree(trained, adapter)
    options = resolve(adapter).config.policy.options
    assert options == {"model": str(checkpoint("llava")), "adapter": str(adapter)}
    assert isinstance(said(adapter), str)


def test_options_go_to_the_engine_that_takes_them(checkpoint):
    raw = {
        "policy": {"name": "vision.tokens", "model": str(checkpoint("llava"))},
        "evaluation": {"engine": ["vision.generate", {"name": "compression.fidelity_gate", "num_tokens": 2}]},
    }
    found = resolve(parse(raw, EvaluateConfig), options={"temperature": 0.5, "num_tokens": 3, "seed": None})
    assert [piece.options for piece in found.engines] == [{"temperature": 0.5}, {"num_tokens": 3}]
    with pytest.raises(
        ConfigError, match=r"no engine of 'evaluation.engine' takes `height`: 'vision.generate"
    ):
        resolve(parse(raw, EvaluateConfig), options={"height": 3})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_thing", "there is no file or folder 'no_such_thing'; name a configuration"),
        ("a/b/c", "there is no file or folder 'a/b/c'"),
        ("no_such.yaml", "there is no file 'no_such.yaml'"),
    ],
)
def test_what_is_nowhere_is_an_error(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve(name)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            CACHE,
            {"name": "os:system"},
            "may only name a cache of mmrl, such as compression.x, not 'os:system'",
        ),
        (CACHE, {"name": "compression.no_such"}, "no cache is called 'compression.no_such'"),
        (CACHE, ["x"], "must hold a JSON object, not a list"),
        (CACHE, {"name": "compression.binary_codebook", "codebook": "../x"}, "a codebook inside its folder"),
        (TRANSFORMS, {"transforms": [{"name": "os:system"}]}, "may only name a transform of mmrl"),
        ("adapter_config.json", {}, "names no base_model_name_or_path"),
        ("pytorch_lora_weights.safetensors", {}, "does not name its base model; name the run it comes from"),
        ("transformer_2/pytorch_lora_weights.safetensors", {}, "does not name its base model"),
    ],
)
def test_a_folder_cannot_choose_code_or_files_elsewhere(tmp_path, file, content, message):
    if file == CACHE:  # beside a model
        (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path)


def test_frames_of_videos_are_those_of_the_data(checkpoint):
    raw = plan("x", policy={"name": "vision.tokens", "model": str(checkpoint("qwen2_vl"))})
    raw |= {"data": {"name": "vision.visual_qa", "path": "x", "max_frames": 6, "frames_per_second": 1.0}}
    raw["rollout"] = {"engine": ["vision.generate"]}
    sampling = mmrl.load_engine(parse(raw, Config)).media_reader().sampling
    assert (sampling.max_frames, sampling.frames_per_second) == (6, 1.0)
    around = {**raw, "data": {"name": "drop_thoughts", "data": raw["data"]}}
    assert mmrl.load_engine(parse(around, Config)).media_reader().sampling == sampling
