"""A check that a vLLM server samples from the policy, by comparing log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mmrl.core.types import Rollouts
from mmrl.runtime.fsdp import in_shards
from mmrl.runtime.modules import LOW
from mmrl.vision.serving.wire import served_family

LIMITS = {False: 1e-3, True: 5e-2}  # largest allowed gap in nats per token; True: 16-bit computation
CAUSES = {
    "text": "do `policy.model` and `policy.dtype` agree with what it serves, and was it started with "
    "`--logprobs-mode processed_logprobs`?",
    "image": "was it started with `--no-mm-device-do-normalize`, or has its model another image processor?",
    "video": "does its version of vLLM space frames by `second_per_grid_ts`, and count on after the largest "
    "position of a video?",
}


@torch.no_grad()
def gap(policy: Any, rows: Rollouts) -> float:
    """Return the mean absolute log-probability difference between policy and engine over answer tokens."""
    batch = policy.collate(rows)
    # Unwrap data parallelism, because other processes do not take part in this forward pass.
    module = getattr(policy.module, "module", policy.module)
    logp = module(batch.steps, frozenset(), None)["logp"].cpu().double()  # (N, T)
    noted = batch.notes["logp"].double()[:, : logp.shape[1]]
    known = (batch.mask[:, : logp.shape[1]] > 0) & ~noted.isnan()  # NaN: not returned by the server
    return float((logp - noted)[known].abs().mean())


def check_agreement(
    policy: Any, kind: str, url: str, rows: Rollouts, causes: Mapping[str, str] = CAUSES
) -> float:
    """Return the log-probability gap of answers to one kind of media; raise RuntimeError if too large.

    The limit is 1e-3 nats per token, or 5e-2 for a policy that computes in 16 bits. If the policy
    without a part of its adapter has no gap, the error says that the server ignores this part. Otherwise the
    error gives the likely cause for this kind of media, from `causes`.
    """
    limit, difference, name = LIMITS[policy.compute in LOW], gap(policy, rows), rows[0].prompt.uid
    if difference <= limit:
        return difference
    for what, chosen in _parts(policy).items():
        with without_adapter(policy.adapter, chosen):
            if gap(policy, rows) <= limit:
                raise RuntimeError(
                    f"the server '{url}' answers prompt '{name}' without {what}; start it with the line that "
                    "`mmrl serve-command` prints"
                )
    cause = causes["video" if "video" in kind else "image" if "image" in kind else "text"]
    if (
        causes is CAUSES
        and kind != "text"
        and (known := served_family(policy.prompt_encoder.core.config).cause)
    ):
        cause = known
    raise RuntimeError(
        f"the server '{url}' does not sample from the policy: log-probabilities of answers to prompt "
        f"'{name}' ({kind}) differ by {difference:.2g} nats a token, where {limit:g} are rounding; {cause}"
    )


def _parts(policy: Any) -> Mapping[str, Callable[[str], bool]]:
    """Map the name of each adapter part that a server may ignore to a test of layer names.

    The map is empty for a sharded model, because other processes do not take part in the forward pass.
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
    """Disable the adapter of the chosen layers inside the context, with a scale of 0."""
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
