"""Calibration of `binary_codebook`: codebooks fitted once on sample prompts, and stored in a file.

The metric of quantisation errors is the second moment of the gradient of the logit margin (of the chosen
token over the runner-up) with respect to the keys and values that the model reads, per layer and head.
arXiv 2401.18079 weights single numbers by the gradient of the likelihood; that one vanishes where a model is
sure of its answers, so that a few unusual prompts decide (the margin is ours).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.compression.contrib.binary_codebook import Codebook, fit, quantize_codebook
from mmrl.compression.fidelity import PER_TOKEN, Inputs
from mmrl.kv_cache.layout import find_visual

SIDES, PARTS = ("keys", "values"), ("mean", "vectors", "metric")
FLOOR = 0.003  # added to the metric, relative to its mean: few prompts say little about weak directions
TOKENS = 1 << 14  # that vectors are fitted to, from all prompts


@dataclass(frozen=True)
class CalibratedCodebook:
    """Vectors (1, h, m, D), mean (1, h, 1, D) and metric (1, h, D, D) of one layer's keys or values."""

    mean: Tensor
    vectors: Tensor
    metric: Tensor

    def for_tokens(self, like: Tensor) -> Codebook:
        """Quantise the codebook in the precision of these tokens (R, h, n, D)."""
        if self.mean.shape[1::2] != like.shape[1::2]:
            raise ValueError(
                f"the codebook was fitted for {self.mean.shape[1]} heads of {self.mean.shape[3]} channels, "
                f"but the model has {like.shape[1]} of {like.shape[3]}; fit one for this model"
            )
        exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        mean, vectors, metric = (x.to(like.device, exact) for x in (self.mean, self.vectors, self.metric))
        codebook = quantize_codebook(mean, vectors, like.dtype)
        return replace(codebook, metric=metric, calibrated=True)


# ---- files


def write_codebooks(codebooks: Mapping[str, Tensor], path: str | Path) -> None:
    """Write codebooks for the option `codebook` of `binary_codebook`."""
    from safetensors.torch import save_file

    save_file({name: x.contiguous() for name, x in codebooks.items()}, str(path))


def read_codebooks(path: str, layers: int) -> list[tuple[CalibratedCodebook, CalibratedCodebook]]:
    """Read the codebooks of keys and of values of every layer."""
    from safetensors import SafetensorError

    try:
        tensors = _read(path, Path(path).stat().st_mtime_ns)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read the codebook '{path}': {error}") from error
    lacks = sorted({f"{side}.{name}" for side in SIDES for name in PARTS} - tensors.keys())
    if lacks:
        raise ValueError(f"'{path}' is not a codebook of `calibrate_codebook`: it lacks {', '.join(lacks)}")
    stored = len(tensors["keys.mean"])
    if stored != layers:
        raise ValueError(f"the codebook '{path}' is for {stored} layers, but the model has {layers}")
    return [
        tuple(
            CalibratedCodebook(*(tensors[f"{side}.{name}"][layer, None] for name in PARTS)) for side in SIDES
        )
        for layer in range(layers)
    ]


@lru_cache(maxsize=4)
def _read(path: str, changed: int) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


# ---- fitting


