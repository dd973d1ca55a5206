"""`mmrl export` and `mmrl push`: folders that answer as what they were made from."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
import transformers
from PIL import Image

from mmrl import load_engine, load_pruned
from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.core.types import Outcome
from mmrl.training.loop import train
from tests.cli.conftest import IMAGES
from tests.diffusion import tiny as tiny_pipelines
from tests.support.toys import plan
from tests.vision import tiny

ASKED = tiny.ask("p0", tiny.picture(), "what fox")
CACHE = {"name": "compression.visual_quant", "nbits": 2}
CUT = {"name": "compression.yopo25"}


def letters(prompts, completions, **columns):
    return [float(text.count("e")) + len(text) / 100 for text in completions]


@pytest.fixture(scope="module")
def adapted(checkpoint, tmp_path_factory):
    """A finished run that trained an adapter, evaluated at its end."""
    folder = tmp_path_factory.mktemp("adapted")
    policy = {"name": "vision.tokens", "model": str(checkpoint("llava")), "dtype": "float32", "lora_rank": 4}
    engine = {"name": "vision.generate", "max_completion_length": 6}
    raw = plan(folder, policy=policy, rollout={"engine": [engine]}, max_steps=2, learn={"learning_rate": 0.1})
    raw |= {"rewards": [f"{__name__}:letters"], "evaluation": {"data": "tests.support.toys:prompts"}}
    train(build(parse(raw, Config), quiet=True))
    return folder


def logits(session):
    """Compute the logits of an answer to a question about an image."""
    policy = session.policy
    batch = policy.collate((policy.encode(ASKED, Outcome(text="the quick")),))
    with torch.no_grad():
        return policy(batch).logp


@pytest.fixture
def configuration(checkpoint, tmp_path):
    """Write an evaluation with transforms and a cache."""

    def write(cache=None, transform=(), own=()):
        engine = {"name": "vision.generate", "max_completion_length": 6, "transform": list(own)}
        engine |= {"cache": cache} if cache else {}
        policy = {"name": "vision.tokens", "model": str(checkpoint("llava")), "dtype": "float32"}
        raw = {"policy": {**policy, "transform": list(transform)}, "evaluation": {"engine": [engine]}}
        path = tmp_path / "evaluation.yaml"
        path.write_text(json.dumps(raw))
        return path

    return write


def said(source, *overrides):
    """Answer, and give the log-probabilities of the answer."""
    session = load_engine(
        source, ["policy.dtype=float32", *overrides], temperature=0, max_completion_length=6
    )
    (row,) = session.rollout([ASKED])
    return row.outcomes[-1].text, row.notes["logp"]


# ---- adapters


def test_an_adapter_is_merged_into_an_ordinary_folder(mmrl, adapted, tmp_path):
    output = tmp_path / "model"
    code, lines, _ = mmrl("export", adapted, output)
    assert (code, lines) == (0, [f"{output}: adapter merged into the weights"])
    assert not any("adapter" in path.name for path in output.iterdir())
    wanted = logits(load_engine(adapted))
    assert (logits(load_engine(output, ["policy.dtype=float32"])) - wanted).abs().max() < 1e-5
    assert (logits(load_engine(adapted / "config.yaml")) - wanted).abs().max() > 1e-3, "nothing was trained"
    plain = transformers.AutoModelForImageTextToText.from_pretrained(output)
    processor = transformers.AutoProcessor.from_pretrained(output)
    assert type(plain).__name__ == "LlavaForConditionalGeneration" and processor.chat_template


def test_the_card_of_a_trained_model_has_its_method_and_evaluation(mmrl, adapted, checkpoint, tmp_path):
    mmrl("export", adapted, tmp_path / "model")
    text = (tmp_path / "model" / "README.md").read_text()
    measured = json.loads((adapted / "evaluation.json").read_text())
    low, high = measured["intervals"]["letters"]
    assert f"| letters | {measured['metrics']['letters']:.4g} | {low:.4g} to {high:.4g} |" in text
    assert f"| base model | {checkpoint('llava')} |" in text and "Trained with mmrl for 2 of 2 steps." in text
    assert "Exported: adapter merged into the weights." in text and "| method | " in text


def test_the_adapter_of_a_flow_model_is_merged(mmrl, flow_model, tmp_path):
    path, output = tmp_path / "run.yaml", tmp_path / "model"
    policy = {"name": "diffusion.flow", "model": flow_model, "dtype": "float32", "lora_rank": 2}
    engine = {"name": "diffusion.denoise", "num_inference_steps": 2, "height": 32, "width": 32}
    path.write_text(json.dumps({"policy": policy, "evaluation": {"engine": [engine]}}))
    session = load_engine(path)
    with torch.no_grad():
        for name, parameter in session.policy.network.named_parameters():
            if "lora" in name:  # an adapter that changes something, as after training
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    saved = tmp_path / "adapter"
    session.policy.save(saved)
    wanted = session.answer("a red cube")
    assert wanted.tobytes() != load_engine(flow_model, IMAGES).answer("a red cube").tobytes()
    code, _, err = mmrl("export", path, output, f"policy.adapter={saved}")
    assert code == 0, err
    found = load_engine(output, IMAGES).answer("a red cube")
    assert (torch.tensor(list(found.getdata())) - torch.tensor(list(wanted.getdata()))).abs().max() <= 1
    assert (output / "model_index.json").is_file()
    plain = tiny_pipelines.load(output)
    assert not any("lora" in name for name in plain.transformer.state_dict())


# ---- transforms and caches


@pytest.mark.parametrize("where", ["transform", "own"], ids=["of the policy", "of the engine"])
def test_a_pruned_model_answers_the_same_and_is_not_loaded_as_whole(mmrl, configuration, tmp_path, where):
    source, output = configuration(**{where: [CUT]}), tmp_path / "model"
    code, (line,), _ = mmrl("export", source, output)
    assert code == 0 and "transform drop_visual_layers" in line
    (text, logp), (wanted, exact) = said(output), said(source)
    assert text == wanted and torch.equal(logp, exact)
    whole = said(source, "policy.transform=[]", "evaluation.engine.0.transform=[]")[1]
    assert len(whole) != len(logp) or not torch.equal(whole, logp), "the transform must matter"
    with pytest.raises(ValueError, match="mmrl_pruned"):
        transformers.AutoModelForImageTextToText.from_pretrained(output)
    assert type(load_pruned(output)).__name__ == "LlavaForConditionalGeneration"
    card = (output / "README.md").read_text()
    assert "**`from_pretrained` does not load this folder**" in card and "| compression.yopo25 |" in card


def test_structured_cuts_are_an_ordinary_smaller_folder(mmrl, configuration, tmp_path):
    cut = {"name": "compression.structured_pruning", "ffn_units": 0.5}
    source, output = configuration(transform=[cut]), tmp_path / "model"
    assert mmrl("export", source, output)[0] == 0
    plain = transformers.AutoModelForImageTextToText.from_pretrained(output)
    assert plain.config.text_config.intermediate_size == tiny.TEXT["intermediate_size"] // 2
    (text, logp), (wanted, exact) = said(output), said(source)
    assert text == wanted and torch.allclose(logp, exact, atol=1e-5)
    card = (output / "README.md").read_text()
    assert "| transform | compression.structured_pruning (ffn_units 0.5) |" in card


def test_a_cache_goes_along_as_a_recipe(mmrl, configuration, tmp_path):
    source, output = configuration(cache=CACHE), tmp_path / "model"
    code, lines, _ = mmrl("export", source, output)
    assert (code, lines) == (0, [f"{output}: cache compression.visual_quant"])
    assert json.loads((output / "kv_cache.json").read_text()) == CACHE
    (text, logp), (wanted, exact) = said(output), said(source)
    assert text == wanted and torch.equal(logp, exact)
    assert not torch.equal(logp, said(output, "rollout.engine.0.cache=null")[1]), "the cache must matter"
    transformers.AutoModelForImageTextToText.from_pretrained(output)


# ---- the folder


def test_only_what_an_export_left_is_replaced(mmrl, configuration, tmp_path, monkeypatch):
    source, output, mine = configuration(), tmp_path / "model", tmp_path / "mine"
    mine.mkdir()
    (mine / "mine.txt").write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr("mmrl.build._load_policy", lambda *given: pytest.fail("weights were loaded"))
        for options in ((), ("--overwrite",)):
            code, _, err = mmrl("export", source, mine, *options)
            assert code == 2 and f"'{mine}' holds mine.txt, which no `mmrl export` made" in err
    assert [path.name for path in mine.iterdir()] == ["mine.txt"]
    assert mmrl("export", source, output)[0] == 0
    (output / "older.bin").write_bytes(b"older")
    code, _, err = mmrl("export", source, output)
    assert code == 2 and "exists and is not empty; name another folder, or give --overwrite" in err
    code, lines, _ = mmrl("export", source, output, "--overwrite")
    assert (code, lines) == (0, [f"{output}: weights as they are"]) and not (output / "older.bin").exists()
    code, _, err = mmrl("export", output, output, "--overwrite")
    assert code == 2 and "holds the model that is exported" in err


def test_a_policy_that_cannot_be_exported_is_an_error(mmrl, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(plan(tmp_path)))
    code, _, err = mmrl("export", path, tmp_path / "model")
    assert code == 2 and "the policy 'tests.support.toys:ToyText' cannot be exported" in err


# ---- the upload


def test_a_folder_is_uploaded(mmrl, tmp_path, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, name, **options):
            calls.append((name, options))

        def upload_folder(self, **options):
            calls.append(options)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=Hub))
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    code, lines, _ = mmrl("push", tmp_path, "me/mine", "--message", "First")
    assert (code, lines) == (0, ["uploaded: https://huggingface.co/me/mine"])
    assert calls == [
        ("me/mine", {"private": True, "exist_ok": True}),
        {"repo_id": "me/mine", "folder_path": str(tmp_path), "commit_message": "First"},
    ]
    assert mmrl("push", tmp_path, "mine")[0] == mmrl("push", tmp_path / "no", "me/mine")[0] == 2
    assert len(calls) == 2
