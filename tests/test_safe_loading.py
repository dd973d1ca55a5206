"""Nothing that is loaded runs code: safetensors alone, no pickles, no classes of a model's own folder."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from mmrl.diffusion.loading import load_pipeline, modules_of
from mmrl.diffusion.reward_base import load_pretrained, read_weights
from mmrl.runtime.modules import loading_onto, model_source
from mmrl.vision.models import loading
from tests.diffusion import tiny as flows
from tests.vision import tiny

ROOT = Path(__file__).parents[1]
FOLDERS = ("mmrl", "vision", "diffusion", "compression", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# What is loaded with these holds no weights; peft's weights are looked for before it may choose a pickle.
WITHOUT_WEIGHTS = (
    "PeftConfig",
    "AutoProcessor",
    "AutoTokenizer",
    "AutoConfig",
    "CLIPProcessor",
    "AutoImageProcessor",
)


FORBIDDEN = ("pickle.load", "pickle.loads", "joblib.load", "torch.jit.load", "marshal.loads", "yaml.load")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def trap(tmp_path):
    path = tmp_path / "sprung"
    yield Trap(path)
    assert not path.exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.make("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flow")
    flows.tiny_sd3(folder)
    return folder


def calls():
    """Every call with its keywords: file and line, name, keywords."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
                yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), keywords


def test_every_call_that_loads_weights_asks_for_safetensors_or_tensors_alone():
    seen = []
    for place, name, keywords in calls():
        owner, _, what = name.rpartition(".")
        assert keywords.get("trust_remote_code", "False") == "False", place
        assert keywords.get("allow_pickle", "False") == "False", place
        assert name not in FORBIDDEN, place
        if name == "torch.load" or what in ("create_model", "create_model_and_transforms"):
            seen.append(name)
            assert keywords["weights_only"] == "True", place
        elif what == "from_pretrained" and owner not in (*WITHOUT_WEIGHTS, "PeftModel"):
            seen.append(name)
            assert keywords["use_safetensors"] == "True", place
        elif owner.startswith("Auto") and what == "from_pretrained" and not place.startswith("benchmarks"):
            assert keywords["trust_remote_code"] == "False", place  # else the user is asked, for 15 s
    assert {"torch.load", "open_clip.create_model", "pipeline.from_pretrained"} <= set(seen)


# ---- adapters


@pytest.fixture
def adapter(checkpoint, tmp_path):
    """A saved adapter, and the name of its weights."""
    model = loading.load_model(str(checkpoint), dtype="float32", attn_implementation="sdpa")
    loading.add_adapter(model, rank=2, alpha=4.0, tower=False).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_of_another_form_than_safetensors_is_refused(adapter, checkpoint, trap):
    fresh = loading.load_model(str(checkpoint), dtype="float32", attn_implementation="sdpa")
    assert loading.load_adapter(fresh, str(adapter))
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(trap))
    with pytest.raises(ValueError, match=r"holds no 'adapter_model\.safetensors' \(an adapter_model\.bin is"):
        loading.load_adapter(fresh, str(adapter))
    torch.save({}, adapter / "adapter_model.bin")  # one without code is not read either
    with pytest.raises(ValueError, match=r"cannot load the adapter .*an adapter_model\.bin is not read"):
        loading.load_adapter(fresh, str(adapter))


# ---- models


def test_models_in_pickles_are_refused(checkpoint, tmp_path, trap):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(trap))
    with pytest.raises(ValueError, match="safetensors"):
        loading.load_model(str(folder), dtype="float32", attn_implementation="sdpa")


