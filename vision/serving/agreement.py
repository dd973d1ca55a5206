"""Whether a server samples from the policy: compares their log-probabilities, and looks for causes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mmrl.core.types import Rollouts
from mmrl.runtime.fsdp import in_shards
from mmrl.runtime.modules import LOW

LIMITS = {False: 1e-3, True: 5e-2}  # nats on average, for computation in low precision (True) and in float32
CAUSES = {
    "text": "do `policy.model` and `policy.dtype` agree with what it serves, and was it started with "
    "`--logprobs-mode processed_logprobs`?",
    "image": "was it started with `--no-mm-device-do-normalize`, or has its model another image processor?",
    "video": "does its version of vLLM space frames by `second_per_grid_ts`, and count on after the largest "
    "position of a video?",
}


@torch.no_grad()
def gap(policy: Any, rows: Rollouts) -> float:
    """Average |log-probability of the policy - that of the engine| over the tokens of answers."""
    batch = policy.collate(rows)
    # Without data parallelism, whose forward pass would wait for processes that compare nothing.
    module = getattr(policy.module, "module", policy.module)
    found = module(batch.steps, frozenset(), None)["logp"].cpu().double()
    noted, mask = batch.notes["logp"].double(), batch.mask > 0
    return float((found - noted[:, : found.shape[1]])[mask[:, : found.shape[1]]].abs().mean())


def check_agreement(policy: Any, kind: str, url: str, rows: Rollouts) -> float:
    """Return the gap of answers about one kind of media; raise `RuntimeError` where it is too large.

    The limit is 1e-3 nats a token, 5e-2 where the policy computes in 16 bits.
    """
    limit, found, name = LIMITS[policy.compute in LOW], gap(policy, rows), rows[0].prompt.uid
    if found <= limit:
        return found
    for what, chosen in _parts(policy).items():
        with without_adapter(policy.adapter, chosen):
            if gap(policy, rows) <= limit:
                raise RuntimeError(
                    f"the server '{url}' answers prompt '{name}' without {what}; start it with the line that "
                    "`mmrl serve-command` prints"
                )
    cause = CAUSES["video" if "video" in kind else "image" if "image" in kind else "text"]
    raise RuntimeError(
        f"the server '{url}' does not sample from the policy: log-probabilities of answers to prompt "
        f"'{name}' ({kind}) differ by {found:.2g} nats a token, where {limit:g} are rounding; {cause}"
    )


def _parts(policy: Any) -> Mapping[str, Callable[[str], bool]]:
    """List the parts of an adapter that a server may leave out, by name; none of shards.

    A pass over shards waits for other processes, which look for no cause.
    """
    if policy.adapter is None or in_shards(policy.module):
        return {}
    names = {id(module): name for name, module in policy.model.named_modules()}
    decoder = names[id(policy.model.get_decoder())]
    return {
        "the adapter": lambda name: True,
        "the adapter of the vision tower": lambda name: not name.startswith(decoder + "."),
    }


@contextmanager
def without_adapter(model: Any, chosen: Callable[[str], bool]) -> Iterator[None]:
    """Scale the adapter of chosen layers by 0 inside the block."""
    scales = {}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A") and chosen(name):
            scales[module] = dict(module.scaling)
            module.scaling.update(dict.fromkeys(module.scaling, 0.0))
    try:
        yield
    finally:
        for module, scaling in scales.items():
            module.scaling.update(scaling)
