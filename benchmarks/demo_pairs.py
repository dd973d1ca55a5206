"""What `make demo-pairs` shows at several seeds, and all held-out images together.

    python -m examples.preference_pairs.demo --seed 0 --output runs/demo-pairs0  # and so on
    python -m benchmarks.demo_pairs runs/demo-pairs0 runs/demo-pairs1 runs/demo-pairs2

Copies the tables of the summaries, and joins the images of all seeds: how many fewer wrong objects a
caption names, paired by image, with a 95 % bootstrap interval over images. Every seed has its own
images, judge, captioner and pairs, so images of one seed share what is particular to it; the means of
the single seeds say how much that is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.preference_pairs.demo import RULES, mean_with_interval

RESULTS = Path(__file__).parent / "results" / "demo_pairs.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read summaries, and write and print what they say together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in given.folders]
    wrong = [json.loads((folder / "held_out.json").read_text()) for folder in given.folders]
    together = {}
    for name in ("start", *RULES):
        numbers = {other: torch.tensor(sum((one[other] for one in wrong), [])).double() for other in wrong[0]}
        pairs = {"fewer than the start": ("start", name), "fewer with clip": (name, "clip")}
        together[name] = {"hallucinated objects": float(numbers[name].mean())}
        for label, (before, after) in pairs.items():
            if before != after:
                mean, ends = mean_with_interval(numbers[before] - numbers[after])
                together[name][label] = {"mean": mean, "interval": list(ends)}
    RESULTS.write_text(
        json.dumps({"images": len(numbers["clip"]), "together": together, "seeds": summaries}) + "\n"
    )
    print(json.dumps(together, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
