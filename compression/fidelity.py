"""Fidelity of compressed caches and models on greedy answers: agreement, KL, and a pass/fail check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.types import Prompt
from mmrl.kv_cache.layout import placeholder_ids

MakeCache = Callable[[Any, Tensor, Tensor], Any]
Inputs = Mapping[str, Tensor]
PER_TOKEN = ("attention_mask", "mm_token_type_ids")  # inputs with one entry per prompt token


@dataclass(frozen=True)
class Fidelity:
    """Agreement (fraction of equal top tokens), KL(full || compressed) in nats, and cache sizes in bytes."""

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
            + (": LARGER than without" if self.nbytes > self.full_nbytes else "")
        )


def inputs_of(encoder: Any, prompts: Iterable[Prompt], device: torch.device) -> list[Inputs]:
    """Encode each prompt to the inputs of one model call, as `measure` takes them."""
    inputs = []
    for encoded in map(encoder.encode, prompts):
        # Position ids are (A, S) for A axes. Models take (1, S) for one axis, or (A, 1, S) for M-RoPE.
        positions = encoded.positions[:, None] if len(encoded.positions) > 1 else encoded.positions
        call = {"input_ids": encoded.ids[None], "position_ids": positions, **encoded.media}
        inputs.append({name: x.to(device) for name, x in call.items()})
    return inputs


def cache_bytes(cache: Any) -> int:
    """Return the bytes of keys and values in a dense cache or in a pruned model's cache."""
    tensors = (x for layer in cache.layers for x in (layer.keys, layer.values))
    return sum(x.nbytes for x in tensors if x is not None)  # layers without stored tokens have None


@torch.no_grad()
def measure(
    model: nn.Module, prompts: Sequence[Inputs], make_cache: MakeCache | None, *, num_tokens: int = 16,
    cheaper: nn.Module | None = None,
) -> Fidelity:  # fmt: skip
    """Measure the fidelity of a cache, of a `cheaper` model, or of both on prompts.

    A prompt is the inputs of one call: `input_ids` (1, S), pixel values and so on, and optional
    `position_ids` (1, S) or (A, 1, S) for A axes. The model answers greedily with the full cache. The
    compressed variant then reads the same answer token by token. The last token of the prompt is not cached,
    so that every prediction reads the cache.
    """
    if not prompts:
        raise ValueError("there is no prompt to compare caches on; give at least one")
    from transformers import DynamicCache

    tested = model if cheaper is None else cheaper
    agree, kl, nbytes, full_nbytes = [], [], 0, 0
    for inputs in prompts:
        full = DynamicCache(config=model.config)
        steps = list(islice(read_answer(model, inputs, full), num_tokens))
        answer = torch.cat([token for _, token in steps], 1)
        cache = DynamicCache(config=tested.config)
        if make_cache is not None:
            # The prompt's last token is not cached. Without placeholder ids, no token is visual.
            ids = inputs["input_ids"]
            real = inputs.get("attention_mask", torch.ones_like(ids))[:, :-1].bool()
            visual = torch.isin(ids[:, :-1], ids.new_tensor(placeholder_ids(tested.config))) & real
            cache = make_cache(tested.config, visual, real)
        others = islice(read_answer(tested, inputs, cache, answer), num_tokens)  # reads the same answer
        pair = (torch.stack([logits for logits, _ in each], 1) for each in (steps, others))  # (1, t, V)
        # In 16 bits, differences of similar log-probabilities are mostly rounding error: use float32 or more.
        expected, logp = (x.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1) for x in pair)
        agree.append((expected.argmax(-1) == logp.argmax(-1)).float())
        kl.append((expected.exp() * (expected - logp)).sum(-1))  # sum p (log p - log q): (1, t)
        nbytes += cache_bytes(cache) if make_cache is None else cache.nbytes
        full_nbytes += cache_bytes(full)
    agree, kl = torch.cat(agree, 1), torch.cat(kl, 1)
    scores = float(agree.mean()), float(kl.mean()), float(kl.max())
    return Fidelity(*scores, agree.numel(), nbytes, full_nbytes)


def read_answer(
    model: nn.Module, inputs: Inputs, cache: Any, answer: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read a prompt into a cache, then an answer (1, t) token by token; without `answer`, decode greedily.

    Yields (logits (1, V), token (1, 1)) for one token after another; the caller must stop the iteration.
    """
    inputs = dict(inputs)
    ids, positions = inputs.pop("input_ids"), inputs.pop("position_ids", None)
    mask = inputs.pop("attention_mask", torch.ones_like(ids))
    cut = {name: x[:, :-1] if name in PER_TOKEN else x for name, x in inputs.items()}
    if positions is not None:
        cut["position_ids"] = positions[..., :-1]
    model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache, use_cache=True, **cut)
    token = ids[:, -1:]
    for t in count():
        logits = model(
            input_ids=token,
            attention_mask=torch.cat([mask, mask.new_ones(1, t)], 1),
            past_key_values=cache,
            use_cache=True,
            **answer_positions(positions, t, t + 1),
        ).logits[:, -1]
        token = logits.argmax(-1, keepdim=True) if answer is None else answer[:, t : t + 1]
        yield logits, token


def answer_positions(positions: Tensor | None, start: int, stop: int) -> dict[str, Tensor]:
    """Return {"position_ids": (..., stop - start)} of decoded tokens; token 0 is the last of the prompt.

    Positions continue from the largest position, which may belong to an image. {} without `positions`.
    """
    if positions is None:
        return {}
    steps = torch.arange(max(start, 1), stop, device=positions.device)
    later = (positions.max() + steps).expand(*positions.shape[:-1], -1)
    return {"position_ids": later if start else torch.cat([positions[..., -1:], later], -1)}


def gate(
    model: nn.Module, prompts: Sequence[Inputs], make_cache: MakeCache | None, *, num_tokens: int = 16,
    min_agreement: float = 0.9, max_kl: float = 0.1, allow: bool = False, cheaper: nn.Module | None = None,
) -> Fidelity:  # fmt: skip
    """Measure and print the fidelity of a cache, a `cheaper` model or both; ValueError if it is too low.

    `min_agreement` is a fraction of tokens, `max_kl` a mean in nats. With `allow` no error is raised.
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
