"""What caches of few bits do to answers: perplexity of a text that must be recalled, and grounding in clips.

    python -m benchmarks.cache_quality --text FOLDER [--peers FOLDER]
    python -m benchmarks.cache_quality --vlm FOLDER --clips FOLDER

`--text` is SmolLM2-135M-Instruct as a transformers folder. 896 tokens of facts are cached, then the model
reads some of them again in another order; KL and agreement are to the full cache. `--vlm` is a model that was
trained on the clips of `make demo`; every prompt of `test.jsonl` is answered greedily. `--peers` is a folder
with optimum-quanto and hqq (and termcolor). One thread.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from functools import partial
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
CACHED, ASKED = 896, 256
NAMES = (
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Klara Lukas Maria Nils Olga Peter Quinn Rosa "
    "Simon"
)
JOBS = "baker pilot teacher painter doctor carpenter lawyer gardener sailor tailor miner singer"
CITIES = (
    "Lisbon Prague Oslo Madrid Vienna Dublin Athens Warsaw Berlin Rome Paris Helsinki Zurich Krakow Porto "
    "Milan"
)
LOOKS = "red green old heavy silver broken painted wooden tiny hollow striped golden"
THINGS = "lamps chairs boats clocks mirrors drums kettles ladders carpets bells statues lanterns"


def recall(tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Make up facts, and tell some of the first half again in another order."""
    draw = random.Random(0)
    one = lambda words: draw.choice(words.split())
    facts = [
        f"{one(NAMES)} the {one(JOBS)} from {one(CITIES)} sold {draw.randint(11, 99)} {one(LOOKS)} "
        f"{one(THINGS)} to {one(NAMES)} in {one(CITIES)}."
        for _ in range(64)
    ]
    first = tokenizer(" ".join(facts), return_tensors="pt").input_ids[:, :CACHED]
    again = draw.sample(facts[:40], 16)
    behind = tokenizer(" " + " ".join(again), return_tensors="pt", add_special_tokens=False).input_ids
    return first, behind[:, :ASKED]


@torch.no_grad()
def read(model, first: torch.Tensor, behind: torch.Tensor, cache) -> torch.Tensor:
    """Read the facts, then the rest in one pass: log-probabilities."""
    start = 0
    if cache is not None:
        model(first, past_key_values=cache)
        start = first.shape[1]
    places = torch.arange(start, start + behind.shape[1])[None]
    return model(behind, past_key_values=cache, position_ids=places).logits.log_softmax(-1)


def text_caches(config, real: torch.Tensor, peers: bool) -> dict:
    from transformers import QuantizedCache

    from mmrl.compression.caches.all_bits import all_bits
    from mmrl.compression.caches.visual_bits import visual_bits

    kivi = partial(all_bits, config, None, real, q_group_size=32)
    made = {}
    for nbits in (8, 4, 2):
        made[f"all_bits {nbits} (KIVI, R 32)"] = partial(kivi, nbits=nbits, residual_length=32)
    made["all_bits 2 (KIVI, R 128)"] = partial(kivi, nbits=2, residual_length=128)
    for nbits in (4, 2):
        made[f"all_bits {nbits} rotated, fitted"] = partial(
            kivi, nbits=nbits, residual_length=32, rotate=True, rule="fitted"
        )
    for name, options in (
        ("all_bits 2/1 rotated, fitted", {"nbits": 2, "value_nbits": 1}),
        ("all_bits 1 rotated, fitted", {"nbits": 1}),
    ):
        made[name] = partial(kivi, residual_length=32, rotate=True, rule="fitted", **options)
    calib = partial(visual_bits, config, real, real, nbits=1)
    made["CalibQuant 1"] = partial(calib, rule="shrunk", score_drop=3.0)
    made["CalibQuant 1 without calibration"] = partial(calib, rule="shrunk")
    made["quantile 1"] = partial(calib, rule="quantile")
    made["fitted 1"] = partial(calib, rule="fitted")
    made["fitted 1, groups of 32"] = partial(calib, rule="fitted", q_group_size=32)
    if peers:
        for backend, nbits in (("quanto", 4), ("quanto", 2), ("hqq", 4), ("hqq", 2), ("hqq", 1)):
            axis = int(backend == "hqq")
            made[f"{backend} {nbits}"] = partial(
                QuantizedCache, backend, config, nbits=nbits, axis_key=axis, axis_value=axis
            )
    return made


