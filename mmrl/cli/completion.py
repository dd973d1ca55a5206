"""Completion of command lines in a shell, by argcomplete where it is installed.

After `pip install 'mmrl[completion]'` put `eval "$(register-python-argcomplete mmrl)"` into the start file of
bash or zsh.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Completer = Callable[..., Iterable[str]]


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell with completions, and end the process, where it is a shell that asks."""
    try:
        import argcomplete  # pyright: ignore[reportMissingImports]
    except ImportError:  # an extra
        return
    argcomplete.autocomplete(parser, always_complete_options=False)


def configs(prefix: str, **_: Any) -> list[str]:
    """List YAML files and folders that begin with a prefix: in the working directory, and mmrl's own runs."""
    folder = Path(prefix).parent
    own = Path(__file__).parents[1] / "configs"
    found = []
    for home in (Path(), own):
        for path in sorted((home / folder).glob("*")):
            name = path.relative_to(home).as_posix()
            if path.is_dir():
                found.append(f"{name}/")
            elif path.suffix == ".yaml":
                found.append(name)
    return [name for name in dict.fromkeys(found) if name.startswith(prefix)]


def overrides(prefix: str, **_: Any) -> list[str]:
    """List keys of a training run that begin with a prefix, with the sign before the value."""
    from mmrl.config.keys import keys_of
    from mmrl.config.schema import Config

    return [f"{key.place}=" for key in keys_of(Config) if key.place.startswith(prefix)]


def kinds(prefix: str, **_: Any) -> list[str]:
    """List the kinds of pieces."""
    from mmrl.config.registry import HOMES

    return sorted(kind for kind in HOMES if kind.startswith(prefix))


def names(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """List the pieces of the kind that stands before."""
    from mmrl.config.registry import HOMES, pieces

    listed = pieces(parsed_args.kind) if parsed_args.kind in HOMES else []
    return [entry.full_name for entry in listed if entry.full_name.startswith(prefix)]


def keys(prefix: str, **_: Any) -> list[str]:
    """List keys and sections of a training run that begin with a prefix."""
    places = [text.removesuffix("=") for text in overrides(prefix)]
    return sorted({*places, *(place.rpartition(".")[0] for place in places)} - {""})
