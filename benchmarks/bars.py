"""Bars of ratios, from a file of JSON lines to a small image beside it.

python -m benchmarks.bars decode_step grpo_step
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
CACHES = ("StaticCache", "quanto 4", "visual_quant 16", "visual_quant 8", "visual_quant 2", "visual_quant 1")
PARTS = {
    "GRPO step / TRL": ("step_against_trl", "limit_step"),
    "the same by MKL": ("step_against_trl_by_mkl", "limit_step"),
    "rollout / copies": ("rollout_against_copies", "limit_rollout"),
    "learning / repeated prompts": ("learn_against_repeated", "limit_learn"),
}


def decode_step(lines: list[dict]) -> tuple[list[str], dict[str, list[float]], dict[str, list[float]]]:
    """Give names of groups, bars by their label, and limits by it: caches as multiples of DynamicCache."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if "error" not in line:
            rows = "1 row" if line["batch"] == 1 else f"{line['batch']} rows"
            group = f"{line['shared']} key heads, {rows}" + (" of one prompt" if line["group"] else "")
            found.setdefault(group, {})[line["cache"]] = line["attention_times_faster"]
    return list(found), {name: [one.get(name, 0.0) for one in found.values()] for name in CACHES}, {}


def grpo_step(lines: list[dict]) -> tuple[list[str], dict[str, list[float]], dict[str, list[float]]]:
    """Give the same for the parts of a GRPO step."""
    groups = [f"{line['visual']} visual,\n{line['length']} answer tokens" for line in lines]
    bars = {label: [line.get(name, 0.0) for line in lines] for label, (name, _) in PARTS.items()}
    return groups, bars, {label: [line[limit] for line in lines] for label, (_, limit) in PARTS.items()}


def draw(name: str) -> Path:
    """Draw a benchmark's bars; short lines are what the count of operations allows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (RESULTS / f"{name}.json").read_text().splitlines()]
    groups, bars, limits = {"decode_step": decode_step, "grpo_step": grpo_step}[name](lines)
    width = 0.8 / len(bars)
    figure, axes = pyplot.subplots(figsize=(8, 3.5))
    for i, (label, values) in enumerate(bars.items()):
        at = [number + (i - (len(bars) - 1) / 2) * width for number in range(len(groups))]
        axes.bar(at, values, width * 0.9, label=label)
        if label in limits:
            axes.hlines(
                limits[label], [x - width / 2 for x in at], [x + width / 2 for x in at], color="black", lw=1
            )
    axes.axhline(1, color="grey", lw=0.8, ls=":")
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel("times faster")
    axes.legend(fontsize=7)
    figure.tight_layout()
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path


def main() -> None:
    """Draw what is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=("decode_step", "grpo_step"))
    for name in parser.parse_args().names:
        print(draw(name))


if __name__ == "__main__":
    main()
