"""Text2Layer: layered images that are read, compressed, made, composed and rewarded."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from mmrl.build import build
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.papers.text2layer import (
    TinyLayeredFlowModel,
    WithLayers,
    border_contrast,
    compose,
    layered_images,
    layered_loss,
    mask_iou,
)
from mmrl.training.collect import collect
from tests.diffusion.flows import flow, make
from tests.support.configs import CONFIGS

COLORS = {"red": (220, 30, 30), "blue": (30, 30, 220), "green": (30, 180, 30)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Write three squares of other colours and places on a grey background, as layers."""
    folder = tmp_path_factory.mktemp("rows")
    lines = []
    for number, (name, color) in enumerate(COLORS.items()):
        Image.new("RGB", (16, 16), color).save(folder / f"{name}.png")
        Image.new("RGB", (16, 16), (200, 200, 200)).save(folder / "grey.png")
        mask = Image.new("L", (16, 16))
        mask.paste(255, (2 + 3 * number, 4, 8 + 3 * number, 10))
        mask.save(folder / f"mask{number}.png")
        layers = {"foreground": f"{name}.png", "background": "grey.png", "mask": f"mask{number}.png"}
        lines.append(json.dumps({**layers, "caption": f"a {name} square"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


@pytest.fixture(scope="module")
def model(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    options = {"width": 32, "layers": 1, "heads": 2, "text_width": 16}
    options |= {"autoencoder_steps": 60, "autoencoder_rate": 1e-2}
    TinyLayeredFlowModel(stream=Stream(0), texts=str(rows), side=16, **options).build(folder)
    return folder


def test_a_composite_is_the_mix_of_its_layers():
    layers = torch.tensor([200.0] * 3 + [100.0] * 3 + [51.0]).view(7, 1, 1).to(torch.uint8)
    assert compose(layers).flatten().tolist() == [120] * 3  # 0.2 * 200 + 0.8 * 100


def test_the_iou_of_masks_and_the_object_of_a_plain_image():
    one, other = torch.tensor([1, 1, 0, 0]).bool(), torch.tensor([0, 1, 1, 0]).bool()
    assert mask_iou(one, other) == 1 / 3
    assert mask_iou(one, ~one) == 0.0 and mask_iou(one & ~one, one & ~one) == 1.0
    image = torch.full((3, 6, 6), 200, dtype=torch.uint8)
    assert not border_contrast(image).any()
    image[:, 2:4, 1:3] = torch.tensor([220, 30, 30], dtype=torch.uint8)[:, None, None]
    assert border_contrast(image).nonzero().tolist() == [[2, 1], [2, 2], [3, 1], [3, 2]]


def test_the_foreground_counts_inside_the_mask_alone():
    wanted = torch.cat([torch.zeros(1, 6, 1, 2), torch.tensor([1.0, -1.0]).view(1, 1, 1, 2)], 1)
    outside, inside = wanted.clone(), wanted.clone()
    outside[:, :3, :, 1] += 1
    inside[:, :3, :, 0] += 1
    assert layered_loss(outside, wanted) == 0.0
    assert layered_loss(inside, wanted) == 1.0  # a half of the pixels in the layer and in the composite


def test_layers_are_read_as_one_image_and_bad_rows_are_named(rows, tmp_path):
    prompts = layered_images(path=str(rows))
    assert [prompt.text for prompt in prompts] == [f"a {name} square" for name in COLORS]
    image = prompts[0].answers[0].image
    assert image.shape == (7, 16, 16) and image[:6, 0, 0].tolist() == [220, 30, 30, 200, 200, 200]
    assert image[6].count_nonzero() == 36 and mask_iou(image[6] > 127, border_contrast(compose(image))) == 1.0
    Image.new("RGB", (8, 8)).save(tmp_path / "small.png")
    Image.new("RGB", (16, 16)).save(tmp_path / "large.png")
    row = {"foreground": "large.png", "background": "large.png", "mask": "small.png", "caption": "a"}
    for changed, message in (({}, "must have one size"), ({"mask": None}, "wanted an image in 'mask'")):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row | changed))
        with pytest.raises(ConfigError, match=message):
            list(layered_images(path=str(tmp_path / "rows.jsonl")))


def test_the_small_autoencoder_keeps_the_layers(model, rows):
    policy = flow(model)
    assert policy.pipe.vae.config.in_channels == 7
    offline = WithLayers(make("engine", "offline", policy))
    *layers, composite = offline.rollout(list(layered_images(path=str(rows))))[0].outcomes
    assert [layer.tags["layer"] for layer in layers] == ["foreground", "background", "mask"]
    assert composite.tags["layer"] == "composite" and composite.recorded["mask_iou"] == 1.0
    assert composite.recorded["mask_share"] == 36 / 256 and composite.image.shape == (3, 16, 16)
    (prompt, *_) = layered_images(path=str(rows))
    made = policy.decode(policy.encode(prompt, prompt.answers[0]).steps.path)[0]
    assert mask_iou(made[6] > 127, prompt.answers[0].image[6] > 127) > 0.6


def test_a_step_of_flow_grpo_on_layers(model, rows, tmp_path):
    raw = read(CONFIGS / "methods/flow/text2layer.yaml")
    raw = merge(raw, {
        "policy": {"name": "diffusion.flow", "model": str(model), "dtype": "float32",
                   "max_sequence_length": 1},
        "data": {"name": "diffusion.layered_images", "path": str(rows)},
        "rewards": [{"name": "precomputed", "key": "mask_iou", "label": "mask_iou"}],
        "rollout": {"num_prompts": 2, "num_generations": 2},
        "report": {"trackers": []}, "max_steps": 1, "output_dir": str(tmp_path),
    })  # fmt: skip
    raw["rollout"]["engine"][0] |= {
        "height": 16,
        "width": 16,
        "num_inference_steps": 3,
        "guidance_scale": 1.0,
    }
    run = build(parse(raw, Config), quiet=True)
    run.tick(0)
    table = collect(run).table
    assert table.ends.tolist() == [[2] * 4] * 4  # two stochastic steps before each of the four layers
    assert table.valid.any(1).tolist() == [[False, False, False, True]] * 4


def test_other_images_are_refused(model):
    class Plain:
        policy, notes = None, frozenset()

        def rollout(self, prompts):
            from types import SimpleNamespace

            return [SimpleNamespace(outcomes=(Outcome(image=torch.zeros(3, 2, 2, dtype=torch.uint8)),))]

    with pytest.raises(ConfigError, match="splits images of 7 channels"):
        WithLayers(Plain()).rollout([])
    with pytest.raises(ConfigError, match="must read package.module:function"):
        WithLayers(Plain(), segment="nowhere:mask")
