"""Fidelity of compressed caches and transformed models: agreement and KL of greedy answers, and a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.kv_cache.layout import find_visual

MakeCache = Callable[[Any, Tensor, Tensor], Any]
Inputs = Mapping[str, Tensor]
PER_TOKEN = ("attention_mask", "mm_token_type_ids")  # inputs with a number for every token of the prompt


@dataclass(frozen=True)
class Fidelity:
    """Agreement (share of tokens that stay the likeliest), KL(full || compressed) in nats, and bytes."""

    agreement: float
    kl: float
    worst_kl: float
    num_tokens: int
    nbytes: int
    full_nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.agreement:.1%} of {self.num_tokens} tokens agree, KL {self.kl:.4f} nats (worst "
            f"{self.worst_kl:.3f}), {self.nbytes:,} bytes for {self.full_nbytes:,}"
        )


@torch.no_grad()
def measure(
    model: nn.Module,
    prompts: Sequence[Inputs],
    make_cache: MakeCache | None,
    *,
    num_tokens: int = 16,
    cheaper: nn.Module | None = None,
) -> Fidelity:
    """Measure the fidelity of a cache, a `cheaper` model, or both, on prompts.

    A prompt is the inputs of one call: `input_ids` (1, S), pixels and so on, and if needed `position_ids`
    (1, S) or (A, 1, S). The model answers greedily with the full cache; the compressed one reads the same
    answer token by token. The last token of the prompt is read with the answer, so that every prediction
    reads the cache.
    """
    if not prompts:
        raise ValueError("there is no prompt to compare caches on; give at least one")
    from transformers import DynamicCache

    tested = model if cheaper is None else cheaper
    agree, kl, sizes = [], [], [0, 0]
    for inputs in prompts:
        full = DynamicCache(config=model.config)
        expected, answer = _answer(model, inputs, full, None, num_tokens)
        ids = inputs["input_ids"][:, :-1]
        if make_cache is None:
            cache = DynamicCache(config=tested.config)
        else:
            cache = make_cache(tested.config, *_masks(tested.config, ids, inputs.get("attention_mask")))
        logp, _ = _answer(tested, inputs, cache, answer, num_tokens)
        agree.append((expected.argmax(-1) == logp.argmax(-1)).float())
        kl.append((expected.exp() * (expected - logp)).sum(-1))
        sizes[0] += _dense_bytes(cache) if make_cache is None else cache.nbytes
        sizes[1] += _dense_bytes(full)
    agree, kl = torch.cat(agree, 1), torch.cat(kl, 1)
    return Fidelity(float(agree.mean()), float(kl.mean()), float(kl.max()), agree.numel(), *sizes)


def _dense_bytes(cache: Any) -> int:
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def _masks(config: Any, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    real = torch.ones_like(ids) if mask is None else mask[:, : ids.shape[1]]
    try:
        return find_visual(config, ids, real)
    except ValueError:  # a model of text; a cache that needs visual tokens refuses it itself
        return torch.zeros_like(real, dtype=torch.bool), real.bool()


def _answer(
    model: nn.Module, inputs: Inputs, cache: Any, answer: Tensor | None, num: int
) -> tuple[Tensor, Tensor]:
    """Read a prompt and an answer, greedy if None: log-probabilities (1, num, V) and tokens (1, num)."""
    inputs = dict(inputs)
    ids, positions = inputs.pop("input_ids"), inputs.pop("position_ids", None)
    mask = inputs.pop("attention_mask", torch.ones_like(ids))
    cut = {name: x[:, :-1] if name in PER_TOKEN else x for name, x in inputs.items()}
    if positions is not None:
        cut["position_ids"] = positions[..., :-1]
    model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, use_cache=True, **cut)
    token, logps, tokens = ids[:, -1:], [], []
    for t in range(num):
        place = {} if positions is None else {"position_ids": positions[..., -1:]}
        if place and t:
            place["position_ids"] = (positions.max() + t).expand_as(positions[..., -1:])
        logits = model(
            input_ids=token,
            attention_mask=torch.cat([mask, mask.new_ones(1, t)], 1),
            past_key_values=cache,
            use_cache=True,
            **place,
        ).logits[:, -1]
        logps.append((logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1))
        token = logps[-1].argmax(-1, keepdim=True) if answer is None else answer[:, t : t + 1]
        tokens.append(token)
    return torch.stack(logps, 1), torch.cat(tokens, 1)


def gate(
    model: nn.Module,
    prompts: Sequence[Inputs],
    make_cache: MakeCache | None,
    *,
    num_tokens: int = 16,
    min_agreement: float = 0.9,
    max_kl: float = 0.1,
    allow: bool = False,
    cheaper: nn.Module | None = None,
) -> Fidelity:
    """Measure and print the fidelity of a cache, a `cheaper` model or both; raise below the thresholds.

    `min_agreement` is a share of tokens, `max_kl` a mean in nats; with `allow` nothing is raised.
    """
    fidelity = measure(model, prompts, make_cache, num_tokens=num_tokens, cheaper=cheaper)
    both = (cheaper is not None, "cheaper model"), (make_cache is not None, "cache")
    what = " and ".join(name for used, name in both if used)
    print(f"{what}: {fidelity}")
    if not allow and not (fidelity.agreement >= min_agreement and fidelity.kl <= max_kl):
        raise ValueError(
            f"the {what} changes the answers: {fidelity}; wanted are {min_agreement:.1%} and at most "
            f"{max_kl} nats. Give it more bits (or drop less), or set `allow: true` to go on with it"
        )
    return fidelity


def choose(
    model: nn.Module,
    prompts: Sequence[Inputs],
    candidates: Mapping[str, MakeCache],
    *,
    num_tokens: int = 16,
    min_agreement: float = 0.9,
    max_kl: float = 0.1,
) -> str:
    """Measure and print several caches; return the name of the smallest one within the thresholds."""
    measured = {
        name: measure(model, prompts, make_cache, num_tokens=num_tokens)
        for name, make_cache in candidates.items()
    }
    for name, x in measured.items():
        print(f"cache {name}: {x}")
    good = [name for name, x in measured.items() if x.agreement >= min_agreement and x.kl <= max_kl]
    if not good:
        raise ValueError(
            f"none of the caches {', '.join(measured)} keeps {min_agreement:.1%} of the tokens within "
            f"{max_kl} nats; offer one with more bits"
        )
    return min(good, key=lambda name: measured[name].nbytes)
