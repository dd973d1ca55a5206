"""Startup check that log-probabilities of answers agree with plain transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import check
from mmrl.core.types import Trajectory
from mmrl.diagnostics.context import Examined, Finding
from mmrl.runtime.fsdp import in_shards
from mmrl.runtime.modules import LOW
from mmrl.runtime.output_head import forward_factor
from mmrl.vision.checks.prompt_agreement import as_transformers
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.model_families import TYPES_OF_TOKENS, family_of
from mmrl.vision.models.processor import PromptEncoder

# transformers 5.3 to 5.23 computes wrong positions after a video for these families, so they are skipped.
WRONG_AFTER_VIDEO = ("qwen2_vl", "qwen2_5_vl", "ernie4_5_vl_moe")


@check(on="start")
def forward_agreement(
    examined: Examined, *, rows: PositiveInt = 4, tolerance: PositiveFloat = 0.05
) -> Iterator[Finding]:
    """Check that log-probabilities of answers agree with plain transformers (batch size 1, no KV cache).

    A difference means wrong positions, masks or token types for this model family. The check skips sharded
    models, conversations, answers with images, videos of Qwen2-VL, Qwen2.5-VL and Ernie 4.5-VL, and videos
    with sound.

    Args:
        rows: Number of rollouts that are compared.
        tolerance: Largest mean difference of a row's log-probabilities, in nats. bfloat16 causes about 0.01.
    """
    policy: Any = examined.policy
    if not isinstance(getattr(policy, "prompt_encoder", None), PromptEncoder) or in_shards(policy.model):
        return
    compared = [row for row in examined.rollouts if _comparable(policy, row)][:rows]
    answer = lambda row: policy.prompt_encoder.answer(row.outcomes[-1].text)
    encoded = tuple(
        policy.restore_rows(row.prompt, {"token": answer(row), "temperature": torch.ones(1)})
        for row in compared
    )
    logps = examined.log_probabilities(encoded) if encoded else []
    gaps = [
        float((_plain(policy, row) - ours[: row.length]).abs().mean())
        for row, ours in zip(encoded, logps, strict=True)
    ]
    if gaps and not max(gaps) <= tolerance:
        worst = compared[gaps.index(max(gaps))].prompt.uid
        yield Finding(
            f"a model of type '{policy.model.config.model_type}' finds the answer to prompt '{worst}' "
            f"{max(gaps):.3g} nats a token away from what it is given here",
            "the family has positions, masks or inputs of its own; add it to "
            "`mmrl.vision.models.model_families.FAMILIES`, as docs/howto/model.md shows",
        )


def _comparable(policy: TokenPolicy, row: Trajectory) -> bool:
    loaded = [medium.load() for medium in row.prompt.media]
    if any(getattr(one, "sound", None) for one in loaded):
        return False
    videos = any(medium.kind == "video" for medium in row.prompt.media)
    wrong = videos and policy.model.config.model_type in WRONG_AFTER_VIDEO
    answer = row.outcomes[-1]
    return (
        bool(answer.text)
        and answer.image is None
        and getattr(row.steps, "suffix", None) is None
        and not wrong
    )


@torch.no_grad()
def _plain(policy: TokenPolicy, row: Trajectory) -> Tensor:
    """Compute log-probabilities (T,) of an answer's T tokens with the inputs that transformers builds."""
    encoder, answer = policy.prompt_encoder, row.steps.ids
    family, plain = family_of(policy.model.config), as_transformers(encoder, row.prompt)
    inputs = family.prepare(plain) if plain else encoder.processor_inputs(row.prompt)
    before, device = inputs["input_ids"].shape[1], policy.model.device
    kind = int(family_of(policy.model.config).prefix_lm)  # token type of answers: 1 in a prefix LM, else 0
    types = [(name, kind) for name in TYPES_OF_TOKENS]
    for name, value in (("input_ids", None), ("attention_mask", 1), *types):
        if name in inputs:
            more = answer if value is None else torch.full_like(answer, value)
            inputs[name] = torch.cat([inputs[name], more[None].to(inputs[name])], 1)
    given = family.assemble(policy.core, {name: value.to(device) for name, value in inputs.items()})
    with torch.autocast(device.type, policy.compute, enabled=policy.compute in LOW):
        logits = policy.model(**given, use_cache=False).logits[0, before - 1 : -1].double().cpu()
    logits = logits * forward_factor(policy.model)
    forbidden = torch.tensor(policy.prompt_encoder.placeholders, dtype=torch.int64)
    logits = logits.index_fill(-1, forbidden, -torch.inf)
    return logits.log_softmax(-1).gather(1, answer[:, None].cpu())[:, 0]