def calibrate_codebooks(
    model: nn.Module,
    prompts: Sequence[Inputs],
    *,
    nbits: float = 1.0,
    value_nbits: float | None = None,
    of: Literal["prompt", "visual"] = "visual",
    first: int = 8,
    num_tokens: int = 16,
    rounds: int = 4,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Fit codebooks on prompts, each the inputs of one call as in `fidelity.measure`.

    Returns "keys.mean" (L, h, 1, D), "keys.vectors" (L, h, m, D), "keys.metric" (L, h, D, D), and the same of
    values. The model answers greedily in up to `num_tokens` tokens. One backward pass gives the gradient of
    the sum of all tokens' margins, each with a random sign drawn from `generator`, so that the products of
    different tokens' gradients average out of the second moments.
    """
    if not prompts:
        raise ValueError("there is no prompt to fit codebooks on; give at least one")
    bits = {"keys": nbits, "values": nbits if value_nbits is None else value_nbits}
    tokens: dict[str, list[list[Tensor]]] = {side: [] for side in SIDES}
    moments: dict[str, Any] = dict.fromkeys(SIDES, 0.0)
    for inputs in prompts:
        coded = _coded(model.config, inputs, of, first)
        sample = coded[:: max(1, len(coded) * len(prompts) // TOKENS)]
        for side, layers in zip(SIDES, _gradients(model, inputs, num_tokens, generator), strict=True):
            tokens[side].append([x[0, :, sample].float().cpu() for x, _ in layers])
            slopes = torch.stack([slope[0, :, coded] for _, slope in layers]).float()
            moments[side] = moments[side] + (slopes.mT @ slopes).cpu()
    fitted = {side: _fit(tokens[side], _metric(moments[side]), bits[side], rounds) for side in SIDES}
    return {f"{side}.{name}": x for side, tensors in fitted.items() for name, x in tensors.items()}


def _fit(tokens: list[list[Tensor]], metric: Tensor, nbits: float, rounds: int) -> dict[str, Tensor]:
    """Fit the codebooks of keys or of values to tokens (h, n, D) of every prompt and layer."""
    fitted = [
        fit(torch.cat(x, 1)[None], nbits, metric=metric[layer, None], rounds=rounds)
        for layer, x in enumerate(zip(*tokens, strict=True))
    ]
    mean, vectors = (torch.cat(x) for x in list(zip(*fitted, strict=True))[:2])
    return {"mean": mean, "vectors": vectors, "metric": metric}


def _metric(moments: Tensor) -> Tensor:
    """Scale second moments (L, h, D, D) to a mean diagonal of 1, and add the floor."""
    size = moments.shape[-1]
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(size, dtype=moments.dtype, device=moments.device)
    # Where the answer reads nothing, in the last layer of some models, all channels weigh the same.
    return torch.where(mean > 0, moments / mean.clamp(min=1e-30), eye) + FLOOR * eye


def _coded(config: Any, inputs: Inputs, of: str, first: int) -> Tensor:
    """List the tokens that the cache will quantise; the last one of a prompt is not in it."""
    ids = inputs["input_ids"][:, :-1]
    later = torch.arange(ids.shape[1], device=ids.device) >= first
    return (find_visual(config, ids)[0][0] & later if of == "visual" else later).nonzero()[:, 0]


def _gradients(
    model: nn.Module, inputs: Inputs, num: int, generator: torch.Generator | None
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Compute the keys, and the values, of every layer of a prompt, each with its gradient of the margin."""
    from transformers import DynamicCache

    ids, positions, cache, answer = _answered(model, inputs, num)
    prompt = DynamicCache(config=model.config)
    read = [
        [x[:, :, : ids.shape[1] - 1].detach().requires_grad_() for x in (layer.keys, layer.values)]
        for layer in cache.layers
    ]
    for layer, (keys, values) in enumerate(read):
        prompt.update(keys, values, layer)
    query = torch.cat([ids[:, -1:], answer[:, :-1]], 1)
    place = {}
    if positions is not None:
        steps = torch.arange(1, query.shape[1], device=ids.device)
        later = (positions.max() + steps).expand(*positions.shape[:-1], -1)
        place["position_ids"] = torch.cat([positions[..., -1:], later], -1)
    mask = ids.new_ones(1, ids.shape[1] - 1 + query.shape[1])
    with torch.enable_grad():
        logits = model(
            input_ids=query, attention_mask=mask, past_key_values=prompt, use_cache=True, **place
        ).logits
        first, second = logits[0].float().topk(2, -1).values.unbind(-1)
        signs = torch.randint(2, first.shape, generator=generator).to(first) * 2 - 1
        slopes = torch.autograd.grad((signs * (first - second)).sum(), [x for pair in read for x in pair])
    pairs = list(zip([x.detach() for pair in read for x in pair], slopes, strict=True))
    return pairs[::2], pairs[1::2]


@torch.no_grad()
def _answered(model: nn.Module, inputs: Inputs, num: int) -> tuple[Tensor, Tensor | None, Any, Tensor]:
    """Answer a prompt greedily: its ids, positions, filled cache, and the answer (1, t)."""
    from transformers import DynamicCache

    others = dict(inputs)
    ids, positions = others.pop("input_ids"), others.pop("position_ids", None)
    others.pop("attention_mask", None)
    cut = {name: x[:, :-1] if name in PER_TOKEN else x for name, x in others.items()}
    if positions is not None:
        cut["position_ids"] = positions[..., :-1]
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True, **cut)
    token, answer = ids[:, -1:], []
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = [] if ends is None else torch.tensor(ends).flatten().tolist()
    for t in range(num):
        place = {} if positions is None else {"position_ids": positions[..., -1:]}
        if place and t:
            place["position_ids"] = (positions.max() + t).expand_as(positions[..., -1:])
        mask = ids.new_ones(1, ids.shape[1] + t)
        logits = model(
            input_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True, **place
        ).logits
        token = logits[:, -1:].argmax(-1)
        answer.append(token)
        if int(token) in ends:
            break
    return ids, positions, cache, torch.cat(answer, 1)
