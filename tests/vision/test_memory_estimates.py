"""What generation and learning of token policies take of memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from benchmarks.memory import measure_apart
from mmrl.compression.transforms.bnb_quantize import bnb_quantize
from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.diagnostics.memory_estimates import PROMPTS, estimate_memory, estimate_with, training
from mmrl.kv_cache.tails import room_of
from mmrl.runtime.allocations import Allocations
from mmrl.vision import memory_estimates
from mmrl.vision.decoding import step_model
from mmrl.vision.decoding.step_model import chunked_logp
from mmrl.vision.memory_estimates import extrapolated, micro_batch
from mmrl.vision.policies.tokens import Tokens
from tests.support import real_worker
from tests.vision import mixed, tiny

FAMILY = "qwen2_5_vl"
needs_bitsandbytes = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")


def test_the_largest_micro_batch_by_hand():
    # Groups of 10 + 4 * 5 = 30 tokens: three of them fit into 100, so 8 prompts take 3 micro-batches.
    assert micro_batch(10, 5, 8, 4, 100) == (3, 12, 3)
    assert micro_batch(10, 5, 2, 4, 100) == (2, 8, 1)
    # Of a group that does not fit, as many rows as do: 10 + 3 * 5 <= 25; and never less than one.
    assert micro_batch(10, 5, 8, 4, 25) == (1, 3, 16)
    assert micro_batch(10, 5, 8, 4, 1) == (1, 1, 32)


def test_buffers_of_answers_grow_by_a_quarter():
    assert [room_of(tokens) for tokens in (1, 10, 16, 17, 32, 33)] == [16, 16, 16, 32, 32, 48]
    assert room_of(960) == 960 and room_of(961) == 1200  # 960 + 240


def test_values_are_continued_by_a_line_or_a_parabola():
    squares = {n: float(n * n) for n in (1, 2, 4)}
    assert extrapolated(squares, 10) == pytest.approx(100)
    assert extrapolated({4: 16.0, 1: 1.0, 2: 4.0}, 10) == pytest.approx(100)
    assert extrapolated({1: 3.0, 4: 9.0}, 10) == pytest.approx(21)  # 2 n + 1
    assert extrapolated({1: 3.0, 4: 0.0}, 10) == 0


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
def test_activations_of_few_tokens_foretell_those_of_many(checkpoint, options):
    from mmrl.vision.policies.tokens import Tokens

    policy = Tokens(model=str(checkpoint(FAMILY)), dtype="float32", **options)
    encoded = policy.prompt_encoder.encode(mixed.prompts(FAMILY)[1])
    few = (*memory_estimates.LENGTHS, *([memory_estimates.MIDDLE] if options else []))
    sizes = {n: memory_estimates._states_bytes(policy, policy.module, encoded, n) for n in (*few, 128)}
    rows = memory_estimates.ROWS
    found = extrapolated({rows * n: sizes[n] for n in few}, rows * 128)
    assert found == pytest.approx(sizes[128], rel=0.05)


def test_logits_in_chunks_take_what_a_chunk_takes(monkeypatch):
    head = torch.nn.Linear(4, 1000, bias=False)
    hidden, ids, heat = (
        torch.randn(64, 4, requires_grad=True),
        torch.zeros(64, dtype=torch.int64),
        torch.ones(64),
    )

    def most(limit: int) -> int:
        monkeypatch.setattr(step_model, "LOGIT_BYTES", limit)
        with Allocations() as counted:
            torch.autograd.grad(chunked_logp(hidden, head, ids, heat, [3])["logp"].sum(), hidden)
        return counted.peak

    whole, chunks = most(64 * 4000), most(4 * 4000)
    assert whole >= 2 * 64 * 4000  # logits and their gradient
    assert chunks < whole / 8


def test_recomputed_layers_compute_a_shared_prompt_once(checkpoint):
    from mmrl.vision.policies.tokens import Tokens

    policy = Tokens(model=str(checkpoint(FAMILY)), dtype="float32", gradient_checkpointing=True)
    rows = mixed.answered(policy, FAMILY)
    seen = []
    layer = policy.model.get_decoder().layers[0].mlp
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:2].numel()))
    batch = policy.collate(rows)
    mixed.loss(policy, batch).backward()
    alone = sum(len(row.steps.prompt.ids) + row.length - 1 for row in rows)  # every row with its own prompt
    assert len(seen) == 2 and seen[0] == seen[1]  # forward, and once more in the backward pass
    assert len(batch.steps.prompts) < len(rows) and seen[0] < 0.75 * alone


def worded() -> list[Prompt]:
    """Ask in words, where a test is about no image."""
    return real_worker.seen()[1:]


def config_of(model, **changes):
    engine = changes.pop("engine", [{"name": "vision.generate", "max_completion_length": 12}])
    policy = {"name": "vision.tokens", "model": str(model), "dtype": "float32", **changes.pop("policy", {})}
    rollout = {"engine": engine, "num_prompts": 4, "num_generations": 2, **changes.pop("rollout", {})}
    plain = {
        "policy": policy,
        "data": "tests.support.real_worker:seen",
        "rollout": rollout,
        "rewards": ["tests.support.real_worker:longer"],
        "advantage": ["total", "group_normalize"],
        "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
        "output_dir": "nowhere",
        **changes,
    }
    return parse(plain, Config)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "freeze_vision_tower": False}, marks=pytest.mark.slow),
        pytest.param({"lora_rank": 2, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        {"dtype": "bfloat16", "lora_rank": 2, "freeze_vision_tower": False},
        {"transform": ["compression.tome"]},  # merges tokens, by numbers that are not there
        pytest.param(
            {"transform": ["compression.yopo25", {"name": "compression.fastv", "after": 1}], "lora_rank": 2},
            marks=pytest.mark.slow,
        ),
        {"transform": [{"name": "compression.structured_pruning", "ffn_units": 0.5}]},
        pytest.param(
            {"transform": ["compression.bnb_quantize"], "lora_rank": 2, "dtype": "bfloat16"},
            marks=[needs_bitsandbytes, pytest.mark.slow],
        ),
    ],
    ids=repr,
)
def test_weights_need_not_be_there(options, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(FAMILY), tmp_path / "model")
    config = config_of(folder, policy=options, references={"ref": "frozen"})
    policy = Pieces(Stream(0)).make("policy", config.policy)
    wanted = estimate_with(config, policy, real_worker.seen()[:PROMPTS])
    for file in folder.glob("*.safetensors"):
        file.unlink()
    # Tables of neighbouring patches are made once for all models.
    assert estimate_memory(config) == pytest.approx(wanted, rel=1e-3)
    assert {"learning/activations", "learning/logits", "rollouts/cache"} <= wanted.keys()


@pytest.mark.parametrize("family", ["gemma3", "glm46v", "qwen3_5"])
def test_families_with_other_layers_are_estimated(family, checkpoint):
    found = estimate_memory(config_of(checkpoint(family)))
    assert found["weights"] > 0 and found["rollouts/cache"] > 0 and found["learning/activations"] > 0


@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
def test_the_weights_of_a_checkpoint_in_few_bits_need_not_be_there(bits, checkpoint, tmp_path):
    tiny.in_few_bits(checkpoint(FAMILY), tmp_path, bits)
    config = config_of(tmp_path, policy={"lora_rank": 2})
    policy = Pieces(Stream(0)).make("policy", config.policy)
    wanted = estimate_with(config, policy, real_worker.seen()[:PROMPTS])
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert estimate_memory(config) == pytest.approx(wanted)


@needs_bitsandbytes
@pytest.mark.parametrize("double", [True, False])
def test_scales_of_few_bits_are_weights(double, checkpoint):
    few = partial(bnb_quantize, double=double)
    plain, quantized = (
        Tokens(model=str(checkpoint(FAMILY)), dtype="float32", lora_rank=2, transform=made)
        for made in ((), (few,))
    )
    found = [training(config_of("x"), policy, ())["weights"] for policy in (plain, quantized)]
    layers = plain.model.get_decoder().layers.named_modules()
    sizes = [m.weight.numel() for name, m in layers if type(m) is nn.Linear and "lora" not in name]
    # A scale for every 64 weights: of 4 bytes, or of one byte and 4 for every 256 of them, with a mean of 4.
    # Both have a table of 16 values of 4 bytes for the weights, and quantised scales one of 256.
    scales = [(-(-n // 64), 4 * -(-n // (64 * 256)) + 4 + 4 * 256) for n in sizes]
    extra = sum(64 + (one + rest if double else 4 * one) for one, rest in scales)
    assert found[1] == found[0] - 4 * sum(sizes) + sum(sizes) / 2 + extra


@pytest.fixture(scope="module")
def worded_estimate(checkpoint):
    return estimate_memory(config_of(checkpoint(FAMILY), data=f"{__name__}:worded"))


def test_servers_and_workers_sample_in_memory_of_their_own(checkpoint, worded_estimate):
    vllm = {"name": "vision.vllm", "servers": ["http://localhost:1"], "max_completion_length": 12}
    generate = {"name": "vision.generate", "max_completion_length": 12}
    for engine in ([vllm], [generate, "ray_workers"]):
        there = estimate_memory(config_of(checkpoint(FAMILY), engine=engine, data=f"{__name__}:worded"))
        here = {name: size for name, size in worded_estimate.items() if not name.startswith("rollouts/")}
        assert there == here


def test_recorded_answers_are_as_long_as_they_are(checkpoint):
    policy = Tokens(model=str(checkpoint(FAMILY)), dtype="float32")
    prompts = [replace(prompt, answers=(Outcome(text="a b"),)) for prompt in real_worker.seen()]
    tokens = len(policy.prompt_encoder.answer("a b"))
    found = memory_estimates.tokens(config_of("x", engine=["offline"]), policy, prompts)
    # 4 prompts with 2 rows each: 5 columns, and the policy of before, of 4 bytes.
    assert found["step table"] == 4 * 2 * tokens * 6 * 4 and found["learning/activations"] > 0


def test_shards_and_processes(checkpoint, worded_estimate):
    config, one = config_of(checkpoint(FAMILY), data=f"{__name__}:worded"), worded_estimate
    four, shards = (estimate_memory(config, *given) for given in ((4,), (4, True)))
    # 4 prompts on 4 processes are one on each; weights are on all, or a quarter on each.
    assert four["weights"] == one["weights"] and four["step table"] == one["step table"] / 4
    for name in ("weights", "learning/gradients", "optimizer"):
        assert shards[name] == one[name] / 4
    assert shards["rollouts/whole weights"] == 0.75 * one["weights"]
    assert 0 < shards["learning/a layer"] < one["weights"] / 2
    vllm = {"name": "vision.vllm", "servers": ["http://localhost:1"], "max_completion_length": 12}
    config = config_of(checkpoint(FAMILY), engine=[vllm], data=f"{__name__}:worded")
    elsewhere = estimate_memory(config, 4, True)
    assert "rollouts/whole weights" not in elsewhere


# All weights, a reference and micro-batches; and a pruned model with an adapter.
# `benchmarks.memory` measures six other cases.
MEASURED = ("reference", "pruned")


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED)
def test_the_estimate_is_within_15_percent_of_what_a_run_takes(case):
    line = measure_apart(case, width=256, layers=3)
    assert 0.85 < line["estimated_over_measured"] < 1.15, line
