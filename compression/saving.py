"""Saving a transformed model as an ordinary folder and one small JSON file, and loading it in one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.compression.pruning.weight_views import STORED, applied, note, share
from mmrl.config.registry import find
from mmrl.runtime.modules import DTYPES

NAME = "transforms.json"


def save_transformed(model: nn.Module, folder: str | Path, processor: Any = None) -> None:
    """Write a folder that transformers loads as the whole model, and beside it what was done to the model.

    Heads, ffn_units and layers are written down one by one, so no plan is needed to load it. Weights of few
    bits are written as the numbers they stand for, which give the same codes when they are quantized again.
    """
    folder = Path(folder)
    plain = share(model, {id(m): _plain(m) for m in model.modules() if type(m).__name__ in LOW_BIT})
    plain.save_pretrained(str(folder))
    if processor is not None:
        processor.save_pretrained(str(folder))
    dtypes = {p.dtype for p in plain.parameters() if p.is_floating_point()}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    said = {
        "dtype": str(widest).removeprefix("torch."),
        "transforms": [_exact(one) for one in applied(model)],
    }
    (folder / NAME).write_text(json.dumps(said) + "\n")


def load_transformed(folder: str | Path, *, attn_implementation: str = "sdpa") -> nn.Module:
    """Load what `save_transformed` wrote: the same logits, bit for bit."""
    from transformers import AutoModelForImageTextToText

    folder = Path(folder)
    try:
        said = json.loads((folder / NAME).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"cannot read '{folder / NAME}', which `save_transformed` writes: {error}"
        ) from error
    # Narrower weights come back exactly: they are widened here, and `layer_cast` casts them again.
    model = AutoModelForImageTextToText.from_pretrained(
        str(folder),
        dtype=DTYPES[said["dtype"]],
        attn_implementation=attn_implementation,
        use_safetensors=True,
    ).eval()
    for one in said["transforms"]:
        options = {name: _tuples(value) for name, value in one.items() if name != "name"}
        if one["name"] in STORED:
            model = note(share(model), model, one["name"], options)
        else:
            model = find("transform", f"compression.{one['name']}").target(model, **options)
    return model


def _exact(one: dict[str, Any]) -> dict[str, Any]:
    """Say how to make a transform again exactly: scales that were quantized themselves are taken as they
    are."""
    return {**one, "double": False} if one.get("double") else one


LOW_BIT = ("Linear4bit", "Linear8bitLt")


def _plain(linear: nn.Module) -> nn.Module:
    """Write a layer of few bits as the weights it stands for; quantized again they give the same codes."""
    out = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    ones = torch.eye(linear.in_features, device=linear.weight.device)
    bias = 0.0 if linear.bias is None else linear.bias.detach()
    with torch.no_grad():
        out.weight = nn.Parameter((linear(ones) - bias).T.contiguous())
    if linear.bias is not None:
        out.bias = nn.Parameter(linear.bias.detach())
    return out


def _tuples(value: Any) -> Any:
    """Give lists of JSON the form that options have."""
    return tuple(_tuples(one) for one in value) if type(value) is list else value
