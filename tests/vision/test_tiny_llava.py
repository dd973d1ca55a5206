"""The small LLaVA is an ordinary checkpoint that answers about images and learns."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.vision.builders.tiny_models import TinyLlava
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny

SMALL = {
    "width": 32, "layers": 1, "heads": 2, "vision_width": 16, "vision_layers": 1, "side": 24, "patch": 8,
    "vocab_size": 300,
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, TinyLlava(stream=Stream(0), **SMALL).build(folder)


def test_tiny_llava_is_a_checkpoint_of_the_real_class(built):
    from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration

    folder, counts = built
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(model) is LlavaForConditionalGeneration
    assert sum(p.numel() for p in model.parameters()) == counts["parameters"]
    assert model.get_input_embeddings().weight.shape == (counts["vocabulary"], 32)


def test_an_image_is_as_many_tokens_as_patches(built):
    policy = Tokens(model=str(built[0]), dtype="float32")
    ids = policy.prompt_encoder.encode(tiny.ask("p", tiny.picture(), "what")).ids
    # 24 pixels in patches of 8: three by three.
    assert int((ids == policy.core.config.image_token_id).sum()) == 9


def test_tiny_llava_answers_and_every_part_learns_but_the_norm_behind_what_is_read(built):
    policy = Tokens(model=str(built[0]), dtype="float32", freeze_vision_tower=False)
    asked = tiny.ask("p", tiny.picture(), "what")
    rows = [*mixed.generate(policy, [asked]), policy.encode(asked, Outcome(text="a fox"))]
    policy(policy.collate(tuple(rows))).logp.sum().backward()
    idle = {name for name, p in policy.module.named_parameters() if p.grad is None or not p.grad.any()}
    assert {name.rpartition("vision_tower.")[2] for name in idle} <= {
        "post_layernorm.weight",
        "post_layernorm.bias",
    }


def test_tiny_llava_follows_its_seed_and_leaves_the_global_one_alone(tmp_path):
    from safetensors.torch import load_file

    before = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        TinyLlava(stream=Stream(seed), **SMALL).build(tmp_path / name)
    assert torch.equal(torch.get_rng_state(), before)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not all(torch.equal(a[key], c[key]) for key in a)


def test_patches_must_fit_into_a_image():
    with pytest.raises(ValueError, match="48 pixels cannot be cut into patches of 7"):
        TinyLlava(stream=Stream(0), side=48, patch=7)
