"""Commands `mmrl train`, `mmrl doctor`, `mmrl estimate-memory` and `mmrl report`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.command import CONFIG, OVERRIDES, argument, command, for_terminal, print_measured
from mmrl.config.loading import ConfigError
from mmrl.config.stages import Stage, load_stages, on_each

if TYPE_CHECKING:
    from mmrl.doctor import Diagnosis


@command(
    CONFIG,
    OVERRIDES,
    examples=("mmrl train my_run.yaml", "mmrl train my_run.yaml learn.learning_rate=2e-5 output_dir=runs/b"),
)
def train(given: argparse.Namespace) -> None:
    """Run a training, stage by stage, into `output_dir`; resume from the last checkpoint if there is one."""
    from mmrl.build import build as make
    from mmrl.build import check
    from mmrl.training.checkpointing import check_output_folder
    from mmrl.training.loop import train as go
    from mmrl.training.stages import check_stage_folders, train_stages

    stages = load_stages(given.config, given.overrides)
    if stages[0].name:
        on_each([stage.place for stage in stages], lambda i: check(stages[i].config).require_packages())
        check_stage_folders(stages)
        final = train_stages(stages, make)
    else:
        check_output_folder(stages[0].config)
        run = make(stages[0].config)
        go(run)
        final = run.final if run.processes.main else None
    if final is not None:
        print_measured(final)


@command(CONFIG, OVERRIDES, examples=("mmrl doctor my_run.yaml",))
def doctor(given: argparse.Namespace) -> int:
    """Run all checks of a training run on a few rollouts; exit with code 1 for serious findings."""
    from mmrl.build import check
    from mmrl.doctor import examine

    stages = load_stages(given.config, given.overrides)
    on_each([stage.place for stage in stages], lambda i: check(stages[i].config))
    healthy = True
    for stage in stages:
        _title(stage)
        report = examine(stage.config)
        _print_diagnosis(report)
        healthy = healthy and report.healthy
    return 0 if healthy else 1


def _title(stage: Stage) -> None:
    if stage.name:
        print(f"== stage {stage.name}")


def _print_diagnosis(report: Diagnosis) -> None:
    for entry, findings in report.found:
        verdict = "wrong" if any(finding.grave for finding in findings) else "ok   "
        print(f"{verdict}  {entry.full_name}: {entry.summary}")
        for finding in findings:
            advice = f"What to do: {finding.advice}" if finding.grave else finding.advice
            print(f"       {finding.what}.\n       {advice}.")
    print("one rollout, its prompt as the model reads it:")
    for name, text in report.example.items():
        print(f"{name:>9}  " + for_terminal(text).replace("\n", f"\n{'':11}"))
    _print_memory(report.memory, report.room, report.device)


@command(
    CONFIG,
    OVERRIDES,
    argument("--num_processes", type=int, default=1, help="of the run; the estimate is of one (default: 1)"),
    argument("--fsdp2", action="store_true", help="weights are shared out among them"),
    examples=(
        "mmrl estimate-memory my_run.yaml rollout.num_prompts=64",
        "mmrl estimate-memory my_run.yaml --num_processes 8 --fsdp2",
    ),
)
def estimate_memory(given: argparse.Namespace) -> int:
    """Estimate the memory of a training run by component; exit with code 1 if it exceeds the device's.

    No weights are loaded, except for checkpoints that a library other than bitsandbytes quantised.
    """
    from mmrl.build import check
    from mmrl.diagnostics import memory_estimates

    if given.num_processes < 1:
        raise ConfigError(f"--num_processes must be at least 1, not {given.num_processes}")
    stages = load_stages(given.config, given.overrides)
    on_each([stage.place for stage in stages], lambda i: check(stages[i].config))
    room, device = memory_estimates.room()
    largest = 0.0
    for stage in stages:
        _title(stage)
        memory = memory_estimates.estimate_memory(stage.config, given.num_processes, given.fsdp2)
        _print_memory(memory, room, device)
        largest = max(largest, memory_estimates.peak(memory))
        if not any("activations" in name for name in memory):
            print("without activations, which `mmrl doctor` measures")
        elif card := memory_estimates.smallest_card(memory_estimates.peak(memory)):
            print(f"fits a GPU of {card} GB, such as {memory_estimates.CARDS[card]}")
        else:
            print(f"fits no single GPU of at most {max(memory_estimates.CARDS)} GB")
    return int(0 < room < largest)


def _print_memory(memory: Mapping[str, float], room: float, device: str) -> None:
    from mmrl.diagnostics.memory_estimates import peak

    for name, size in sorted(memory.items(), key=lambda item: -item[1]):
        print(f"{size / 1e9:10.3f} GB  {name}")
    print(f"{peak(memory) / 1e9:10.3f} GB  at once, of {room / 1e9:.3f} GB ({device})")


@command(
    argument("runs", nargs="+", type=Path, metavar="RUN", help="the output_dir of a training run"),
    argument(
        "--output",
        type=Path,
        help="the page to write (default: report.html of the one run, or comparison.html here)",
    ),
    argument(
        "--group",
        nargs="+",
        default=(),
        metavar="KEY",
        help="settings whose equal values make a group of runs (default: all settings but the seed)",
    ),
    examples=(
        "mmrl report runs/a",
        "mmrl report runs/a runs/b --output both.html",
        "mmrl report runs/*-seed* --group objective learn.learning_rate --output report.html",
    ),
)
def report(given: argparse.Namespace) -> None:
    """Write the page of a run, or one page that compares several runs or the stages of a run.

    Runs that differ only in their seed form a group: curves show their mean and range. The page of several
    runs has paired differences of their last evaluations, settings, commit, packages, seconds and energy; its
    figures are also written as SVG and CSV, into the folder `{page}_figures` beside the page.
    """
    from mmrl.reporting.html import find_run, write_comparison, write_page
    from mmrl.runtime.stages import read_stages
    from mmrl.training.stages import write_report

    if given.group and len(given.runs) == 1:
        raise ConfigError("--group needs several runs")
    if len(given.runs) == 1 and read_stages(given.runs[0]):
        path = write_report(given.runs[0], given.output)
    elif len(given.runs) == 1:
        path = write_page(find_run(given.runs[0]).folder, given.output)
    else:
        path = write_comparison(given.runs, given.output or Path("comparison.html"), group=given.group)
    print(f"report: {path}")
