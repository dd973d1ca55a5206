"""Export of models: merged adapters, and transforms and caches as JSON files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from mmrl.config.loading import ConfigError, expanded
from mmrl.config.plain import as_mapping
from mmrl.config.registry import find
from mmrl.config.schema import as_plain, load
from mmrl.inference.session import Session
from mmrl.inference.sources import CACHE, STORED, TRANSFORMS, WEIGHTS, ModelSource
from mmrl.reporting.html import find_run
from mmrl.reporting.model_card import render_card, write_card
from mmrl.runtime.folders import making
from mmrl.runtime.modules import DTYPES, RECORD, applied_transforms, twin
from mmrl.runtime.weights import load_whole

LOW_BIT = ("Linear4bit", "Linear8bitLt")
# `model_type` in the `config.json` of a folder with transforms. transformers refuses the unknown type and
# shows it in the error message, so the type explains how to load the folder.
PRUNED = "mmrl_pruned: load this folder with mmrl.load_pruned(folder) or mmrl.load_engine(folder)"


@runtime_checkable
class Exportable(Protocol):
    """Interface of a policy that can be exported."""

    def merge(self) -> None:
        """Merge the adapter into the weights."""

    def save(self, folder: Path) -> None:
        """Write a folder that transformers or diffusers can load."""


def export(session: Session, source: ModelSource, folder: Path, *, overwrite: bool = False) -> list[str]:
    """Export the model of a session to a folder; `load_engine(folder)` then gives the same answers.

    The adapter is merged into the weights. Without transforms, or with structured pruning only, the result is
    a folder of transformers or diffusers. With other transforms, load it with `mmrl.load_pruned` or
    `load_engine`; `from_pretrained` refuses such a folder. A cache is written as `kv_cache.json`.

    Returns: Descriptions of the merged adapter, the transforms and the caches.

    Raises: ConfigError: If the folder is not empty, unless `overwrite` is set and it is an earlier export.
    """
    policy, options, written = session.policy, source.config.policy.options, []
    if not isinstance(policy, Exportable):
        raise ConfigError(f"the policy '{source.config.policy.name}' cannot be exported: it has no `merge`")
    policy.merge()
    if options.get("lora_rank") or options.get("adapter"):
        written.append("adapter merged into the weights")
    with making(folder, "export", overwrite=overwrite) as unfinished:
        if any(piece.get("transform") for piece in (options, *(piece.options for piece in source.engines))):
            model = session.engine.rollout_policy.model
            save_transformed(model, unfinished, policy.prompt_encoder.processor)
            written += [f"transform {transform['name']}" for transform in applied_transforms(model)]
        else:
            policy.save(unfinished)
        for piece in source.engines:
            if cache := piece.options.get("cache"):
                written.append(f"cache {save_cache(as_plain(cache), unfinished)}")
        write_export_card(source, written, unfinished, folder.resolve().name)
    return written


def write_export_card(source: ModelSource, written: Sequence[str], folder: Path, name: str) -> None:
    """Write the model card; the card of a trained model includes its method and its last evaluation."""
    notes = [f"Exported: {', '.join(written)}."] if written else []
    if (folder / TRANSFORMS).is_file():
        notes.append(
            "**`from_pretrained` does not load this folder**: it would leave the transforms out. Load it "
            "with `mmrl.load_engine(folder)`, or as a module of torch with `mmrl.load_pruned(folder)`."
        )
    elif (folder / CACHE).is_file():
        notes.append(f"`mmrl.load_engine(folder)` uses the cache of `{CACHE}`; other libraries do not.")
    if source.run is None:
        render_card(folder, name, source.config.policy, source.engines, notes)
        return
    run, step = find_run(source.run), source.step
    held_out: dict[str, float] = {}
    for record in run.records[:step]:
        held_out |= {name: value for name, value in record.items() if name.startswith("eval_")}
    if step >= run.done:  # the final evaluation is of this checkpoint
        held_out |= {f"eval_{metric}": value for metric, value in run.metrics.items()}
        for metric, (low, high) in run.intervals.items():
            held_out |= {f"eval_{metric}/low": low, f"eval_{metric}/high": high}
    write_card(load(source.run / "config.yaml"), step, held_out, folder, notes=notes)


def save_cache(cache: str | Mapping[str, Any], folder: Path) -> str:
    """Write the options of a cache as JSON, and copy its codebook; return the name of the cache."""
    piece = as_mapping(cache)
    if codebook := piece.get("codebook"):
        piece["codebook"] = Path(codebook).name
        shutil.copy(codebook, folder / piece["codebook"])
    (folder / CACHE).write_text(json.dumps(piece, indent=2) + "\n")
    return piece["name"]


def save_transformed(model: nn.Module, folder: str | Path, processor: Any = None) -> None:
    """Write a model with its transforms to a folder.

    If all transforms only change weights (`structured_pruning`), the result is an ordinary folder of
    transformers. Otherwise, the transforms are written as JSON, and the untransformed model to the subfolder
    `weights`; transformers cannot load the folder. The JSON lists all pruned heads, FFN units and layers.
    Low-bit weights are dequantised first; loading quantises them again to the same codes.
    """
    folder, done = Path(folder), applied_transforms(model)
    ordinary = all(transform["name"] in STORED for transform in done)
    home = folder if ordinary else folder / WEIGHTS
    plain = twin(model)
    for name, module in model.named_modules():
        if type(module).__name__ in LOW_BIT:
            plain.set_submodule(name, _dequantised(module))
    plain.save_pretrained(str(home))
    if processor is not None:
        processor.save_pretrained(str(home))
    if ordinary:
        return
    dtypes = {p.dtype for p in plain.parameters() if p.is_floating_point()}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    record = {
        "dtype": str(widest).removeprefix("torch."),
        # Drop `double` (double quantisation): loading would quantise the scales a second time.
        "transforms": [{**x, "double": False} if x.get("double") else x for x in done],
    }
    (folder / TRANSFORMS).write_text(json.dumps(record) + "\n")
    config = {
        "model_type": PRUNED,
        "architectures": ["MmrlPrunedModel"],
        "base_model_type": model.config.model_type,
        "transforms": [transform["name"] for transform in done],
        "load_with": "mmrl.load_pruned(folder) or mmrl.load_engine(folder)",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_pruned(folder: str | Path, *, attn_implementation: str = "sdpa") -> nn.Module:
    """Load a folder that `save_transformed` wrote with transforms; logits are bit for bit the same."""
    from transformers import AutoModelForImageTextToText

    folder = Path(expanded(str(folder)))
    path = folder / TRANSFORMS
    try:
        record = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read '{path}', which `mmrl export` writes: {error}") from error
    # Load in the widest dtype, which represents all weights exactly; `layer_cast` casts them back.
    model = load_whole(
        AutoModelForImageTextToText,
        folder / WEIGHTS,
        dtype=DTYPES[record["dtype"]],
        attn_implementation=attn_implementation,
        trust_remote_code=False,
    ).eval()
    for transform in record["transforms"]:
        options = {key: _tuples(value) for key, value in transform.items()}
        name = options.pop("name")
        if name in STORED:
            vars(model)[RECORD] = (*applied_transforms(model), {"name": name, **options})
        else:
            model = find("transform", f"compression.{name}").target(model, **options)
    return model


@torch.no_grad()
def _dequantised(linear: nn.Module) -> nn.Module:
    """Convert a low-bit linear layer to an ordinary one; its weights are its outputs for unit vectors."""
    out = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    ones = torch.eye(linear.in_features, device=linear.weight.device)  # each row is a unit vector
    bias = 0.0 if linear.bias is None else linear.bias.detach()
    out.weight = nn.Parameter((linear(ones) - bias).T.contiguous())
    if linear.bias is not None:
        out.bias = nn.Parameter(bias)
    return out


def _tuples(value: Any) -> Any:
    """Convert JSON lists to tuples at any depth, because options of transforms are tuples."""
    return tuple(map(_tuples, value)) if type(value) is list else value
