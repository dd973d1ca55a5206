"""Calibration of `binary_codebook`: codebooks are fitted once on sample prompts and stored in a file.

Quantisation errors are weighted by a metric per layer and head. The metric is the second moment of the
gradient of the logit margin (chosen token minus runner-up) with respect to keys and values. arXiv 2401.18079
uses the gradient of the likelihood, which vanishes for confident answers, so a few unusual prompts would
dominate. The margin is our choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.compression.contrib.binary_codebook import Codebook, fit, quantize_codebook
from mmrl.compression.fidelity import Inputs, answer_positions, read_answer
from mmrl.kv_cache.layout import find_visual

SIDES, PARTS = ("keys", "values"), ("mean", "vectors", "metric")
FLOOR = 0.003  # added to the metric, relative to its mean: with few prompts, small eigenvalues are noisy
TOKENS = 1 << 14  # number of tokens, sampled from all prompts, to which the vectors are fitted


@dataclass(frozen=True)
class CalibratedCodebook:
    """Mean (1, h, 1, D), m vectors (1, h, m, D) and metric (1, h, D, D) of a layer's keys or values."""

    mean: Tensor
    vectors: Tensor
    metric: Tensor

    def for_tokens(self, like: Tensor) -> Codebook:
        """Quantise the codebook in the dtype of tokens `like` (R, h, n, D); ValueError if h or D differ."""
        if self.mean.shape[1::2] != like.shape[1::2]:  # numbers of heads and channels
            raise ValueError(
                f"the codebook was fitted for {self.mean.shape[1]} heads of {self.mean.shape[3]} channels, "
                f"but the model has {like.shape[1]} of {like.shape[3]}; fit one for this model"
            )
        exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        mean, vectors, metric = (x.to(like.device, exact) for x in (self.mean, self.vectors, self.metric))
        codebook = quantize_codebook(mean, vectors, like.dtype)
        return replace(codebook, metric=metric, calibrated=True)


def write_codebooks(codebooks: Mapping[str, Tensor], path: str | Path) -> None:
    """Write codebooks to a file for the option `codebook` of the cache `binary_codebook`."""
    from safetensors.torch import save_file

    save_file({name: x.contiguous() for name, x in codebooks.items()}, str(path))


def read_codebooks(path: str, layers: int) -> list[tuple[CalibratedCodebook, CalibratedCodebook]]:
    """Read the codebooks of a file: a pair (keys, values) for each of the model's `layers` layers."""
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


# The modification time `changed` is part of the cache key, so that an overwritten file is read again.
@lru_cache(maxsize=4)
def _read(path: str, changed: int) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def calibrate_codebooks(
    model: nn.Module, prompts: Sequence[Inputs], *, nbits: float = 1.0, value_nbits: float | None = None,
    of: Literal["prompt", "visual"] = "visual", first: int = 8, num_tokens: int = 16, rounds: int = 4,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Fit codebooks on prompts; each prompt is the inputs of one model call, as in `fidelity.measure`.

    Returns "keys.mean" (L, h, 1, D), "keys.vectors" (L, h, m, D), "keys.metric" (L, h, D, D) for L layers,
    and the same for "values". The model answers greedily with up to `num_tokens` tokens. One backward pass
    gives the gradient of the sum of all tokens' margins. Each margin gets a random sign from `generator`, so
    that in the second moments the products of different tokens' gradients average out.
    """
    if not prompts:
        raise ValueError("there is no prompt to fit codebooks on; give at least one")
    tokens: dict[str, list[list[Tensor]]] = {"keys": [], "values": []}
    moments: dict[str, Any] = {"keys": 0.0, "values": 0.0}
    for inputs in prompts:
        # Find the tokens that the cache will quantise. The last token of a prompt is not in the cache.
        ids = inputs["input_ids"][:, :-1]
        coded = torch.arange(ids.shape[1], device=ids.device) >= first
        if of == "visual":
            coded &= find_visual(model.config, ids)[0][0]
        coded = coded.nonzero()[:, 0]  # (n,)
        sample = coded[:: max(1, len(coded) * len(prompts) // TOKENS)]
        for side, (read, slopes) in margin_gradients(model, inputs, num_tokens, generator).items():
            tokens[side].append([x[0, :, sample].detach().float().cpu() for x in read])
            slopes = torch.stack([x[0, :, coded] for x in slopes]).float()  # (L, h, n, D)
            moments[side] = moments[side] + (slopes.mT @ slopes).cpu()  # (L, h, D, D)
    codebooks = {}
    for side, bits in (("keys", nbits), ("values", nbits if value_nbits is None else value_nbits)):
        metric = codebooks[f"{side}.metric"] = scale_metric(moments[side])
        fitted = [
            fit(torch.cat(x, 1)[None], bits, metric=metric[layer, None], rounds=rounds)[:2]
            for layer, x in enumerate(zip(*tokens[side], strict=True))
        ]
        for name, x in zip(("mean", "vectors"), zip(*fitted, strict=True), strict=True):
            codebooks[f"{side}.{name}"] = torch.cat(x)
    return codebooks


def scale_metric(moments: Tensor) -> Tensor:
    """Scale second moments (L, h, D, D) to a mean diagonal of 1, and add `FLOOR` to the diagonal."""
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    # Without any gradient, as in the last layer of some models, use the identity.
    return torch.where(mean > 0, moments / mean.clamp(min=1e-30), eye) + FLOOR * eye


def margin_gradients(
    model: nn.Module, inputs: Inputs, num: int, generator: torch.Generator | None
) -> dict[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Return, for "keys" and "values", a prompt's tensors of all layers and the gradients of its margins."""
    from transformers import DynamicCache

    # A single prompt without padding needs no mask: `read_answer` uses a mask of ones.
    inputs = {name: x for name, x in inputs.items() if name != "attention_mask"}
    ids, cache = inputs["input_ids"], DynamicCache(config=model.config)
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else torch.tensor(ends).flatten().tolist()
    answer = []
    with torch.no_grad():
        for _, token in islice(read_answer(model, inputs, cache), num):
            answer.append(token)
            if int(token) in ends:
                break
    # Make the prompt's keys and values leaves of the graph. Then read the whole answer in one forward pass.
    length, prompt = ids.shape[1] - 1, DynamicCache(config=model.config)
    read = [
        [x[:, :, :length].detach().requires_grad_() for x in (layer.keys, layer.values)]
        for layer in cache.layers
    ]
    for layer, pair in enumerate(read):
        prompt.update(*pair, layer)
    query = torch.cat([ids[:, -1:], *answer[:-1]], 1)
    with torch.enable_grad():
        logits = model(
            input_ids=query,
            attention_mask=ids.new_ones(1, length + query.shape[1]),
            past_key_values=prompt,
            use_cache=True,
            **answer_positions(inputs.get("position_ids"), 0, query.shape[1]),
        ).logits
        largest, second = logits[0].float().topk(2, -1).values.unbind(-1)  # (t,) each
        signs = torch.randint(2, largest.shape, generator=generator).to(largest) * 2 - 1
        keys, values = zip(*read, strict=True)
        slopes = torch.autograd.grad((signs * (largest - second)).sum(), [*keys, *values])
    layers = len(keys)
    return {"keys": (keys, slopes[:layers]), "values": (values, slopes[layers:])}
