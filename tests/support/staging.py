"""A run in stages of the look-up table, and what is compared of two of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mmrl import cli
from mmrl.build import build, check
from mmrl.config.stages import load_stages, on_each
from mmrl.reporting import html
from mmrl.training import stages as runner
from mmrl.training.stages import check_stage_folders, train_stages
from tests.support.toys import plan

STAGES = [
    {"name": "source", "max_steps": 3, "references": {"ref": "frozen"}, "objective": {"penalty": ["k3"]}},
    {
        "name": "target",
        "references": {"ref": "frozen"},
        "objective": {"penalty": ["k3"]},
        "learn": {"learning_rate": 0.2},
        "carry": ["optimizer"],
        "max_steps": 8,
        "until": {"name": "threshold", "of": "reward", "above": 0.11, "window": 2},
        "evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 2}},
        "keep_if": {"of": "eval_share_right", "not_below": 0.0},
    },
    {"name": "last", "carry": ["sampler", "optimizer"], "rewards": ["tests.support.toys:share_right"]},
]


def staged(folder: Path, *overrides: str, stages=None, **changes):
    """Load the stages of that run."""
    raw = plan(folder, **{"max_steps": 3, "save_steps": 2, **changes})
    return load_stages(
        {**raw, "stages": json.loads(json.dumps(STAGES if stages is None else stages))}, overrides
    )


def trained(folder: Path, *overrides: str, stages=None, **changes):
    """Train them."""
    loaded = staged(folder, *overrides, stages=stages, **changes)
    on_each([stage.place for stage in loaded], lambda i: check(loaded[i].config))
    check_stage_folders(loaded)
    train_stages(loaded, lambda config: build(config, quiet=True), quiet=True)
    return loaded


def main() -> int:
    """Run a command in this process, without the pages, which take most of its time."""
    html.write_page = lambda folder: folder
    runner.write_report = lambda home, output=None: home
    return cli.main(sys.argv[1:])