def bits_a_number(config, first: torch.Tensor, cache) -> float | None:
    """Measure what the cached facts take, scales, windows and slots included, before anything follows."""
    if not hasattr(cache, "nbytes"):
        return None
    text = config.get_text_config()
    size = text.hidden_size // text.num_attention_heads
    count = 2 * text.num_hidden_layers * text.num_key_value_heads * size * first.shape[1]
    return round(8 * cache.nbytes / count, 2)


def text(folder: str, peers: bool) -> list[dict]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first, behind = recall(tokenizer)
    config, real = model.config, torch.ones_like(first, dtype=torch.bool)
    full = read(model, first, behind, DynamicCache(config=config))
    made = {"no cache": lambda: None, "full": lambda: DynamicCache(config=config)}
    lines = []
    for name, make in (made | text_caches(config, real, peers)).items():
        try:
            said = read(model, first, behind, make())
            kept = make()
            if kept is not None:
                with torch.no_grad():
                    model(first, past_key_values=kept)
        except Exception as error:  # a peer that cannot do this is told of, not hidden
            lines.append({"cache": name, "error": f"{type(error).__name__}: {error}"[:120]})
            print(json.dumps(lines[-1]), flush=True)
            continue
        loss = -said[:, :-1].gather(-1, behind[:, 1:, None]).mean()
        lines.append(
            {
                "cache": name,
                "perplexity": round(math.exp(loss), 3),
                "kl": round(float((full.exp() * (full - said)).sum(-1).mean()), 4),
                "greedy_agreement": round(float((full.argmax(-1) == said.argmax(-1)).float().mean()), 4),
                "bits_a_number": bits_a_number(config, first, kept),
            }
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def clip_caches() -> dict:
    from mmrl.compression.caches.all_bits import all_bits
    from mmrl.compression.caches.importance_drop import importance_drop
    from mmrl.compression.caches.visual_bits import visual_bits

    made = {f"visual_bits {nbits} ": partial(visual_bits, nbits=nbits) for nbits in (8, 4, 2, 1)}
    made = {name.strip(): cache for name, cache in made.items()}
    made["visual_bits 2/1"] = partial(visual_bits, nbits=2, value_nbits=1)
    made["visual_bits 1 rotated"] = partial(visual_bits, nbits=1, rotate=True)
    for rule in ("shrunk", "centred", "quantile", "range"):
        made[f"visual_bits 1 {rule}"] = partial(visual_bits, nbits=1, rule=rule)
    made["CalibQuant 1"] = partial(visual_bits, nbits=1, rule="shrunk", score_drop=3.0)
    made["all_bits 4"] = partial(all_bits, nbits=4, q_group_size=32, residual_length=32)
    for keep in (0.75, 0.5):
        made[f"importance_drop {keep}"] = partial(importance_drop, keep=keep)
    return made


def clips(model: str, folder: str) -> list[dict]:
    from mmrl.draws import Stream
    from mmrl.registry import find
    from mmrl.vision.engines.generate import Generate
    from mmrl.vision.policies.tokens import Tokens

    data = find("data", "vision.grounding").target(
        path=f"{folder}/test.jsonl", root=folder, frames_per_second=1.0, decimals=0,
        prompt="When does this happen: {query}?", stream=Stream(0),
    )  # fmt: skip
    prompts = [data[i] for i in range(len(data))]
    policy = Tokens(model=model, dtype="float32")
    overlap = find("reward", "vision.temporal_iou").target

    def answer(cache) -> tuple[torch.Tensor, list]:
        engine = Generate(
            policy, stream=Stream(0), max_completion_length=24, temperature=0.0, batch_size=64, cache=cache
        )
        rows = engine.rollout(prompts)
        return torch.tensor(overlap(prompts, [row.outcomes[-1] for row in rows])), rows

    full, expected = answer(None)
    lines = [{"cache": "full", "prompts": len(prompts), "miou": round(float(full.mean()), 4)}]
    for name, cache in clip_caches().items():
        measured, rows = answer(cache)
        gap = measured - full
        same = [a.steps.ids.tolist() == b.steps.ids.tolist() for a, b in zip(rows, expected, strict=True)]
        lines.append(
            {
                "cache": name,
                "miou": round(float(measured.mean()), 4),
                "gap": round(float(gap.mean()), 4),
                "standard_error_of_gap": round(float(gap.std() / len(gap) ** 0.5), 4),
                "same_answers": round(sum(same) / len(same), 4),
            }
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("text", "vlm", "clips", "peers"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    if options.peers:
        sys.path.insert(0, options.peers)
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    for name, lines in (
        ("text", text(options.text, bool(options.peers)) if options.text else []),
        ("clips", clips(options.vlm, options.clips) if options.vlm else []),
    ):
        if lines:
            path = RESULTS / f"cache_quality_{name}.json"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
