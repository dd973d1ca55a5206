"""The memory estimate of models that write images as tokens, beside the bytes that torch allocates."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.diagnostics.memory_estimates import estimate_memory
from mmrl.runtime.allocations import Allocations
from mmrl.vision import memory_estimates
from mmrl.vision.builders.tiny_image_writers import TinyChameleon, TinyEmu3, TinyJanus
from mmrl.vision.engines.generate_images import GenerateImages
from mmrl.vision.policies.tokens import Tokens

SIDE, PROMPTS, ANSWERS = 24, 2, 8
MODEL = {"width": 128, "layers": 2, "codes": 512, "vocab_size": 320}
CASES = {
    "emu3, guidance": (TinyEmu3, {"guidance_scale": 3.0}, 0, True),
    "emu3, a text": (TinyEmu3, {"lora_rank": 4}, 4, True),
    "janus, guidance": (TinyJanus, {"guidance_scale": 3.0}, 0, False),
    "chameleon": (TinyChameleon, {"guidance_scale": 1.0}, 0, False),
}


def prompts():
    """Prompts of one image each."""
    return [
        Prompt(str(number), (Message("user", (Part("a red ball and two blue cubes"),)),))
        for number in range(PROMPTS)
    ]


def config_of(folder, options, text, sized):
    engine = {"name": "vision.generate_images", "max_text_length": text}
    plain = {
        "policy": {"name": "vision.tokens", "model": str(folder), "dtype": "float32", **options},
        "data": f"{__name__}:prompts",
        "rollout": {
            "engine": engine | ({"height": SIDE, "width": SIDE} if sized else {}),
            "num_prompts": PROMPTS,
            "num_generations": ANSWERS,
        },
        "rewards": ["diffusion.jpeg_compressibility"],
        "advantage": ["total", "group_normalize"],
        "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
        "output_dir": "nowhere",
    }
    return parse(plain, Config)


def phase(memory, name):
    """Sum the parts of a phase that torch counts: weights in oneDNN's layout are no tensors of its own."""
    return sum(size for part, size in memory.items() if part.startswith(name) and "packed" not in part)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c != "emu3, a text" else []) for c in CASES]
)
def test_the_estimate_is_within_15_percent_of_what_torch_allocates(case, tmp_path):
    builder, options, text, sized = CASES[case]
    builder(stream=Stream(0), **MODEL, **({} if sized else {"side": SIDE})).build(tmp_path)
    config = config_of(tmp_path, options, text, sized)
    memory = estimate_memory(config)
    policy = Tokens(model=str(tmp_path), dtype="float32", **options)
    numbers = {id(p): p.nbytes for p in (*policy.module.parameters(), *policy.module.buffers())}
    assert memory["weights"] == sum(numbers.values())  # with Janus's second embedding and head
    size = {"height": SIDE, "width": SIDE} if sized else {}
    engine = GenerateImages(policy, stream=Stream(0), max_text_length=text, **size)
    with Allocations() as sampling:
        rows = engine.rollout([prompt for prompt in prompts() for _ in range(ANSWERS)])
    assert rows[0].outcomes[-1].image.shape == (3, SIDE, SIDE)
    decoding = memory["decoding/images"] + memory["images"]
    assert memory["images"] == PROMPTS * ANSWERS * 3 * SIDE**2
    with Allocations() as decoded, torch.no_grad():
        engine.writer.decode(rows[0].steps.ids, SIDE, SIDE)
    batch = policy.collate(rows)
    with Allocations() as learning:
        (policy(batch).logp * batch.mask).sum().backward()
    ratios = {
        "sampling": max(phase(memory, "rollouts/"), decoding) / sampling.peak,
        "decoding": memory["decoding/images"] / decoded.peak,
        "learning": phase(memory, "learning/") / learning.peak,
    }
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), (ratios, memory)


def test_recorded_images_count_by_their_tokens(tmp_path):
    TinyEmu3(stream=Stream(0), **MODEL).build(tmp_path)
    policy = Tokens(model=str(tmp_path), dtype="float32")
    image = torch.zeros(3, 8, 12, dtype=torch.uint8)
    asked = [Prompt(p.uid, p.messages, answers=(Outcome("two", image),)) for p in prompts()]
    tokens = len(policy.encode(asked[0], asked[0].answers[0]).steps.ids)
    assert memory_estimates._longest_answer(policy, {}, asked, (0, 0))[0] == tokens
