"""Prompts of all sorts for every family, rows that answer them, and what plain transformers say of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Trajectory
from mmrl.rewards.adapters import per_outcome
from mmrl.vision.engines.generate import Generate
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.policies.tokens import Tokens
from tests.vision import tiny

TOGETHER = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava_onevision",
    "internvl",
)  # pictures and clips in one prompt


def prompts(family: str) -> list[Prompt]:
    """Ask in words, with one image, with several of different sizes, with clips, and with both."""
    wide = tiny.picture(seed=1, height=56, width=112)
    asked = [
        tiny.ask("words", "the quick brown fox"),
        tiny.ask("picture", tiny.picture(), "what"),
        tiny.ask("pictures", "is", wide, "like", tiny.picture(seed=2), "or not, the quick fox?"),
    ]
    if family in tiny.WITH_VIDEO:
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
    return asked


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
    """Make rows of every prompt: one sampled answer, and two recorded ones of different lengths."""
    asked = prompts(family)
    recorded = [policy.encode(prompt, Outcome(text=text)) for prompt in asked for text in ("0", "0123 fox")]
    return (*generate(policy, asked), *recorded)


def placed(policy: Tokens, encoded: EncodedPrompt, more: int = 0) -> dict[str, Tensor]:
    """Give what transformers needs to place a prompt and `more` tokens after it: the kinds of tokens, from
    which it finds positions itself, or the positions where it finds wrong ones (the text after a video of
    Qwen2-VL and Qwen2.5-VL; `test_positions.py` derives those by hand)."""
    config, ids = policy.model.config, encoded.ids
    if config.model_type in ("qwen2_vl", "qwen2_5_vl") and "video_grid_thw" in encoded.media:
        later = (encoded.positions.max() + 1 + torch.arange(more)).expand(3, -1)
        return {"position_ids": torch.cat([encoded.positions, later], 1)[:, None]}
    if not config.model_type.startswith(("qwen", "glm", "gemma")):
        return {}
    kinds = 1 * (ids == config.image_token_id) + 2 * (ids == getattr(config, "video_token_id", -1))
    name = "token_type_ids" if config.model_type == "gemma3" else "mm_token_type_ids"
    return {name: torch.cat([kinds, kinds.new_zeros(more)])[None]}


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
