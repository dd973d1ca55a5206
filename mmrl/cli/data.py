"""Commands `mmrl build` (data sets and model folders) and `mmrl data check` (rows and media)."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from mmrl.cli.command import CONFIG, OVERRIDES, argument, command, print_table, printable
from mmrl.config.loading import ConfigError
from mmrl.config.schema import BuildConfig, as_plain, load


@command(
    CONFIG,
    OVERRIDES,
    argument("--overwrite", action="store_true", help="replace the result of another build"),
    examples=("mmrl build my_data.yaml output=data/mine",),
)
def build(given: argparse.Namespace) -> None:
    """Build a data set or a model folder into the `output` of a configuration.

    The folder appears when the build is complete. It replaces an earlier build of the same configuration, or
    with --overwrite a build of another configuration. A folder that is not a build is never replaced.
    """
    from mmrl.config.binding import Pieces
    from mmrl.config.misplaced import check_all
    from mmrl.core.rng import Stream
    from mmrl.runtime.folders import check_replaceable, making, mark

    config = load(given.config, given.overrides, BuildConfig)
    pieces = Pieces(Stream(config.seed))
    check_all(pieces, config)
    pieces.require_packages()
    try:
        builder = pieces.make_field(config, "build")
    except ConfigError:
        raise
    except ValueError as error:  # wrong value of an option
        raise ConfigError(f"build: {error}") from error
    output = Path(config.output)
    if getattr(builder, "goes_on", False):  # a resumable builder checks its folder itself
        facts = {"builder": config.build.name}
        check_replaceable(output, "build", overwrite=given.overwrite, **facts)
        mark(output, "build", **facts)
        counts = builder.build(output)
    else:
        facts = {"build": as_plain(config.build), "seed": config.seed}
        with making(output, "build", overwrite=given.overwrite, **facts) as folder:
            counts = builder.build(folder)
    print(f"{config.output}: " + ", ".join(f"{name} {value}" for name, value in counts.items()))


@command(
    argument("path", help="a file of rows (jsonl, json, parquet), or a folder of them"),
    argument("--root", help="folder that media paths are relative to (default: the folder of the rows)"),
    argument(
        "--model", help="model whose special tokens are searched in texts (default: common special tokens)"
    ),
    argument("--show", type=int, default=3, metavar="N", help="findings to print per check"),
    name="data check",
    examples=("mmrl data check data/questions.jsonl", "mmrl data check data/chat --model models/mine"),
)
def check_data(given: argparse.Namespace) -> int:
    """Find rows and media that are missing, broken or in several splits; exit code 1 if there are any."""
    from mmrl.config.registry import pieces
    from mmrl.data.dataset_io import Rows, SourceError, row_files

    path = Path(given.path)
    root = Path(given.root or (path if path.is_dir() else path.parent))
    if given.root and not root.is_dir():
        raise ConfigError(f"there is no folder '{root}' that media paths could be relative to")
    row_files(path)
    rows = Rows(path, root, special_tokens_of(given.model) if given.model else frozenset())
    splits = Counter(row.split for row in rows)
    if not splits:
        raise SourceError(f"'{path}' holds no rows")
    by_check = [(entry, list(entry.target(rows))) for entry in pieces("check", on="data")]
    table = [[entry.full_name, str(len(findings)), entry.summary] for entry, findings in by_check]
    print_table(["check", "found", "what it looks for"], *table)
    for entry, findings in by_check:
        for finding in findings[: given.show]:
            print(f"{entry.full_name}: {printable(f'{finding.place}: {finding.what}')}")
        if len(findings) > given.show:
            print(f"{entry.full_name}: and {len(findings) - given.show} more")
    wrong = sum(len(findings) for _, findings in by_check)
    counts = ", ".join(f"{split} {count}" for split, count in splits.items())
    print(f"{path}: {splits.total()} rows ({counts}), {wrong or 'nothing'} wrong")
    return int(wrong > 0)


def special_tokens_of(model: str) -> frozenset[str]:
    """Return the special tokens of a model (folder or hub id); ConfigError if its tokenizer is unreadable."""
    from transformers import AutoTokenizer

    from mmrl.core.plain_text import control_words
    from mmrl.runtime.modules import model_source

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_source(model), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the tokenizer of '{model}' (`--model`): {error}") from error
    return frozenset(control_words(tokenizer))
