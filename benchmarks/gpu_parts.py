"""The parts of `python -m benchmarks.gpu`: each checks one claim on the device that is there.

A part takes whether it is to be small (`toy`, for a CPU), and returns its figures and what has to hold of
them. It runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_common import (
    DEVICE,
    Claim,
    Figures,
    PartOf,
    Skipped,
    bandwidth,
    device_seconds,
    question,
    relative,
    seconds,
    small_model,
)  # fmt: skip


def shaped_model(folder: Path, toy: bool) -> tuple[Path, int]:
    """Write a model with the width of Qwen2.5-VL-3B, of as many of its layers as fit twice with an optimizer.

    Returns its folder, and its number of parameters.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    path = small_model(folder, init=0.02)
    if toy:
        model = AutoModelForImageTextToText.from_pretrained(path, use_safetensors=True)
        return path, sum(p.numel() for p in model.parameters())
    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    text.hidden_size, text.intermediate_size, text.vocab_size = 2048, 11008, 151936
    text.num_attention_heads, text.num_key_value_heads = 16, 2
    config.vision_config.out_hidden_size = 2048
    layer, embedding = 77_000_000, 311_000_000
    room = 0.7 * torch.cuda.mem_get_info()[1] / 44  # bytes a weight of two trainers, and of two gradients
    text.num_hidden_layers = max(1, min(36, int((room - embedding) // layer)))
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [16, 24, 24]}  # heads of 128 channels
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path, sum(p.numel() for p in model.parameters())


# ---- the parts


def kernels(toy: bool) -> tuple[Figures, list[Claim]]:
    """Compare the Triton kernels with torch, at every number of bits and at odd shapes."""
    if importlib.util.find_spec("triton") is None:
        raise Skipped("triton is not installed")
    from mmrl.kv_cache import quantization, triton_kernels

    if toy:
        triton_kernels.SPLIT = 256  # so that `mix` adds several programs up
    shapes = [(2, 3, 130, 8), (1, 17, 300, 40)]  # blocks, queries, tokens, channels
    shapes += [] if toy else [(1, 17, 5000, 40), (64, 8, 8192, 128)]
    worst = {"dots": 0.0, "mix": 0.0}
    for nbits in quantization.BITS:
        for blocks, queries, tokens, size in shapes:
            generator = torch.Generator().manual_seed(0)
            query = torch.randn(blocks, queries, size, generator=generator).to(DEVICE)
            weights = torch.rand(blocks, queries, tokens, generator=generator).to(DEVICE)
            codes = torch.randint(0, 2**nbits, (blocks, tokens, size), generator=generator).to(DEVICE)
            packed = quantization.pack(codes, nbits)
            exact = codes.double()
            dots = relative(triton_kernels.dots(query, packed, nbits), query.double() @ exact.mT)
            mix = relative(triton_kernels.mix(weights, packed, nbits, size), weights.double() @ exact)
            worst = {"dots": max(worst["dots"], dots), "mix": max(worst["mix"], mix)}
    return {"worst": worst, "interpreted": toy}, [Claim(name, value, 1e-5) for name, value in worst.items()]


def attention(toy: bool) -> tuple[Figures, list[Claim]]:
    """Compare attention to a shared prefix in bfloat16, and its gradients, with float64."""
    from mmrl.kv_cache.attention import attend_merged
    from mmrl.kv_cache.row_groups import RowGroups

    def computed(
        tensors: list[Tensor], owner: list[int], device: torch.device, dtype: torch.dtype
    ) -> Figures:
        inputs = [x.to(device, dtype).requires_grad_() for x in tensors]
        groups = RowGroups(torch.tensor(owner, device=device), owner[-1] + 1)
        query, *pairs = inputs
        out = attend_merged(query, tuple(pairs[:2]), tuple(pairs[2:]), groups, 128**-0.5)
        with torch.no_grad():  # one token goes another way
            alone = attend_merged(query, tuple(pairs[:2]), tuple(pairs[2:]), groups, 128**-0.5)
        names = ("query", "keys", "values", "own keys", "own values")
        gradients = torch.autograd.grad(out.sin().sum(), inputs)
        return {"output": out, "without gradients": alone} | dict(zip(names, gradients, strict=True))

    worst: Figures = {}
    for num, own in ((1, 1), (1, 70), (70, 70), (3, 70)):
        for owner in ([0, 0, 0, 0], [0, 1, 1], [0, 1]):
            generator, prompts, length = torch.Generator().manual_seed(0), owner[-1] + 1, 40 if toy else 2000
            sizes = [(len(owner), 8, num), *[(prompts, 2, length)] * 2, *[(len(owner), 2, own)] * 2]
            tensors = [torch.randn(*size, 128, generator=generator).bfloat16() for size in sizes]
            found = computed(tensors, owner, DEVICE, torch.bfloat16)
            for name, exact in computed(tensors, owner, torch.device("cpu"), torch.float64).items():
                gap = float((found[name].cpu().double() - exact).norm() / exact.norm())
                worst[name] = max(worst.get(name, 0.0), gap)
    return {"worst": worst}, [Claim(f"gap of {name}", gap, 2e-2) for name, gap in worst.items()]


def bf16_parity(toy: bool) -> tuple[Figures, list[Claim]]:
    """Compare log-probabilities of bfloat16 with float32, and those of rollouts with those of learning.

    A random model amplifies what bfloat16 rounds, the more the wider it is. So ours may not be further from
    float32 than those of transformers, with the same weights in bfloat16.
    """
    from transformers import AutoModelForImageTextToText

    from mmrl.core.rng import Stream
    from mmrl.runtime.modules import loading_onto
    from mmrl.vision.engines.generate import Generate
    from mmrl.vision.policies.tokens import Tokens

    sizes = {} if toy else {"width": 1024, "layers": 12, "heads": 8}
    with TemporaryDirectory() as place, loading_onto(None if toy else DEVICE):
        path = small_model(Path(place), **sizes)
        exact, low = (Tokens(model=str(path), dtype=dtype) for dtype in ("float32", "bfloat16"))
        for policy in (exact, low):
            policy.module.to(DEVICE)
        engine = Generate(low, stream=Stream(0), max_completion_length=12 if toy else 128)
        with torch.no_grad():
            prompts = [question(f"{i}") for i in range(2)]
            batch = low.collate(engine.rollout([prompt for prompt in prompts for _ in range(4)]))
            mask = batch.mask.bool()
            peer = (
                AutoModelForImageTextToText.from_pretrained(
                    path, dtype=torch.bfloat16, use_safetensors=True, trust_remote_code=False
                )
                .eval()
                .to(DEVICE)
            )
            noted, learned, wide, theirs = (
                values.float().cpu()[mask]
                for values in (
                    batch.notes["logp"], low(batch).logp, exact(batch).logp,
                    row_by_row(peer, batch, low.prompt_encoder.placeholders),
                )
            )  # fmt: skip
    gaps = {"rollout": noted - learned, "precision": learned - wide, "transformers": theirs - wide}
    figures: Figures = {
        name: {"mean": float(gap.abs().mean()), "max": float(gap.abs().max())} for name, gap in gaps.items()
    }
    ratio = figures["precision"]["mean"] / figures["transformers"]["mean"]
    return figures | {"tokens": int(mask.sum()), "mean_logp": float(wide.mean())}, [
        Claim("mean |dlogp| rollout", figures["rollout"]["mean"], 5e-2),
        Claim("mean |dlogp| precision / that of transformers", ratio, 1.1),
    ]


def row_by_row(model: Any, batch: Any, forbidden: list[int]) -> Tensor:
    """Compute the log-probabilities (N, T) of answers by a model of transformers, each after its prompt."""
    steps, found = batch.steps, torch.zeros(batch.mask.shape)
    for row, (number, length) in enumerate(zip(steps.which.tolist(), steps.length.tolist(), strict=True)):
        prompt, answer = steps.prompts[number].ids, steps.ids[row, :length]
        logits = model(input_ids=torch.cat([prompt, answer]).to(DEVICE)[None]).logits[0, len(prompt) - 1 : -1]
        logits[:, forbidden] = -torch.inf
        logp = logits.float().log_softmax(-1).cpu()
        found[row, :length] = logp.gather(1, answer[:, None])[:, 0]
    return found


@torch.no_grad()
def decode(toy: bool) -> tuple[Figures, list[Claim]]:
    """Compare one decode step's attention at 1 bit with FlashAttention, as shares of the bandwidth."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from benchmarks.decode_step import TEXT, attend, fill, held_bytes, make_model
    from mmrl.compression.caches.visual_quant import visual_quant

    shape = {"heads": 16, "shared": 2, "size": 128, "layers": 4}
    tokens, rows, dtype = (256, 2, torch.float32) if toy else (16384, 16, torch.bfloat16)
    model = make_model(**{**shape, "size": 16} if toy else shape).to(DEVICE, dtype)
    size, length = 16 if toy else 128, tokens + TEXT
    visual = torch.zeros(rows, length, dtype=torch.bool, device=DEVICE)
    visual[:, TEXT // 2 : TEXT // 2 + tokens] = True
    keys = torch.randn(rows, shape["shared"], length, size, device=DEVICE, dtype=dtype)
    query = torch.randn(rows, shape["heads"], 1, size, device=DEVICE, dtype=dtype)

    def cache(fused: bool) -> Any:
        made = visual_quant(model.config, visual, torch.ones_like(visual), nbits=1, fused=fused)
        fill(model, made, keys)
        return made

    fused, plain = cache(True), cache(False)
    outputs = []
    for made in (fused, plain):
        layer, new = model.model.layers[0], query[:, : shape["shared"]]
        function, scaling = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation], size**-0.5
        read = made.update(new, new, 0)
        outputs.append(function(layer.self_attn, query, *read, None, scaling=scaling, dropout=0.0)[0])
    flash = SDPBackend.MATH if toy else SDPBackend.FLASH_ATTENTION
    held = 2 * keys.nbytes * shape["layers"]

    def by_flash() -> None:
        with sdpa_kernel(flash):
            for _ in range(shape["layers"]):
                torch.nn.functional.scaled_dot_product_attention(query, keys, keys, enable_gqa=True)

    calls = {
        "one_bit": lambda: attend(model, fused, query, query[:, : shape["shared"]]),
        "flash": by_flash,
    }
    rate, times = bandwidth(toy), {name: seconds(call, 20) for name, call in calls.items()}
    figures = {
        "bandwidth_gb_s": rate / 1e9,
        "one_bit_ms": 1e3 * times["one_bit"],
        "flash_ms": 1e3 * times["flash"],
        "one_bit_share_of_bandwidth": held_bytes(fused) / times["one_bit"] / rate,
        "flash_share_of_bandwidth": held / times["flash"] / rate,
        "smaller": held / held_bytes(fused),
        "rows": rows,
        "visual_tokens": tokens,
        **{f"{name}_device_ms": 1e3 * device_seconds(call) for name, call in calls.items() if not toy},
    }
    claims = [Claim("gap of fused attention", relative(*outputs), 1e-4 if toy else 2e-2)]
    if not toy:  # on a CPU the kernels are bound by arithmetic: see benchmarks/decode_step.py
        claims.append(Claim("flash / one bit", times["flash"] / times["one_bit"], 1.0, at_least=True))
    return figures, claims


def grpo_step(toy: bool) -> tuple[Figures, list[Claim]]:
    """Compare a GRPO step of a model with the width of Qwen2.5-VL-3B with TRL's, and both gradients."""
    if importlib.util.find_spec("trl") is None:
        raise Skipped("trl is not installed: pip install trl")
    from benchmarks.grpo_step import compare_steps, make_data

    visual, length, repeats = (16, 4, 1) if toy else (256, 128, 3)
    with TemporaryDirectory() as place:
        folder = Path(place)
        model, parameters = shaped_model(folder, toy)
        data = make_data(folder, visual, 2 * repeats + 8)
        dtype = "float32" if toy else "bfloat16"
        figures = compare_steps(folder, model, data, length, repeats, dtype)
    claims = [Claim("gap of gradients", figures["gradients_differ_by"], 1e-3 if toy else 0.1)]
    if not toy:
        ratio = figures["trl_seconds"] / figures["mmrl_seconds"]
        claims.append(Claim("trl seconds / mmrl seconds", ratio, 1.0, at_least=True))
    return figures | {"parameters": parameters, "visual": visual, "length": length}, claims


def memory(toy: bool) -> tuple[Figures, list[Claim]]:
    """Compare what `mmrl estimate-memory` says with what training takes."""
    from benchmarks.memory import measure_apart

    cases = ["full"] if toy else ["full", "bfloat16", "adapter", "checkpointing"]
    size = {"width": 256, "layers": 3} if toy else {"width": 2048}
    lines = {name: measure_apart(name, **size) for name in cases}
    claims = []
    for name, line in lines.items():
        gap = abs(line["estimated_over_measured"] - 1)
        claims.append(Claim(f"{name}: |estimated / measured - 1|", gap, 0.15))
    return lines, claims


def resume(toy: bool) -> tuple[Figures, list[Claim]]:
    """Train all steps at once, and in two halves: weights have to be the same bit for bit."""
    from safetensors.torch import load_file

    from benchmarks.grpo_step import make_data, make_run
    from mmrl.runtime.checkpoint import MODEL
    from mmrl.training.loop import train

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    half, last = (1, 2) if toy else (2, 4)
    with TemporaryDirectory() as place:
        model, data = small_model(Path(place)), make_data(Path(place), 16, 8)
        weights = {}
        for name, ends in {"whole": [last], "again": [last], "resumed": [half, last]}.items():
            folder = Path(place) / name
            folder.mkdir()
            for end in ends:
                kept = {"overwrite_output_dir": False, "save_steps": half}
                train(make_run(folder, model, data, 6, max_steps=end, **kept))
            weights[name] = load_file(folder / f"run/checkpoint-{last}" / MODEL / "model.safetensors")
        weights["start"] = load_file(model / "model.safetensors")

    def unequal(name: str) -> int:
        return sum(not torch.equal(weights["whole"][key], value) for key, value in weights[name].items())

    figures = {f"weights_unlike_{name}": unequal(name) for name in ("start", "again", "resumed")}
    return figures, [
        Claim("weights that learned", figures["weights_unlike_start"], 1, at_least=True),
        Claim("weights that differ after resuming", figures["weights_unlike_resumed"], 0),
    ]


SAMPLE = """
import json, sys, time
from vllm import LLM, SamplingParams
asked = json.load(sys.stdin)
model = LLM(asked["model"], seed=0, **asked["options"])
sampling = SamplingParams(seed=0, logit_bias={t: -100.0 for t in asked["forbidden"]}, **asked["sampling"])
start = time.perf_counter()
results = model.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], sampling, use_tqdm=False)
taken = time.perf_counter() - start
answers = [[(list(one.token_ids), [step[t].logprob for t, step in zip(one.token_ids, one.logprobs)])
            for one in result.outputs] for result in results]
print("ANSWERS" + json.dumps({"seconds": taken, "answers": answers}))
"""


def vllm(toy: bool) -> tuple[Figures, list[Claim]]:
    """Compare log-probabilities of vLLM, beside the policy on one device, with those of the policy.

    MMRL_VLLM names the environment (its folder) in which vLLM is installed, if it is not in this one.
    """
    from mmrl.core.types import Outcome, Trajectory
    from mmrl.vision.decoding.token_steps import TokenRow
    from mmrl.vision.policies.tokens import Tokens

    place = os.environ.get("MMRL_VLLM", "")
    if not place and importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed, and MMRL_VLLM names no environment that has it")
    python = str(Path(place) / "bin" / "python") if place else sys.executable
    dtype, length = ("float32", 8) if toy else ("bfloat16", 128)
    with TemporaryDirectory() as folder:
        path = small_model(Path(folder))
        policy = Tokens(model=str(path), dtype=dtype)
        policy.module.to(DEVICE)
        encoded = [policy.prompt_encoder.encode(question(f"{i}")) for i in range(4)]
        options = {
            "dtype": dtype, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
            "enforce_eager": toy, "max_model_len": 1024, "max_num_batched_tokens": 4096,
            **({"block_size": 32} if toy else {"gpu_memory_utilization": 0.3}),
        }  # fmt: skip
        asked = {
            "model": str(path), "options": options, "forbidden": policy.prompt_encoder.placeholders,
            "prompts": [one.ids.tolist() for one in encoded],
            "sampling": {"n": 4, "temperature": 1.0, "max_tokens": length, "logprobs": 0, "ignore_eos": True,
                         "detokenize": False},
        }  # fmt: skip
        done = subprocess.run(
            [python, "-c", SAMPLE], input=json.dumps(asked), capture_output=True, text=True, check=False,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": ""},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"vLLM failed: {done.stderr[-1500:]}")
        told = json.loads(done.stdout.rpartition("ANSWERS")[2].splitlines()[0])  # vLLM says more at its end
        rows, noted = [], []
        for prompt, answers in zip(encoded, told["answers"], strict=True):
            for ids, logp in answers:
                row, notes = TokenRow(prompt, torch.tensor(ids)), {"token": torch.tensor(ids)}
                asked_of = question(prompt.uid)
                outcomes = (Outcome(text="", end=len(ids)),)
                rows.append(Trajectory(asked_of, prompt.uid, outcomes, row, len(ids), notes))
                noted.append(torch.tensor(logp))
        with torch.no_grad():
            ours = policy(policy.collate(tuple(rows))).logp.float().cpu()
    gap = (ours - torch.stack(noted)).abs()
    figures = {
        "mean": float(gap.mean()),
        "max": float(gap.max()),
        "tokens": gap.numel(),
        "seconds": told["seconds"],
    }
    return figures, [Claim("mean |dlogp| of vLLM", figures["mean"], 1e-3 if toy else 5e-2)]


PARTS: dict[str, PartOf] = {
    part.__name__: part for part in (kernels, attention, bf16_parity, decode, grpo_step, memory, resume, vllm)
}


def run_part(name: str, toy: bool) -> dict[str, Any]:
    """Run a part in this process: its figures, its claims, whether they hold, and how long it took."""
    start = time.perf_counter()
    try:
        figures, claims = PARTS[name](toy)
    except Skipped as reason:
        return {"status": "skipped", "reason": str(reason)}
    return {
        "status": "passed" if all(claim.holds for claim in claims) else "failed",
        "claims": {str(claim): claim.holds for claim in claims},
        "figures": figures,
        "seconds": round(time.perf_counter() - start, 1),
    }
