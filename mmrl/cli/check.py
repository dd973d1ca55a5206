"""Command `mmrl check`: checks configuration files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mmrl.cli import completion
from mmrl.cli.command import argument, command, one_line, split_overrides
from mmrl.config.loading import ConfigError, read
from mmrl.config.schema import BuildConfig, Config, EvaluateConfig, is_part, load, parse_some


@command(
    argument(
        "configs",
        nargs="+",
        metavar="config",
        help="files, then changes of all of them: key=value",
        completer=lambda prefix, **rest: completion.configs(prefix) + completion.overrides(prefix),
    ),
    argument("--data", action="store_true", help="read all rows, and show them to the samplers and rewards"),
    examples=(
        "mmrl check my_run.yaml other.yaml",
        "mmrl check my_run.yaml --data",
        "mmrl check my_run.yaml learn.learning_rate=2e-5",
    ),
)
def check(given: argparse.Namespace) -> int:
    """Check configuration files, and that the files in them exist; print an error for each wrong file.

    No weights are loaded. The first rows of data are read. With --data all rows are read, which also finds
    samplers without prompts, missing columns, prompts that the model cannot read, and targets that do not get
    full marks as answers to their own rows.
    """
    paths, overrides = split_overrides(given.configs)
    if not paths:
        raise ConfigError(f"'{overrides[0]}' changes a key, but no file is named: mmrl check my_run.yaml ...")
    code = 0
    for path in paths:
        try:
            check_file(path, overrides, inputs=True, data=given.data)
            print(f"ok     {path}")
        except ConfigError as error:
            code = 2
            print(f"wrong  {path}: {one_line(error).removeprefix(f'{path}: ')}")
    return code


def check_file(
    path: str | Path, overrides: Sequence[str] = (), *, inputs: bool = False, data: bool = False
) -> None:
    """Check names and options in the configuration of a training run (or part of it), evaluation or build.

    With `inputs`, also check that the named files, folders and columns exist. With `data`, check all rows.
    """
    from mmrl.build import check as check_run
    from mmrl.build import check_data
    from mmrl.config.binding import Pieces
    from mmrl.config.consistency import check_some
    from mmrl.config.misplaced import check_all
    from mmrl.config.stages import load_stages, on_each
    from mmrl.core.rng import Stream
    from mmrl.diagnostics.inputs import check_inputs
    from mmrl.pareto import check_settings
    from mmrl.runtime.folders import check_writable

    raw = read(path, overrides)
    if not raw:
        raise ConfigError("the file is empty")

    def check_inputs_and_data(config: Config | EvaluateConfig) -> None:
        if inputs:
            check_inputs(config)
            check_writable(Path(config.output_dir))
        if data:
            for line in check_data(config):
                print(f"       {line}")

    if "build" in raw:
        check_all(Pieces(Stream()), load(path, overrides, BuildConfig))
    elif is_part(raw) and not raw.get("stages"):
        check_some(raw, parse_some(raw, Config))
    elif raw.get("stages"):
        stages = load_stages(path, overrides)

        def check_stage(i: int) -> None:
            check_run(config := stages[i].config)
            outputs = [stage.config.output_dir for stage in stages[:i]]  # of stages that have not run yet
            check_inputs_and_data(replace(config, init_from="") if config.init_from in outputs else config)

        on_each([stage.place for stage in stages], check_stage)
    else:
        kind, check_whole = (Config, check_run) if "rollout" in raw else (EvaluateConfig, check_settings)
        config = load(path, overrides, kind)
        check_whole(config)
        check_inputs_and_data(config)
