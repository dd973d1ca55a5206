"""What equal texts and images have in common is encoded once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mmrl.diffusion.model_family import Request
from tests.diffusion import tiny_hunyuan_video15, tiny_ltx2, tiny_wan  # noqa: F401  registers their makers
from tests.diffusion.families.common import family_for, pictures

# The tokens of each model, and whether its text encoder reads images.
MODELS = {
    "flux_kontext": (60, False),
    "qwen_image_edit": (400, True),
    "qwen_image_edit_plus": (400, True),
    "hunyuan_video15_image": (100, False),
    "ltx2_image": (64, False),
    "wan_5b_i2v": (64, False),
}


KONTEXT = "diffusers.pipelines.flux.pipeline_flux_kontext"


@pytest.mark.parametrize("name", MODELS)
def test_equal_texts_are_encoded_once(pipeline, monkeypatch, name):
    for area in ("qwen_image_edit.AREA", "qwen_image_edit_plus.AREA", "qwen_image_edit_plus.READ_AREA"):
        monkeypatch.setattr(f"mmrl.diffusion.model_families.{area}", 64 * 64)
    monkeypatch.setattr(f"{KONTEXT}.PREFERRED_KONTEXT_RESOLUTIONS", [(64, 64)])
    pipe, (limit, sees) = pipeline(name), MODELS[name]
    family, calls, encode = family_for(pipe), Counter(), pipe.encode_prompt
    counted = lambda text, **given: calls.update([text[0]]) or encode(text, **given)
    monkeypatch.setattr(pipe, "encode_prompt", counted)
    (one, other), size = (pictures(((64, 64),), seed=seed) for seed in range(2)), (5, 32, 32)
    asked = (one, size), (other, size), (one, (5, 32, 64))
    requests = [Request("a cat", images, size) for images, size in asked]
    with torch.no_grad():
        first, second, third = family.encode(pipe, requests, limit)
        family.encode(pipe, [Request("a dog", one, size)], limit)
        alone = family_for(pipe).encode(pipe, requests[1:2], limit)[0]
    assert calls == {"a cat": 3 if sees else 2, "a dog": 1}, "the last family has a cache of its own"
    states = [encoded["encoder_hidden_states"] for encoded in (first, second, third)]
    assert torch.equal(states[0], states[2]) and torch.equal(states[0], states[1]) != sees
    assert all(torch.equal(second[key], alone[key]) for key in alone)
    assert any(not torch.equal(first[key], second[key]) for key in first if key != "encoder_hidden_states")
