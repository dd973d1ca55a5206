"""One decode step over a long visual prompt, cache by cache: seconds, bytes, and the limit that memory sets.

    python -m benchmarks.decode_step [--tokens 4096] [--steps 15] [--peers FOLDER]

One thread, float32, a Llama decoder of transformers with random weights. "attention" is what a step does with
its cache: `update` and the attention function of every layer. "step" is `model(input_ids,
past_key_values=cache)`, in which linear layers cost the same for every cache. Times are medians of the
thread's processor time, and caches take turns, so that a busy machine is unfair to none. "group" is a prompt
that `batch` rows answer. `--peers` is a folder with optimum-quanto and hqq (and termcolor), which
transformers' QuantizedCache needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.machine import describe

TEXT = 64  # tokens of text around the visual ones
RESULTS = Path(__file__).parent / "results" / "decode_step.json"


def make_model(heads: int, shared: int, size: int, layers: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=heads * size,
        intermediate_size=2 * heads * size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=512,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def candidates(model, visual: torch.Tensor, peers: bool) -> dict[str, Callable]:
    from transformers import DynamicCache, QuantizedCache, StaticCache

    from mmrl.compression.caches.kivi import kivi
    from mmrl.compression.caches.visual_quant import visual_quant

    config, real = model.config, torch.ones_like(visual)
    made: dict[str, Callable] = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "StaticCache": lambda: StaticCache(config=config, max_cache_len=visual.shape[1] + 128),
    }
    for nbits in (16, 8, 4, 2, 1):
        made[f"visual_quant {nbits}"] = lambda n=nbits: visual_quant(config, visual, real, nbits=n)
    made["visual_quant 1, dense"] = lambda: visual_quant(config, visual, real, nbits=1, fused=False)
    made["kivi 2"] = lambda: kivi(config, None, real, nbits=2)
    if peers:
        for backend, nbits in (("quanto", 4), ("quanto", 2), ("hqq", 4), ("hqq", 1)):
            made[f"{backend} {nbits}"] = lambda b=backend, n=nbits: QuantizedCache(
                backend=b, config=config, nbits=n, axis_key=0 + (b == "hqq"), axis_value=0 + (b == "hqq")
            )
    return made


@torch.no_grad()
def fill(model, cache, keys: torch.Tensor) -> None:
    """Put a prompt into a cache without computing it: keys and values of noise for every layer."""
    for layer in range(model.config.num_hidden_layers):
        cache.update(keys + layer, keys - layer, layer)


def copy_rate() -> float:
    """Measure bytes a second that this thread reads from memory."""
    x = torch.zeros(1 << 26)
    x.sum()
    times = []
    for _ in range(5):
        start = time.thread_time()
        x.sum()
        times.append(time.thread_time() - start)
    return x.numel() * 4 / median(times)


def held_bytes(cache) -> int | None:
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    tensors = [t for one in cache.layers for t in (one.keys, one.values) if isinstance(t, torch.Tensor)]
    quantized = any(hasattr(one, "_quantized_keys") for one in cache.layers)
    return None if quantized else sum(t.numel() * t.element_size() for t in tensors)


@torch.no_grad()
def attend(model, cache, query: torch.Tensor, key: torch.Tensor) -> None:
    """Do what a decode step does with a cache, and nothing else: update and attention of every layer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for number, layer in enumerate(model.model.layers):
        keys, values = cache.update(key, key, number)
        function = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
        function(layer.self_attn, query, keys, values, None, scaling=query.shape[-1] ** -0.5, dropout=0.0)


def coded_bytes(cache) -> int | None:
    """Measure codes and scales of the visual tokens alone."""
    layers = [layer for layer in cache.layers if hasattr(layer, "shared_parts")]
    return sum(p.block.nbytes for layer in layers for p in layer.shared_parts() if p.visual) or None


def run(shape: dict[str, int], tokens: int, steps: int, batch: int, peers: bool, group: bool) -> list[dict]:
    model = make_model(**shape)
    length = tokens + TEXT
    filled = 1 if group else batch
    visual = torch.zeros(filled, length, dtype=torch.bool)
    visual[:, TEXT // 2 : TEXT // 2 + tokens] = True
    keys = torch.randn(filled, shape["shared"], length, shape["size"])
    query = torch.randn(batch, shape["heads"], 1, shape["size"])
    caches, lines, seconds, alone = {}, [], {}, {}
    for name, make in candidates(model, visual, peers).items():
        try:
            caches[name] = make()
            fill(model, caches[name], keys)
            if group:
                caches[name].batch_select_indices(torch.zeros(batch, dtype=torch.int64))
            seconds[name], alone[name] = [], []
        except Exception as error:  # a peer that cannot do this shape is listed with its error
            caches.pop(name, None)
            lines.append({"cache": name, "error": f"{type(error).__name__}: {error}"[:120]})
    token, past = torch.ones(batch, 1, dtype=torch.int64), torch.tensor([[length]])
    for step in range(steps + 2):
        for name, cache in list(caches.items()):
            start = time.thread_time()
            try:
                with torch.no_grad():
                    model(token, past_key_values=cache, position_ids=(past + 2 * step).expand(batch, 1))
                middle = time.thread_time()
                attend(model, cache, query, query[:, : shape["shared"]])
            except Exception as error:
                caches.pop(name)
                lines.append({"cache": name, "error": f"{type(error).__name__}: {error}"[:120]})
                continue
            if step >= 2:
                seconds[name].append(middle - start)
                alone[name].append(time.thread_time() - middle)
    weights = sum(p.numel() * 4 for p in model.parameters()) - model.get_input_embeddings().weight.numel() * 4
    rate, base = copy_rate(), {"step": median(seconds["DynamicCache"]), "own": median(alone["DynamicCache"])}
    half = 2 * batch * shape["layers"] * shape["shared"] * shape["size"] * length * 2
    for name, cache in caches.items():
        held, coded = held_bytes(cache), coded_bytes(cache)
        step, own = median(seconds[name]), median(alone[name])
        lines.append(
            {
                "cache": name, **shape, "batch": batch, "group": group, "visual_tokens": tokens,
                "attention_ms": round(1e3 * own, 2),
                "attention_quartiles_ms": [round(1e3 * q, 2) for q in quantiles(alone[name], n=4)[::2]],
                "attention_times_faster": round(base["own"] / own, 2),
                "attention_limit_ms": held and round(1e3 * held / rate, 2),
                "step_ms": round(1e3 * step, 2),
                "step_times_faster": round(base["step"] / step, 2),
                "step_limit_times_faster": held and round((weights + 2 * half) / (weights + held), 2),
                "bytes": held,
                "smaller_than_bfloat16": held and round(half / held, 2),
                "visual_part_smaller": coded and round(half * tokens / length / coded, 2),
            }
        )  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--peers", default="")
    options = parser.parse_args()
    if options.peers:
        sys.path.insert(0, options.peers)
    torch.set_num_threads(1)
    machine = describe()
    lines = []
    few = {"heads": 12, "shared": 2, "size": 64, "layers": 4}
    many = {"heads": 12, "shared": 12, "size": 64, "layers": 4}
    for shape, batch, group in ((many, 1, False), (few, 1, False), (few, 8, False), (few, 8, True)):
        for line in run(shape, options.tokens, options.steps, batch, bool(options.peers), group):
            lines.append(line | {"machine": machine})
            print(json.dumps(lines[-1]), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
