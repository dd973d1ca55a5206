"""Rows ask for the size of their image: read, checked before weights are loaded, generated and estimated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from PIL import Image

from mmrl.build import build, check_data, load_engine
from mmrl.cli import main
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Config, parse
from mmrl.core.types import Message, Part, Prompt, Size
from mmrl.data.dataset_io import RowError
from mmrl.data.row_sizes import row_size
from mmrl.diagnostics.inputs import check_inputs
from mmrl.diagnostics.memory_estimates import estimate_memory
from mmrl.diffusion.datasets.edits import edits, first_frames
from mmrl.diffusion.datasets.prompts import prompts
from mmrl.reporting import html
from mmrl.runtime.content_hash import of_prompts
from mmrl.training.loop import train
from tests.diffusion.families.common import family_for
from tests.diffusion.test_flow_runs import plan, weights

ROWS = (
    {"prompt": "a tower", "height": 48, "width": 32},
    {"prompt": "a road", "height": "32", "width": 64.0},
    {"prompt": "a ball"},
    {"prompt": "a cube", "height": None, "width": ""},
)


@pytest.fixture
def rows(tmp_path):
    """Write rows beside an image of 200 x 100 pixels, and give their path."""
    Image.new("RGB", (100, 200), (10, 20, 30)).save(tmp_path / "a.png")  # width, height

    def write(*rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "rows.jsonl")

    return write


# ---- rows


def test_prompts_ask_for_sizes(rows):
    path = rows(*ROWS, {"prompt": "a film", "num_frames": 5})
    found = [prompt.size for prompt in prompts(path=path)]
    assert found == [Size(0, 48, 32), Size(0, 32, 64), None, None, Size(5)]
    assert prompts(path=path)[0].columns["height"] == 48, "rewards get the columns"
    assert [prompt.size for prompt in prompts(path=path, size="engine")] == [None] * 5


def test_prompts_without_images_cannot_ask_for_the_size_of_one(rows):
    path = rows({"prompt": "a cat", "size": "source"})
    with pytest.raises(ValueError, match="asks for the `size` of its source image, and rows here have none"):
        prompts(path=path)
    assert prompts(path=path, size="engine")[0].size is None
    assert prompts(path=rows({"prompt": "a cat", "size": "large"}))[0].columns["size"] == "large"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"height": 48}, "one of `height` and `width`; give both, or neither"),
        ({"height": 0, "width": 32}, "wanted a positive whole number as `height`, got 0"),
        ({"height": 32, "width": 32.5}, "wanted a positive whole number as `width`, got 32.5"),
        ({"height": 32, "width": "wide"}, "wanted a finite number as `width`, got 'wide'"),
        ({"num_frames": True}, "wanted a finite number as `num_frames`, got True"),
        ({"size": "large"}, "wanted 'source' as `size`, got 'large'; other sizes are `height` and `width`"),
        ({"size": "source", "height": 8, "width": 8}, "a `size` besides `height` and `width`; keep one"),
    ],
)
def test_sizes_that_say_nothing_are_refused(columns, message):
    with pytest.raises(RowError, match=message):
        row_size(columns, source=True)


def test_edits_ask_for_the_size_of_their_source_or_their_own(rows):
    path = rows(
        {"image": "a.png", "prompt": "red", "size": "source"},
        {"image": "a.png", "prompt": "red", "height": 32, "width": 48},
        {"image": "a.png", "prompt": "red"},
    )
    of = lambda read, size: [prompt.size for prompt in read(path=path, size=size)]
    assert of(edits, "row") == [Size(source=True), Size(0, 32, 48), None]
    assert of(edits, "engine") == [None] * 3, "columns of public sets are about the image"
    assert of(first_frames, "source") == [Size(source=True)] * 3


@pytest.mark.parametrize(
    ("name", "wanted"),
    # 64 x 64 pixels in the aspect ratio 2 : 1 are 90.5 x 45.3, rounded to multiples of 16 and of 32.
    [("flux2_klein", (96, 48)), ("qwen_image_edit", (96, 32)), ("wan", (96, 48))],
)
def test_the_size_of_a_source_is_the_nearest_that_the_model_makes(pipeline, name, wanted):
    family, pipe = family_for(pipeline(name)), pipeline(name)
    assert family.source_size(pipe, 100, 50, 64 * 64) == wanted
    assert family.source_size(pipe, 50, 100, 64 * 64) == wanted[::-1]
    family.latent_shape(pipe, *wanted, 1)
    if name == "qwen_image_edit":  # the pipeline's own default
        width, height, _ = calculate_dimensions(1024 * 1024, 640 / 427)
        assert family.source_size(pipe, 427, 640, 1024 * 1024) == (height, width) == (832, 1248)


def test_sizes_are_in_the_hash_of_prompts_and_change_no_other_hash():
    prompt = Prompt("x", (Message("user", (Part("a"),)),), "b", columns={"c": 1})
    hashes = [
        of_prompts([replace(prompt, size=size)])["prompts"] for size in (None, Size(1, 8, 8), Size(1, 8, 4))
    ]
    assert len({*hashes}) == 3
    assert hashes[0] == "1 prompts, f88c2113219618b6", "as without sizes, so that runs go on"


# ---- before weights are loaded


@pytest.fixture
def bare(checkpoint, tmp_path):
    """Copy a pipeline without its weights."""

    def copy(name):
        folder = shutil.copytree(checkpoint(name), tmp_path / name)
        for file in folder.rglob("*.safetensors"):
            file.unlink()
        return folder

    return copy


def config_of(model, folder, path, data=None, **engine):
    options = {"0": {"height": 32, "width": 32, **engine}}
    given = {"name": "diffusion.prompts", "path": path, **(data or {})}
    policy = {"max_sequence_length": 256}
    changes = {"data": given, "rollout": {"engine": options}, "policy": policy}
    return plan(model, folder / "run", "diffusion.transition", **changes)


def test_sizes_are_checked_without_weights(bare, rows, tmp_path, capsys):
    model = bare("sd3")
    path = rows(*ROWS, {"prompt": "odd", "height": 36, "width": 32})
    config = parse(config_of(model, tmp_path, path), Config)
    for check in (check_data, lambda config: build(config, quiet=True)):
        with pytest.raises(ConfigError, match=r"rows.jsonl:5: .*multiple of 8 pixels .*, not 36 x 32"):
            check(config)
    dropping = parse(config_of(model, tmp_path, path, {"bad_rows": "drop"}), Config)
    assert check_data(dropping) == []
    assert check_data(parse(config_of(model, tmp_path, path, {"size": "engine"}), Config)) == []


def test_a_size_of_the_engine_is_checked_without_weights(bare, checkpoint, rows, tmp_path, capsys):
    message = "`height`, `width` or `num_frames` of `diffusion.denoise`: an image of this model is a multiple"
    given = config_of(bare("sd3"), tmp_path, rows(*ROWS), height=36)
    with pytest.raises(ConfigError, match=message):
        build(parse(given, Config), quiet=True)
    whole = config_of(checkpoint("sd3"), tmp_path, rows(*ROWS), height=36)
    with pytest.raises(ConfigError, match=message):
        check_inputs(parse(whole, Config))
    whole["evaluation"] = {"data": whole["data"], "engine": [{**whole["rollout"]["engine"][0], "width": 36}]}
    whole["rollout"]["engine"][0]["height"] = 32
    with pytest.raises(ConfigError, match="not 36 x 36"):
        check_inputs(parse(whole, Config))
    code = main(["generate", str(tmp_path / "sd3"), "rollout.engine.0.height=36", "--prompt", "a"])
    assert code == 2 and message in capsys.readouterr().err


# ---- with weights


QUICK = (
    "policy.dtype=float32",
    *(f"rollout.engine.0.{o}" for o in ("num_inference_steps=2", "height=32", "width=32")),
)


def test_rows_are_generated_in_their_size(checkpoint, rows, tmp_path, capsys):
    given = ["generate", str(checkpoint("sd3")), *QUICK, "--input"]
    assert main([*given, rows(*ROWS), "--output", str(tmp_path / "images")]) == 0
    made = [Image.open(path).size for path in sorted((tmp_path / "images").glob("*.png"))]
    assert made == [(32, 48), (64, 32), (32, 32), (32, 32)], "width, height"
    listed = [json.loads(line) for line in (tmp_path / "images" / "metadata.jsonl").open()]
    assert [row["prompt"] for row in listed] == [row["prompt"] for row in ROWS]
    bad = rows({"prompt": "a", "height": 36, "width": 32}, {"prompt": "b", "height": 36})
    assert main([*given, bad, "--output", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "rows.jsonl:1: cannot read the prompt 'p0'" in error and "rows.jsonl:2: the row has one" in error
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("no_passes")
def test_the_largest_size_is_estimated(checkpoint, rows, tmp_path):
    many = [{"prompt": f"p{i}", "height": 32, "width": 32} for i in range(20)]
    large = {"prompt": "large", "height": 64, "width": 48}
    of = lambda *given: estimate_memory(parse(config_of(checkpoint("sd3"), tmp_path, rows(*given)), Config))
    # 2 prompts of 3 images, the start and 3 steps, latents of 4 x 8 x 6 in float32
    assert of(*many, large, *many)["paths"] == 6 * 4 * (4 * 8 * 6) * 4
    assert of(*many)["paths"] == of({"prompt": "small"})["paths"] == 6 * 4 * (4 * 4 * 4) * 4


@pytest.mark.slow
def test_a_run_on_rows_of_several_sizes_goes_on_bit_for_bit(checkpoint, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    near = {
        "references": {"ref": "frozen"},
        "objective": {"penalty": [{"name": "gaussian_kl", "against": "ref"}]},
        "report": {"visualizations": ["diffusion.image_grid"]},
        "rollout": {"num_prompts": 3, "num_generations": 2},
        "save_steps": 1,
    }

    def run_of(folder, steps):
        given = config_of(checkpoint("sd3"), tmp_path / folder, rows(*ROWS))
        given["policy"]["max_sequence_length"] = 1
        given |= {"evaluation": {"data": given["data"], "num_generations": 1}, "max_steps": steps}
        given["rollout"] |= near["rollout"]
        given["objective"] |= near["objective"]
        given |= {key: near[key] for key in ("references", "save_steps")}
        given["report"] |= near["report"]
        run = build(parse(given, Config), quiet=True)
        before = weights(run)
        train(run)
        return run, before

    whole, before = run_of("whole", 2)
    after = weights(whole)
    assert sum(not torch.equal(before[name], after[name]) for name in before) > 0.8 * len(before)
    assert (tmp_path / "whole" / "run" / "report.html").read_text().count("<img") >= 4
    run_of("parts", 1)
    parts, _ = run_of("parts", 2)
    assert all(torch.equal(value, after[name]) for name, value in weights(parts).items())


def test_a_model_answers_edits_in_the_size_of_the_source(checkpoint, rows, tmp_path):
    options = {"num_inference_steps": 1, "height": 64, "width": 64, "guidance_scale": 1.0}
    session = load_engine(
        str(checkpoint("flux2_klein")),
        ["policy.dtype=float32", "policy.max_sequence_length=256"],
        **options,
    )
    path = rows({"image": "a.png", "prompt": "red"})
    (row,) = session.rollout([replace(prompt, uid="p") for prompt in edits(path=path, size="source")])
    assert row.outcomes[0].image.shape == (3, 96, 48)
