"""A family of models is one file of the user, which `imports` of a configuration names."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from mmrl.cli import main
from mmrl.config import registry
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Config, parse
from mmrl.reporting import html
from mmrl.vision.models.model_families import FAMILIES
from tests.diffusion.test_flow_runs import plan as flow_plan
from tests.diffusion.tiny import tiny_sd3
from tests.support.doc_blocks import ROOT, Block, blocks_of, folder_of
from tests.support.toys import plan
from tests.vision import tiny

PAGE = "docs/howto/model.md"
# A class that transformers lacks, and the rules of LLaVA without its class token.
MY_VLM = """# my_vlm.py
import transformers as t

from mmrl.vision.models.family import VLMFamily, linear, patches, per_image
from mmrl.vision.models.model_families import FAMILIES


class MyConfig(t.LlavaConfig):
    model_type = "my_vlm"


class MyVLM(t.LlavaForConditionalGeneration):
    config_class = MyConfig


t.AutoConfig.register("my_vlm", MyConfig, exist_ok=True)
t.AutoModelForImageTextToText.register(MyConfig, MyVLM, exist_ok=True)
FAMILIES["my_vlm"] = VLMFamily(linear, per_image(patches))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of a user, who works in it."""
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_as_own(llava, folder):
    """Write the weights of LLaVA as a checkpoint of the user's class."""
    import my_vlm  # pyright: ignore[reportMissingImports]
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(llava)
    own = my_vlm.MyVLM(my_vlm.MyConfig.from_dict(model.config.to_dict() | {"model_type": "my_vlm"}))
    own.load_state_dict(model.state_dict())
    own.save_pretrained(folder)
    AutoProcessor.from_pretrained(llava).save_pretrained(folder)


def test_a_vision_language_model_from_outside_is_checked_trained_and_examined(home, capsys):
    Image.new("RGB", (56, 56), "red").save(home / "a.png")
    row = {"prompt": "<image>what", "image": "a.png", "solution": "fox"}
    (home / "rows.jsonl").write_text("".join(json.dumps(row | {"id": str(i)}) + "\n" for i in range(4)))
    engine = {"name": "vision.generate", "max_completion_length": 4}
    run = plan(
        "out",
        policy={"name": "vision.tokens", "model": "model", "dtype": "float32"},
        data={"name": "vision.conversations", "path": "rows.jsonl"},
        rollout={"engine": [engine], "num_prompts": 2},
        rewards=[{"name": "overlong", "max_completion_length": 3, "soft_punish_cache": 2}],
        imports=["my_vlm"],
        max_steps=1,
    )
    (home / "run.yaml").write_text(json.dumps(run))
    with folder_of([Block("page", 1, "python", MY_VLM)], home):
        save_as_own(tiny.make("llava", home / "llava"), home / "model")
        assert main(["check", "run.yaml", "--data"]) == 0, capsys.readouterr()
        assert main(["train", "run.yaml"]) == 0
        assert main(["doctor", "run.yaml"]) in (0, 1)  # 1 where random weights are odd
        told = capsys.readouterr()
        assert "nats a token away" not in told.out and not told.err.startswith("error")
        assert "my_vlm" in FAMILIES and (home / "out" / "checkpoint-1" / "model").is_dir()
    assert "my_vlm" not in FAMILIES


@pytest.mark.slow
def test_a_pipeline_family_from_outside_is_checked_trained_and_listed(home, capsys, monkeypatch):
    """The file of the page serves a pipeline that no family of the library serves."""
    tiny_sd3(home / "model")
    name = "StableDiffusion3Pipeline"
    (shipped,) = (entry for entry in registry.pieces("family") if name in entry.target.pipelines)
    monkeypatch.delitem(registry.PIECES, ("family", shipped.full_name))
    (block,) = (one for one in blocks_of((ROOT / PAGE).read_text(), PAGE) if one.file == "my_model.py")
    run = flow_plan("model", "out", "diffusion.transition", max_steps=1, imports=["my_model"])
    (home / "run.yaml").write_text(json.dumps(run))
    (home / "plain.yaml").write_text(json.dumps({**run, "imports": []}))
    with folder_of([Block(PAGE, 1, "python", block.text.replace("MyPipeline", name))], home):
        assert main(["check", "plain.yaml"]) == 2
        assert f"no family serves the pipeline '{name}'" in capsys.readouterr().out
        assert main(["check", "run.yaml"]) == 0, capsys.readouterr()
        assert main(["train", "run.yaml"]) == 0
        assert main(["list", "family", "--imports", "my_model"]) == 0
        assert "my_model.my_model" in capsys.readouterr().out


def test_a_module_that_cannot_be_imported_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"imports: cannot import 'nowhere_at_all': ModuleNotFoundError"):
        parse(plan(tmp_path, imports=["nowhere_at_all"]), Config)
