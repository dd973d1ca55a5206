"""What caches of few bits do to answers: perplexity of a text that must be recalled, and grounding in videos.

    python -m benchmarks.cache_quality --text FOLDER [--peers FOLDER]
    python -m benchmarks.cache_quality --text FOLDER --only binary_codebook
    python -m benchmarks.cache_quality --vlm FOLDER --videos FOLDER
    python -m benchmarks.cache_quality --draw

`--text` is SmolLM2-135M-Instruct as a transformers folder. 896 tokens of facts are cached, then the model
reads some of them again: 64 facts in another order ("shuffled"), or 24 facts that are repeated word for word
("verbatim", their number chosen so that the full cache's perplexity is near 1.7). KL and agreement are to the
full cache. `--vlm` is a model that was
trained on the videos of `make demo`; every prompt of `test.jsonl` is answered greedily. `--peers` is a folder
with optimum-quanto and hqq (and termcolor). `--only` measures the caches whose names match anew and leaves
the others' results. One thread. The plot, results/cache_quality.png, is made of the
results alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Callable
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

# Bits of keys and values. That keys take more was chosen on texts of other facts (`FACTS` 1 and 2).
SUMS = ((4.5, 3.5), (4, 4), (2.25, 1.75), (2, 2), (1.75, 1.25), (1.5, 1.5), (1.25, 0.75), (1, 1))
FACTS = 0


def make_facts(num: int) -> tuple[list[str], random.Random]:
    """Make up facts; gives what drew them as well."""
    draw = random.Random(FACTS)
    one = lambda words: draw.choice(words.split())
    return [
        f"{one(NAMES)} the {one(JOBS)} from {one(CITIES)} sold {draw.randint(11, 99)} {one(LOOKS)} "
        f"{one(THINGS)} to {one(NAMES)} in {one(CITIES)}."
        for _ in range(num)
    ], draw


def shuffled(tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell facts, and some of the first half again in another order."""
    facts, draw = make_facts(64)
    first = tokenizer(" ".join(facts), return_tensors="pt").input_ids[:, :CACHED]
    again = draw.sample(facts[:40], 16)
    rest = tokenizer(" " + " ".join(again), return_tensors="pt", add_special_tokens=False).input_ids
    return first, rest[:, :ASKED]


