"""Commands `mmrl list` (pieces and methods) and `mmrl env` (versions)."""

from __future__ import annotations

import argparse
import inspect
from importlib import metadata

from mmrl.cli import completion
from mmrl.cli.command import argument, command, print_table
from mmrl.config.loading import ConfigError, import_modules, nearest

PACKAGES = (
    "mmrl", "torch", "torchvision", "transformers", "accelerate", "peft", "datasets", "av", "diffusers",
    "open_clip_torch", "timm", "bitsandbytes", "tensorboard",
)  # fmt: skip


METHODS = "methods"  # argument of `mmrl list` besides the kinds of pieces


@command(
    argument(
        "kind",
        nargs="?",
        help="advantage, surrogate, reward, ..., or methods; all kinds of pieces if left out",
        completer=lambda prefix, **rest: sorted([*completion.kinds(prefix), METHODS]),
    ),
    argument(
        "piece",
        nargs="?",
        help="one piece of that kind, or one method, to show whole",
        completer=completion.names,
    ),
    argument("--family", help="of methods, only those of one family: grpo, flow, ..."),
    argument(
        "--imports", action="append", default=[], metavar="MODULE", help="a module of yours with pieces"
    ),
    name="list",
    examples=("mmrl list reward", "mmrl list reward short_answer", "mmrl list methods --family grpo"),
)
def show(given: argparse.Namespace) -> None:
    """List pieces with their options, or methods by family; or describe one piece or method in full."""
    from mmrl.config.binding import FILLED
    from mmrl.config.registry import HOMES, pieces

    import_modules(given.imports)
    if given.kind == METHODS:
        return show_method(given.piece) if given.piece else show_methods(given.family)
    if given.family:
        raise ConfigError(f"--family is one of methods: mmrl list {METHODS} --family {given.family}")
    if given.kind is not None and given.kind not in HOMES:
        near, there = (
            nearest(given.kind, [*HOMES, METHODS]),
            f"there are {', '.join([*sorted(HOMES), METHODS])}",
        )
        raise ConfigError(f"there is no kind '{given.kind}'; {near or there}")
    if given.piece:
        return show_piece(given.kind, given.piece)
    for kind in [given.kind] if given.kind else sorted(HOMES):
        rows = []
        for entry in pieces(kind):
            options = []
            shown_options = ((name, p.default) for name, p in entry.options.items() if name not in FILLED)
            for name, default in shown_options:
                # Show a default that is a piece by the name of the piece.
                shown = f"={getattr(default, 'name', default)}"
                options.append(name if default is inspect.Parameter.empty else name + shown)
            rows.append([entry.full_name, entry.on, ", ".join(options), entry.summary])
        table = [["name", "runs on", "options", "what it does"], *rows]
        if not any(row[1] for row in rows):  # hide an empty column
            table = [[name, *rest] for name, _, *rest in table]
        if rows:
            print_table(*table, title=kind)
            print()


def show_methods(family: str | None) -> None:
    """List methods with papers, differences from GRPO and our readings of them; best-known methods first."""
    from mmrl.reporting.methods import all_methods, tables

    families = dict.fromkeys(method.family for method in all_methods())
    if family is not None and family not in families:
        near, there = nearest(family, families), f"there are {', '.join(families)}"
        raise ConfigError(f"there is no family of methods '{family}'; {near or there}")
    for title, methods in tables(family).items():
        rows = []
        for method in methods:
            named = ", ".join(entry.full_name for entry in method.pieces_read_by_us())
            reading = " ".join([*method.readings, *([f"Of pieces: {named}"] if named else [])])
            rows.append([method.name, " ".join(method.papers), method.differs, reading])
        print_table(["name", "arXiv", "what differs from GRPO", "our reading"], *rows, title=title)
        print()


def show_method(name: str) -> None:
    """Print a method's configuration file, and its pieces with our readings of the papers."""
    from mmrl.reporting.methods import all_methods, readings

    by_name = {method.name: method for method in all_methods()}
    if name not in by_name:
        near = nearest(name, by_name)
        raise ConfigError(f"there is no method '{name}'; {near or f'mmrl list {METHODS} names all'}")
    method = by_name[name]
    print(f"{method.path.read_text().strip()}\n")
    print_table(
        ["piece", "kind", "our reading", "what it does"],
        *(
            [
                entry.full_name,
                entry.kind,
                " ".join(readings(inspect.getdoc(entry.target) or "")),
                entry.summary,
            ]
            for entry in method.pieces()
        ),
    )
    print(f"\nfile: {method.path}\n\ninclude: [methods/{method.family}/{method.name}.yaml]")


def show_piece(kind: str, name: str) -> None:
    """Print a description of a piece: text, options, packages, source file and example YAML.

    The package can be omitted from `name` if the rest is unique.
    """
    from mmrl.cli.describe import describe_default, describe_option, split_docstring, yaml_of
    from mmrl.config.binding import CALLED_WITH, FILLED
    from mmrl.config.registry import find, pieces

    short = [entry.full_name for entry in pieces(kind) if entry.name == name]
    entry = find(kind, short[0] if len(short) == 1 else name)
    words, meanings = split_docstring(inspect.getdoc(entry.target) or "")
    print(f"{kind} {entry.full_name}\n\n{words}\n")
    rows = [
        [
            option,
            describe_option(entry, option),
            describe_default(parameter.default),
            meanings.get(option, ""),
        ]
        for option, parameter in entry.options.items()
        if option not in FILLED
    ]
    if rows:
        print_table(["option", "type", "default", "what it is"], *rows)
        print()
    if kind in CALLED_WITH:
        print(f"every {kind} also takes: {', '.join(CALLED_WITH[kind])}")
    for package, extra in entry.packages.items():
        only, _, package = package.rpartition(":")
        print(f"needs the package {package}{only and f' with {only}'}: pip install 'mmrl[{extra}]'")
    target = inspect.unwrap(entry.target)
    print(f"file: {inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}\n\n{yaml_of(entry)}")


@command()
def env(given: argparse.Namespace) -> None:
    """Print the versions of Python, packages and devices for a bug report."""
    import platform

    import torch

    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in PACKAGES:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} not installed")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"devices: {', '.join(devices) or f'cpu, {torch.get_num_threads()} threads'}")
