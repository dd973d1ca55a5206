"""Prompts of all sorts for every family, rows that answer them, and what plain transformers say of a row."""

from __future__ import annotations

from inspect import signature
from itertools import cycle

import torch
from torch import Tensor

from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Trajectory
from mmrl.rewards.adapters import per_outcome
from mmrl.vision.checks.forward_agreement import WRONG_AFTER_VIDEO
from mmrl.vision.engines.generate import Generate
from mmrl.vision.models.model_families import TYPES_OF_TOKENS, family_of, type_arguments
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.policies.tokens import Tokens
from tests.vision import tiny

TOGETHER = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava_onevision",
    "internvl",
    "glm46v",
    "gemma4",
    "gemma4_26b",
    "ernie4_5_vl_moe",
    "minicpmv4_6",
    "minicpmv4_7",
    "internvl_qwen3",
    "internvl_qwen3_moe",
    "internvl_gpt_oss",
)  # pictures and clips in one prompt
CLIPS = (*tiny.WITH_VIDEO, *TOGETHER, "molmo2")


def prompts(family: str) -> list[Prompt]:
    """Ask in words, with one image, with several of different sizes, with clips, and with both."""
    wide = tiny.picture(seed=1, height=56, width=112)
    asked = [
        tiny.ask("words", "the quick brown fox"),
        tiny.ask("picture", tiny.picture(), "what"),
        tiny.ask("pictures", "is", wide, "like", tiny.picture(seed=2), "or not, the quick fox?"),
    ]
    if family in CLIPS:
        asked += [
            tiny.ask("clip", tiny.clip(4), "when"),
            # LLaVA-OneVision reads clips of one length together.
            tiny.ask(
                "long clip",
                "look:",
                tiny.clip(4 if family == "llava_onevision" else 6, seed=3),
                "when does the fox jump",
            ),
        ]
    if family in TOGETHER:
        asked.append(tiny.ask("both", tiny.clip(4, seed=4), "and", tiny.picture(seed=5), "which"))
    return asked[family.startswith("paligemma") :]  # which reads no question without an image


def pictured(*, num: int = 3) -> list[Prompt]:
    """Ask about one image each, as a data set."""
    return [tiny.ask(f"p{seed}", tiny.picture(seed=seed), "what") for seed in range(num)]


@per_outcome
def letters(prompt: Prompt, outcome: Outcome) -> float:
    """Count how many different letters an answer has."""
    return float(len(set(outcome.text)))


def generate(policy: Tokens, asked: list[Prompt], seed: int = 0, **options) -> tuple[Trajectory, ...]:
    """Answer prompts in at most eight tokens."""
    return Generate(policy, stream=Stream(seed), **{"max_completion_length": 8, **options}).rollout(asked)


def answered(policy: Tokens, family: str) -> tuple[Trajectory, ...]:
    """Make rows of every prompt: a sampled answer, and a recorded one of another length."""
    asked = prompts(family)
    pairs = zip(asked, cycle(("0", "0123 fox")), strict=False)
    recorded = [policy.encode(prompt, Outcome(text=text)) for prompt, text in pairs]
    return (*generate(policy, asked), *recorded)


def placed(policy: Tokens, encoded: EncodedPrompt, more: int = 0) -> dict[str, Tensor]:
    """Give what transformers needs to place a prompt and `more` tokens after it: the kinds of tokens, from
    which it finds positions itself, or the positions where it finds wrong ones (the text after a video of
    Qwen2-VL and Qwen2.5-VL; `test_positions.py` derives those by hand), and media as it takes them."""
    config, ids = policy.model.config, encoded.ids
    whole = torch.cat([ids, ids.new_zeros(more)])[None]
    own = family_of(config).assemble(policy.core, encoded.media)
    if config.model_type != "paligemma":
        own |= type_arguments(config, whole)
    if config.model_type in WRONG_AFTER_VIDEO and "video_grid_thw" in encoded.media:
        later = (encoded.positions.max() + 1 + torch.arange(more)).expand(3, -1)
        return own | {"position_ids": torch.cat([encoded.positions, later], 1)[:, None]}
    takes = signature(policy.model.forward).parameters
    kinds = 1 * (ids == config.image_token_id) + 2 * (ids == getattr(config, "video_token_id", -1))
    after = kinds.new_zeros(more)
    if config.model_type == "paligemma":  # 0 is the prompt, and 1 what follows it
        kinds, after = torch.zeros_like(kinds), after + 1
    kinds = torch.cat([kinds, after])[None]
    return {name: kinds for name in TYPES_OF_TOKENS if name in takes} | own


def logits_of(policy: Tokens, row: Trajectory) -> Tensor:
    """Compute the logits of the tokens of one row: one sequence, no padding, no cache."""
    encoded, ids = row.steps.prompt, torch.cat([row.steps.prompt.ids, row.steps.ids])[None]
    inputs = encoded.media | placed(policy, encoded, len(row.steps.ids))
    logits = policy.model(input_ids=ids, use_cache=False, **inputs).logits[0]
    return logits[len(encoded.ids) - 1 : -1]


@torch.no_grad()
def plainly(policy: Tokens, row: Trajectory) -> Tensor:
    """Compute the logits of the tokens of one row without gradients."""
    return logits_of(policy, row)


def loss(policy: Tokens, batch) -> Tensor:
    """Weigh every step differently, so that no error in one can hide in another."""
    logp = policy(batch).logp
    weight = torch.linspace(0.5, 2.0, logp.numel(), dtype=logp.dtype).view(logp.shape)
    return (logp * weight * batch.mask).sum()


def assert_close(family: str, found: Tensor, wanted: Tensor, **tolerance: object) -> None:
    """Compare within a tolerance, or within a share of all values where layers compute in float32."""
    if share := tiny.IN_FLOAT32.get(family):
        assert (found - wanted).norm() <= share * wanted.norm() + 1e-6
    else:
        torch.testing.assert_close(found, wanted, **tolerance)


def gradients(policy: Tokens) -> dict[str, Tensor]:
    """Take the gradients of everything that learns, and forget them."""
    found = {
        name: parameter.grad.clone()
        for name, parameter in policy.module.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    policy.module.zero_grad(set_to_none=True)
    return found