def verbatim(tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell a few facts on and on, so that the last are the third telling."""
    repeated = " ".join(make_facts(24)[0] * 4)
    ids = tokenizer(repeated, return_tensors="pt").input_ids
    return ids[:, :CACHED], ids[:, CACHED : CACHED + ASKED]


@torch.no_grad()
def read(model, first: torch.Tensor, rest: torch.Tensor, cache) -> tuple[torch.Tensor, int | None]:
    """Read the facts, then the rest in one pass: log-probabilities, and the cache's bytes before it."""
    start, nbytes = 0, None
    if cache is not None:
        model(first, past_key_values=cache)
        start, nbytes = first.shape[1], getattr(cache, "nbytes", None)
    places = torch.arange(start, start + rest.shape[1])[None]
    logp = model(rest, past_key_values=cache, position_ids=places).logits.log_softmax(-1)
    return logp, nbytes


def text_caches(config, real: torch.Tensor, peers: bool) -> dict:
    from transformers import QuantizedCache

    from mmrl.compression.caches.binary_codebook import binary_codebook
    from mmrl.compression.caches.kivi import kivi
    from mmrl.compression.caches.visual_quant import visual_quant

    kivi = partial(kivi, config, None, real, q_group_size=32)
    made = {}
    for nbits in (8, 4, 2):
        made[f"kivi {nbits} (KIVI, R 32)"] = partial(kivi, nbits=nbits, residual_length=32)
    made["kivi 2 (KIVI, R 128)"] = partial(kivi, nbits=2, residual_length=128)
    for nbits in (4, 2):
        made[f"kivi {nbits} rotated, fitted"] = partial(
            kivi, nbits=nbits, residual_length=32, rotate=True, rule="fitted"
        )
    for name, options in (
        ("kivi 2/1 rotated, fitted", {"nbits": 2, "value_nbits": 1}),
        ("kivi 2/1 rotated", {"nbits": 2, "value_nbits": 1, "rule": "range"}),
        ("kivi 2/1 fitted", {"nbits": 2, "value_nbits": 1, "rotate": False}),
        ("kivi 1 rotated, fitted", {"nbits": 1}),
    ):
        made[name] = partial(kivi, residual_length=32, **({"rotate": True, "rule": "fitted"} | options))
    calib = partial(visual_quant, config, real, real, nbits=1)
    made["CalibQuant 1"] = partial(calib, rule="shrunk", score_drop=3.0)
    made["CalibQuant 1 without calibration"] = partial(calib, rule="shrunk")
    made["quantile 1"] = partial(calib, rule="quantile")
    made["fitted 1"] = partial(calib, rule="fitted")
    made["fitted 1, groups of 32"] = partial(calib, rule="fitted", q_group_size=32)
    made["fitted 1, rotated, groups of 32"] = partial(calib, rule="fitted", rotate=True, q_group_size=32)
    for keys, values in SUMS:
        made[f"binary_codebook {keys:g}/{values:g}"] = partial(
            binary_codebook, config, None, real, nbits=keys, value_nbits=values
        )
    if peers:
        for backend, nbits in (("quanto", 4), ("quanto", 2), ("hqq", 4), ("hqq", 2), ("hqq", 1)):
            axis = int(backend == "hqq")
            made[f"{backend} {nbits}"] = partial(
                QuantizedCache, backend, config, nbits=nbits, axis_key=axis, axis_value=axis
            )
    return made


def bits_a_number(config, tokens: int, nbytes: int | None) -> float | None:
    """Measure what a cached number takes, scales, windows and slots included."""
    if nbytes is None:
        return None
    text = config.get_text_config()
    size = text.hidden_size // text.num_attention_heads
    return round(8 * nbytes / (2 * text.num_hidden_layers * text.num_key_value_heads * size * tokens), 2)


def text(folder: str, tell: Callable, peers: bool, only: str = "") -> list[dict]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
    first, rest = tell(tokenizer)
    config, real = model.config, torch.ones_like(first, dtype=torch.bool)
    full, _ = read(model, first, rest, DynamicCache(config=config))
    made = {"no cache": lambda: None, "full": lambda: DynamicCache(config=config)}
    lines = []
    for name, make in (made | text_caches(config, real, peers)).items():
        if not re.search(only, name):
            continue
        try:
            logp, nbytes = read(model, first, rest, make())
        except Exception as error:  # a peer that cannot do this is listed with its error
            lines.append({"cache": name, "error": f"{type(error).__name__}: {error}"[:120]})
            print(json.dumps(lines[-1]), flush=True)
            continue
        loss = -logp[:, :-1].gather(-1, rest[:, 1:, None]).mean()
        lines.append(
            {
                "cache": name,
                "perplexity": round(math.exp(loss), 3),
                "kl": round(float((full.exp() * (full - logp)).sum(-1).mean()), 4),
                "greedy_agreement": round(float((full.argmax(-1) == logp.argmax(-1)).float().mean()), 4),
                "bits_a_number": bits_a_number(config, first.shape[1], nbytes),
            }
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def merged(path: Path, lines: list[dict], only: str) -> list[dict]:
    """Put lines in the place of those of the same caches, new ones after the rest."""
    if not only:
        return lines
    old = [json.loads(line) for line in path.read_text().splitlines()]
    made = {one["cache"]: one for one in lines}
    return [made.pop(one["cache"], one) for one in old] + list(made.values())


def video_caches() -> dict:
    from mmrl.compression.caches.kivi import kivi
    from mmrl.compression.caches.visual_quant import visual_quant
    from mmrl.compression.caches.vl_cache import vl_cache

    made = {f"visual_quant {nbits} ": partial(visual_quant, nbits=nbits) for nbits in (8, 4, 2, 1)}
    made = {name.strip(): cache for name, cache in made.items()}
    made["visual_quant 2/1"] = partial(visual_quant, nbits=2, value_nbits=1)
    made["visual_quant 1 rotated"] = partial(visual_quant, nbits=1, rotate=True)
    for rule in ("shrunk", "centred", "quantile", "range"):
        made[f"visual_quant 1 {rule}"] = partial(visual_quant, nbits=1, rule=rule)
    made["CalibQuant 1"] = partial(visual_quant, nbits=1, rule="shrunk", score_drop=3.0)
    made["kivi 4"] = partial(kivi, nbits=4, q_group_size=32, residual_length=32)
    for keep in (0.75, 0.5):
        made[f"vl_cache {keep}"] = partial(vl_cache, keep=keep)
    return made


def videos(model: str, folder: str) -> list[dict]:
    from mmrl.config.registry import find
    from mmrl.core.rng import Stream
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
    for name, cache in video_caches().items():
        measured, rows = answer(cache)
        gap = measured - full
        same = [a.steps.ids.tolist() == b.steps.ids.tolist() for a, b in zip(rows, expected, strict=True)]
        lines.append(
            {
                "cache": name,
                "miou": round(float(measured.mean()), 4),
                "gap": round(float(gap.mean()), 4),
                "standard_error_of_gap": round(float(gap.std() / len(gap) ** 0.5), 4),
                "agreement": round(sum(same) / len(same), 4),
            }
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def bits_named(name: str) -> float | None:
    """Read the bits of keys and values off a name, "visual_quant 2/1" or "hqq 4", and average them."""
    found = re.search(r" (\d+)(?:/(\d+))?\b(?!\.)", name)
    if found is None or name.startswith("vl_cache"):
        return None
    keys, values = found.groups()
    return (int(keys) + int(values or keys)) / 2


SERIES = {  # of the plot: names that begin so, and whether a line joins them
    "KIVI (published rule)": (r"kivi \d \(KIVI, R 32\)", True),
    "rotated and fitted (ours)": (r"kivi .* rotated", True),
    "sums of vectors (ours)": (r"binary_codebook (?!\d/)", True),
    "hqq, by bits of codes alone": (r"hqq", True),
    "quanto, by bits of codes alone": (r"quanto", True),
    "one bit and no window": (r"(CalibQuant|quantile|fitted) 1", False),
}


def draw(folder: Path = RESULTS) -> Path:
    """Draw quality against bits: perplexity of the text, and what mIoU loses in the videos."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = {
        name: [json.loads(line) for line in (folder / f"cache_quality_{name}.json").read_text().splitlines()]
        for name in ("text", "videos")
    }
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for number, (label, (pattern, joined)) in enumerate(SERIES.items()):
        mine = [one for one in lines["text"] if re.match(pattern, one["cache"]) and "perplexity" in one]
        at = [one["bits_a_number"] or bits_named(one["cache"]) for one in mine]
        points = sorted(zip(at, [one["perplexity"] for one in mine], strict=True))
        style = {"color": f"C{number}", "marker": "o", "linestyle": "-" if joined else ""}
        left.plot(*zip(*points, strict=True), **style, label=label, markersize=5, linewidth=1.2)
    for name, text, above in (("full", "full cache", -12), ("no cache", "no cache at all", 4)):
        level = next(one["perplexity"] for one in lines["text"] if one["cache"] == name)
        left.axhline(level, color="#5b6b7b", linestyle=":", linewidth=1)
        left.annotate(
            text, (0.99, level), xycoords=("axes fraction", "data"), xytext=(0, above), ha="right",
            textcoords="offset points", fontsize=8,
        )  # fmt: skip
    left.set(xlabel="bits a number, scales and window included", ylabel="perplexity", yscale="log")
    left.set(ylim=(5, 250), title="SmolLM2-135M, 896 tokens of text to recall")
    left.legend(fontsize=8, frameon=False)
    _gaps(right, lines["videos"])
    path = folder / "cache_quality.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _gaps(axes, lines: list[dict]) -> None:
    """Draw what mIoU loses, with intervals of 95 %; rules of one number of bits stand side by side."""
    there: dict[float, int] = {}
    for one in lines:
        bits = bits_named(one["cache"])
        if "gap" not in one or bits is None:
            continue
        place = there[bits] = there.get(bits, -1) + 1
        colour = "C1" if one["cache"].startswith("kivi") else "C0"
        # On a scale of powers of two, every next rule stands a twelfth of a power to the right.
        at, spread = bits * 2 ** (place / 12), 1.96 * one["standard_error_of_gap"]
        axes.errorbar(at, 100 * one["gap"], 100 * spread, fmt="o", color=colour, markersize=4, elinewidth=0.8)
        short = one["cache"].removeprefix("visual_quant ").removeprefix(f"{bits:g} ")
        short = "fitted" if short == "1" else short
        if short != f"{bits:g}":
            axes.annotate(
                short, (at, 100 * (one["gap"] - spread)), xytext=(0, -4), textcoords="offset points",
                rotation=90, fontsize=7, ha="center", va="top",
            )  # fmt: skip
    axes.axhline(0, color="#5b6b7b", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set(
        xlabel="bits of codes of visual tokens", ylabel="mIoU, points above the full cache", ylim=(-16, 8)
    )
    axes.set_title("demo model, 197 held-out prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("text", "vlm", "videos", "peers"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--draw", action="store_true", help="only make the plot anew")
    parser.add_argument(
        "--told", nargs="*", choices=("shuffled", "verbatim"), default=["shuffled", "verbatim"]
    )
    parser.add_argument("--only", default="", help="a pattern of names of caches of text")
    options = parser.parse_args()
    if options.peers:
        sys.path.insert(0, options.peers)
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    tells = {"shuffled": ("text", shuffled), "verbatim": ("text_verbatim", verbatim)}
    measured = [
        (tells[told][0], partial(text, options.text, tells[told][1], bool(options.peers), options.only))
        for told in options.told
        if options.text
    ]
    if options.vlm:
        measured.append(("videos", partial(videos, options.vlm, options.videos)))
    for name, measure in measured:
        path = RESULTS / f"cache_quality_{name}.json"
        lines = merged(path, measure(), options.only if name != "videos" else "")
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if options.draw:
        draw()


if __name__ == "__main__":
    main()
