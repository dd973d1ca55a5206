"""Saving a transformed model as an ordinary checkpoint and a JSON file of its transforms, and loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.compression.pruning.prune import applied_transforms, record_transform, share_weights
from mmrl.config.registry import find
from mmrl.runtime.modules import DTYPES

NAME = "transforms.json"
LOW_BIT = ("Linear4bit", "Linear8bitLt")
# Transforms whose result is in the saved checkpoint itself, so that loading does not apply them again.
STORED = ("structured_pruning",)


def save_transformed(model: nn.Module, folder: str | Path, processor: Any = None) -> None:
    """Write the untransformed weights as a transformers checkpoint, and the transforms as JSON.

    Heads, FFN units and layers are listed one by one, so no plan is needed to load it. Low-bit weights are
    written dequantised, which gives the same codes when they are quantised again.
    """
    folder = Path(folder)
    swap = {id(m): _dequantised(m) for m in model.modules() if type(m).__name__ in LOW_BIT}
    plain = share_weights(model, swap)
    plain.save_pretrained(str(folder))
    if processor is not None:
        processor.save_pretrained(str(folder))
    dtypes = {p.dtype for p in plain.parameters() if p.is_floating_point()}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)  # of bfloat16 beside float32: float32
    record = {
        "dtype": str(widest).removeprefix("torch."),
        # Scales that were quantised themselves (`double`) are loaded as they are.
        "transforms": [{**x, "double": False} if x.get("double") else x for x in applied_transforms(model)],
    }
    (folder / NAME).write_text(json.dumps(record) + "\n")


def load_transformed(folder: str | Path, *, attn_implementation: str = "sdpa") -> nn.Module:
    """Load a folder of `save_transformed`; logits are the same bit for bit."""
    from transformers import AutoModelForImageTextToText

    path = Path(folder) / NAME
    try:
        record = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read '{path}', which `save_transformed` writes: {error}") from error
    # Loading in the widest dtype is exact for narrower weights, and `layer_cast` casts them again.
    model = AutoModelForImageTextToText.from_pretrained(
        str(folder),
        dtype=DTYPES[record["dtype"]],
        attn_implementation=attn_implementation,
        use_safetensors=True,
        trust_remote_code=False,
    ).eval()
    for transform in record["transforms"]:
        options = {key: _tuples(value) for key, value in transform.items()}
        name = options.pop("name")
        if name in STORED:
            model = record_transform(share_weights(model), model, name, options)
        else:
            model = find("transform", f"compression.{name}").target(model, **options)
    return model


@torch.no_grad()
def _dequantised(linear: nn.Module) -> nn.Module:
    """Dequantise a low-bit linear layer by its products with unit vectors."""
    out = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    ones = torch.eye(linear.in_features, device=linear.weight.device)  # one unit vector a row
    bias = 0.0 if linear.bias is None else linear.bias.detach()
    out.weight = nn.Parameter((linear(ones) - bias).T.contiguous())
    if linear.bias is not None:
        out.bias = nn.Parameter(bias)
    return out


def _tuples(value: Any) -> Any:
    """Turn JSON lists into the tuples that options are."""
    return tuple(map(_tuples, value)) if type(value) is list else value
