"""Books of `binary_codebook` that are fitted once, on prompts like those they will serve, and kept in a file.

What an error costs is measured: how far a token that the model says leads the next likeliest one, and the
second moment of the gradient of that lead with respect to the keys and values that the model reads, for every
layer and head. arXiv 2401.18079 weighs single numbers by the gradient of the likelihood; that one dies away
where a model is sure of its answers, and what is left of it speaks of a few odd prompts (the lead is ours).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.compression.contrib.binary_codebook import Book, fit, hold
from mmrl.compression.fidelity import PER_TOKEN, Inputs
from mmrl.kv_cache.layout import find_visual

SIDES, PARTS = ("keys", "values"), ("mean", "vectors", "metric")
FLOOR = 0.003  # added to the mean weight of a channel: what a few prompts say of the others is little
TOKENS = 1 << 14  # of all prompts, which vectors are fitted to


@dataclass(frozen=True)
class Lent:
    """The vectors of one layer's keys or values, for all prompts: (1, h, m, D), mean (1, h, 1, D)."""

    mean: Tensor
    vectors: Tensor
    metric: Tensor

    def book(self, like: Tensor) -> Book:
        """Hold them as these tokens (R, h, n, D) are held."""
        if self.mean.shape[1::2] != like.shape[1::2]:
            raise ValueError(
                f"the book was fitted for {self.mean.shape[1]} heads of {self.mean.shape[3]} channels, but "
                f"the model has {like.shape[1]} of {like.shape[3]}; fit one for this model"
            )
        exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        mean, vectors, metric = (x.to(like.device, exact) for x in (self.mean, self.vectors, self.metric))
        return replace(hold(mean, vectors, like.dtype), metric=metric, lent=True)


# ---- files


def write_books(books: Mapping[str, Tensor], path: str | Path) -> None:
    """Write what `make_books` made, for the option `book` of `binary_codebook`."""
    from safetensors.torch import save_file

    save_file({name: x.contiguous() for name, x in books.items()}, str(path))


def read_books(path: str, layers: int) -> list[tuple[Lent, Lent]]:
    """Read the books of every layer: of keys, and of values."""
    from safetensors import SafetensorError

    try:
        held = _read(path, Path(path).stat().st_mtime_ns)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read the book '{path}': {error}") from error
    lacks = sorted({f"{side}.{name}" for side in SIDES for name in PARTS} - held.keys())
    if lacks:
        raise ValueError(f"'{path}' is no book of `calibrate_codebook`: it lacks {', '.join(lacks)}")
    many = len(held["keys.mean"])
    if many != layers:
        raise ValueError(f"the book '{path}' is for {many} layers, but the model has {layers}")
    return [
        tuple(Lent(*(held[f"{side}.{name}"][layer, None] for name in PARTS)) for side in SIDES)
        for layer in range(layers)
    ]


@lru_cache(maxsize=4)
def _read(path: str, changed: int) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


# ---- fitting


