"""Two vision-language models are merged to one that transformers loads."""

from __future__ import annotations

import torch

from mmrl.builders.merge_weights import MergeWeights
from mmrl.vision.models.loading import load_model, load_processor


def test_a_merged_model_is_loaded_like_its_parts(checkpoint, tmp_path):
    first = str(checkpoint("qwen2_5_vl"))
    other = load_model(first, dtype="float32", attn_implementation="sdpa")
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(1.0)
    other.save_pretrained(tmp_path / "other")
    MergeWeights(models=(first, str(tmp_path / "other")), weights=(0.75, 0.25)).build(tmp_path / "merged")
    options = {"dtype": "float32", "attn_implementation": "sdpa"}
    merged, own = load_model(str(tmp_path / "merged"), **options), load_model(first, **options)
    for found, weight in zip(merged.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found, weight + 0.25)
    assert load_processor(str(tmp_path / "merged")).tokenizer.get_vocab()
