"""Layers that see the last tokens only see the same ones however rows are laid out."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from mmrl.compression.transforms.visual_computation import drop_visual_layers
from mmrl.vision.decoding.packed import layer_windows
from mmrl.vision.decoding.token_steps import shares_prompts
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed

TIGHT = {"rtol": 0, "atol": 1e-10}


def sliding(checkpoint, kind: str, window: int, folder):
    """Copy a tiny checkpoint and give layers a window: Qwen2.5-VL's last layer or both, or LLaVA's Mistral,
    whose weights are named as Llama's are."""
    family = "llava" if kind == "mistral" else "qwen2_5_vl"
    shutil.copytree(checkpoint(family), folder)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text["sliding_window"] = window
    if kind == "mistral":
        text |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    else:
        first = {"last": 1, "both": 0}[kind]
        text |= {"use_sliding_window": True, "max_window_layers": first}
        text["layer_types"] = ["full_attention"] * first + ["sliding_attention"] * (2 - first)
    (folder / "config.json").write_text(json.dumps(config))
    return family, folder


@pytest.mark.parametrize(
    ("window", "kind"),
    [
        *[(4, "both"), (20, "last"), (20, "mistral")],
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((20, "both"), (4, "last"), (4, "mistral"))),
    ],
)
def test_packed_rows_see_what_cached_rows_and_rows_alone_see(checkpoint, tmp_path, kind, window):
    family, folder = sliding(checkpoint, kind, window, tmp_path / "model")
    cached = Tokens(model=str(folder), dtype="float64")
    packed = Tokens(model=str(folder), dtype="float64", gradient_checkpointing=True)
    rows = mixed.answered(cached, family)
    results = []
    for policy in (cached, packed):
        mixed.loss(policy, policy.collate(rows)).backward()
        gradients = mixed.gradients(policy)
        with torch.no_grad():
            results.append((policy(policy.collate(rows)).logp, gradients))
    (logp, gradient), (other_logp, other_gradient) = results
    torch.testing.assert_close(other_logp, logp, **TIGHT)
    for name, value in gradient.items():
        torch.testing.assert_close(other_gradient[name], value, rtol=1e-9, atol=1e-9, msg=name)
    far = Tokens(model=str(checkpoint(family)), dtype="float64")
    for i, row in enumerate(rows):
        logits = mixed.plainly(cached, row).index_fill(
            -1, torch.tensor(cached.prompt_encoder.placeholders), -1e30
        )
        wanted = logits.log_softmax(-1).gather(-1, row.steps.ids[:, None])[:, 0]
        torch.testing.assert_close(other_logp[i, : row.length], wanted, **TIGHT)
        if len(row.steps.prompt.ids) > 2 * window:
            assert (mixed.plainly(far, row) - mixed.plainly(cached, row)).abs().max() > 1e-3


def text(**fields):
    found = SimpleNamespace(model_type="some_text", to_dict=lambda: fields, **fields)
    return SimpleNamespace(get_text_config=lambda decoder: found)


def test_windows_are_found_by_the_types_of_layers_or_by_the_window_alone():
    assert layer_windows(text()) == layer_windows(text(sliding_window=None)) == {"full_attention": None}
    assert layer_windows(text(sliding_window=8)) == {"sliding_attention": 8}
    both = ["full_attention", "sliding_attention", "full_attention"]
    assert layer_windows(text(sliding_window=8, layer_types=both)) == {
        "full_attention": None,
        "sliding_attention": 8,
    }


@pytest.mark.parametrize(
    ("kind", "attention", "masked", "packed"),
    [
        ("full_attention", "sdpa", True, True),
        ("sliding_attention", "eager", True, True),
        ("full_attention", "mmrl_sdpa", True, True),
        ("linear_attention", "sdpa", True, False),
        ("chunked_attention", "sdpa", True, True),  # inputs end within the first chunk
        ("full_attention", "flash_attention_2", True, False),
        ("full_attention", "sdpa", False, False),  # attention that is not called through transformers
    ],
)
def test_only_layers_that_attend_by_a_mask_of_any_form_are_packed(kind, attention, masked, packed):
    config = text(layer_types=[kind, "full_attention"], _attn_implementation=attention)
    config.model_type = "my_vlm"
    core = SimpleNamespace(config=config, _supports_attention_backend=masked)
    assert shares_prompts(core, None, packed=False) and shares_prompts(core, None, packed=True) == packed


def test_a_window_of_all_layers_is_not_pruned(checkpoint, tmp_path):
    _, folder = sliding(checkpoint, "mistral", 8, tmp_path / "model")
    policy = Tokens(model=str(folder), dtype="float64")
    with pytest.raises(ValueError, match="layers of type .'sliding_attention'. cannot be pruned"):
        drop_visual_layers(policy.model, after=1)