def make_books(
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
    """Fit books on prompts, each what the model takes for one, as in `fidelity`: "keys.mean" (L, h, 1, D),
    "keys.vectors" (L, h, m, D), "keys.metric" (L, h, D, D), and the same of values.

    The model answers greedily in up to `num_tokens` tokens; at each of them the gradient is that of the lead
    of the likeliest token over the next, in logits, with a sign that `generator` draws: products of different
    tokens cancel out that way.
    """
    if not prompts:
        raise ValueError("there is no prompt to fit books on; give at least one")
    bits = {"keys": nbits, "values": nbits if value_nbits is None else value_nbits}
    tokens: dict[str, list[list[Tensor]]] = {side: [] for side in SIDES}
    moments: dict[str, Any] = dict.fromkeys(SIDES, 0.0)
    for inputs in prompts:
        coded = _coded(model.config, inputs, of, first)
        some = coded[:: max(1, len(coded) * len(prompts) // TOKENS)]
        for side, found in zip(SIDES, _watch(model, inputs, num_tokens, generator), strict=True):
            tokens[side].append([x[0, :, some].float().cpu() for x, _ in found])
            slopes = torch.stack([slope[0, :, coded] for _, slope in found]).float()
            moments[side] = moments[side] + (slopes.mT @ slopes).cpu()
    made = {side: _fit(tokens[side], _metric(moments[side]), bits[side], rounds) for side in SIDES}
    return {f"{side}.{name}": x for side, one in made.items() for name, x in one.items()}


def _fit(tokens: list[list[Tensor]], metric: Tensor, nbits: float, rounds: int) -> dict[str, Tensor]:
    """Fit one side to tokens (h, n, D) of every prompt and layer."""
    fitted = [
        fit(torch.cat(one, 1)[None], nbits, metric=metric[layer, None], rounds=rounds)
        for layer, one in enumerate(zip(*tokens, strict=True))
    ]
    mean, vectors = (torch.cat([one[place] for one in fitted]) for place in (0, 1))
    return {"mean": mean, "vectors": vectors, "metric": metric}


def _metric(moments: Tensor) -> Tensor:
    """Bring second moments (L, h, D, D) to a mean weight of 1 for a channel, and add the floor."""
    size = moments.shape[-1]
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(size, dtype=moments.dtype, device=moments.device)
    # Where nothing is read, in the last layer of some models, all channels weigh the same.
    return torch.where(mean > 0, moments / mean.clamp(min=1e-30), eye) + FLOOR * eye


def _coded(config: Any, inputs: Inputs, of: str, first: int) -> Tensor:
    """Number the tokens that are read from codes; the last one of a prompt is held back."""
    ids = inputs["input_ids"][:, :-1]
    behind = torch.arange(ids.shape[1], device=ids.device) >= first
    return (find_visual(config, ids)[0][0] & behind if of == "visual" else behind).nonzero()[:, 0]


def _watch(
    model: nn.Module, inputs: Inputs, num: int, generator: torch.Generator | None
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Give the keys, and the values, of every layer of a prompt, each with its gradient."""
    from transformers import DynamicCache

    ids, positions, cache, answer = _answered(model, inputs, num)
    kept = DynamicCache(config=model.config)
    read = [
        [x[:, :, : ids.shape[1] - 1].detach().requires_grad_() for x in (one.keys, one.values)]
        for one in cache.layers
    ]
    for layer, (keys, values) in enumerate(read):
        kept.update(keys, values, layer)
    asked = torch.cat([ids[:, -1:], answer[:, :-1]], 1)
    place = {}
    if positions is not None:
        steps = torch.arange(1, asked.shape[1], device=ids.device)
        later = (positions.max() + steps).expand(*positions.shape[:-1], -1)
        place["position_ids"] = torch.cat([positions[..., -1:], later], -1)
    mask = ids.new_ones(1, ids.shape[1] - 1 + asked.shape[1])
    with torch.enable_grad():
        said = model(
            input_ids=asked, attention_mask=mask, past_key_values=kept, use_cache=True, **place
        ).logits
        first, second = said[0].float().topk(2, -1).values.unbind(-1)
        signs = torch.randint(2, first.shape, generator=generator).to(first) * 2 - 1
        slopes = torch.autograd.grad((signs * (first - second)).sum(), [x for one in read for x in one])
    pairs = list(zip([x.detach() for one in read for x in one], slopes, strict=True))
    return pairs[::2], pairs[1::2]


@torch.no_grad()
def _answered(model: nn.Module, inputs: Inputs, num: int) -> tuple[Tensor, Tensor | None, Any, Tensor]:
    """Read a prompt and answer it greedily, up to the end of the answer."""
    from transformers import DynamicCache

    given = dict(inputs)
    ids, positions = given.pop("input_ids"), given.pop("position_ids", None)
    given.pop("attention_mask", None)
    cut = {name: x[:, :-1] if name in PER_TOKEN else x for name, x in given.items()}
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
