"""The command that checks configurations."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.command import argument, command, one_line
from mmrl.config.loading import ConfigError, read
from mmrl.config.schema import BuildConfig, Config, EvaluateConfig, is_part, load, parse_some


@command(argument("configs", nargs="+"), examples=("mmrl check my_run.yaml other.yaml",))
def check(given: argparse.Namespace) -> int:
    """Check configuration files without loading anything; print the error of each that is wrong."""
    code = 0
    for path in given.configs:
        try:
            check_file(path)
            print(f"ok     {path}")
        except ConfigError as error:
            code = 2
            print(f"wrong  {path}: {one_line(error)}")
    return code


def check_file(path: str | Path) -> None:
    """Check every name and option of a file: a run, an evaluation, something to build, or a variant."""
    from mmrl.build import check as check_run
    from mmrl.config.binding import Pieces
    from mmrl.config.consistency import check_some
    from mmrl.core.rng import Stream
    from mmrl.pareto import check_settings

    raw = read(path)
    if not raw:
        raise ConfigError("the file is empty")
    if "build" in raw:
        Pieces(Stream()).check_all(load(path, kind=BuildConfig))
    elif is_part(raw):
        check_some(raw, parse_some(raw, Config))
    elif "rollout" in raw:
        check_run(load(path, kind=Config))
    else:
        check_settings(load(path, kind=EvaluateConfig))