def test_models_of_rewards_in_pickles_are_refused(tmp_path, trap):
    import transformers

    tower = transformers.CLIPTextConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.CLIPTextModel(tower).save_pretrained(tmp_path / "clip")
    assert load_pretrained("r", transformers.CLIPTextModel, str(tmp_path / "clip"))
    state = transformers.CLIPTextModel(tower).state_dict()
    (tmp_path / "clip" / "model.safetensors").unlink()
    for write in (
        lambda path: torch.save(state, path),
        lambda path: path.write_bytes(pickle.dumps(trap)),
    ):
        write(tmp_path / "clip" / "pytorch_model.bin")
        with pytest.raises(ValueError, match="r: cannot load .*safetensors"):
            load_pretrained("r", transformers.CLIPTextModel, str(tmp_path / "clip"))
    (tmp_path / "head.pth").write_bytes(pickle.dumps(trap))
    with pytest.raises(ValueError, match="hold code are refused"):
        read_weights("r", tmp_path / "head.pth")


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_parts_of_a_pipeline_in_pickles_are_refused(pipeline, tmp_path, trap, part):
    folder = shutil.copytree(pipeline, tmp_path / "flow")
    (weights,) = (folder / part).glob("*.safetensors")
    weights.unlink()
    for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin"):
        (folder / part / name).write_bytes(pickle.dumps(trap))
    with pytest.raises(ValueError, match=f"cannot load the pipeline '{folder}'"):
        load_pipeline(str(folder), dtype="float32")


@pytest.mark.parametrize("place", ["_class_name", "transformer"])
def test_code_of_a_pipeline_folder_is_not_run(pipeline, tmp_path, place):
    folder = shutil.copytree(pipeline, tmp_path / "flow")
    index = json.loads((folder / "model_index.json").read_text())
    index[place] = ["trap", "Trap"]
    (folder / "model_index.json").write_text(json.dumps(index))
    for home in (folder, folder / "transformer"):
        (home / "trap.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'sprung')!r}).touch()\n")
    with pytest.raises(ValueError, match=f"wants code .* for {place}; no code of a model folder is run"):
        load_pipeline(str(folder), dtype="float32")
    assert not (tmp_path / "sprung").exists()


def test_code_of_a_model_folder_is_not_run_and_nobody_is_asked(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.Trap"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "trap.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'sprung')!r}).touch()\n")
    for load in (
        lambda: loading.load_processor(str(folder)),
        lambda: loading.load_model(str(folder), dtype="float32", attn_implementation="sdpa"),
    ):
        with pytest.raises(ValueError, match="cannot load the"):
            load()
    assert not (tmp_path / "sprung").exists()


# ---- names


def test_a_path_without_a_folder_is_an_error_before_a_hub_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs" / "model_final").mkdir(parents=True)
    (tmp_path / "file").touch()

    def ask(*args, **options):
        raise AssertionError("a hub was asked")

    monkeypatch.setattr("huggingface_hub.file_download._hf_hub_download_to_cache_dir", ask)
    paths = ("./a", "../a", "/a/b", "~/a", "a/b/c", "runs/model_fnal", "file", "owner/name/", "runs/a/b")
    for name in paths:
        for load in (
            lambda name=name: model_source(name),
            lambda name=name: loading.load_processor(name),
            lambda name=name: loading.load_model(name, dtype="float32", attn_implementation="sdpa"),
            lambda name=name: loading.load_adapter(torch.nn.Linear(1, 1), name),
            lambda name=name: load_pipeline(name, dtype="float32"),
        ):
            with pytest.raises(ValueError, match=f"there is no folder '{name}'.*owner/name"):
                load()
    with pytest.raises(ValueError, match="'runs' holds the folders model_final; name a folder"):
        model_source("runs/model_fnal")


def test_folders_and_names_of_a_hub_stay_what_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs" / "model_final").mkdir(parents=True)
    for name in ("runs/model_final", "./runs", str(tmp_path), "owner/name", "gpt2"):
        assert Path(model_source(name)) == Path(name)
    assert model_source("~/runs") == str(tmp_path / "runs")


def test_a_model_that_writes_no_text_is_called_so(tmp_path):
    from transformers import ViTConfig

    ViTConfig(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"processor of .*type 'vit' writes no text; name a vision-language model"
    ):
        loading.load_processor(str(tmp_path))


def test_a_model_without_an_image_processor_says_what_is_missing(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"no image processor \(preprocessor_config\.json.*copy"):
        loading.load_processor(str(folder))


def test_a_pipeline_is_loaded_straight_onto_its_device(pipeline):
    plain = load_pipeline(str(pipeline), dtype="float32")
    with loading_onto(torch.device("cpu")):
        placed = load_pipeline(str(pipeline), dtype="float32")
    assert plain.hf_device_map is None and placed.hf_device_map == "cpu"
    for one, other in zip(modules_of(plain), modules_of(placed), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))
