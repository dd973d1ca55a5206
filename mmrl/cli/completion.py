"""Shell completion of command lines with argcomplete, if it is installed.

After `pip install 'mmrl[completion]'` add `eval "$(register-python-argcomplete mmrl)"` to .bashrc or .zshrc.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Completer = Callable[..., Iterable[str]]


def complete(parser: argparse.ArgumentParser) -> None:
    """Print completions and end the process if a shell requested completions; otherwise do nothing."""
    try:
        import argcomplete  # pyright: ignore[reportMissingImports]
    except ImportError:  # argcomplete is optional
        return
    argcomplete.autocomplete(parser, always_complete_options=False)


def configs(prefix: str, **_: Any) -> list[str]:
    """List YAML files and folders whose paths start with `prefix`, here and in mmrl's configs."""
    folder = Path(prefix).parent
    own = Path(__file__).parents[1] / "configs"
    paths = []
    for home in (Path(), own):
        for path in sorted((home / folder).glob("*")):
            name = path.relative_to(home).as_posix()
            if path.is_dir():
                paths.append(f"{name}/")
            elif path.suffix == ".yaml":
                paths.append(name)
    return [name for name in dict.fromkeys(paths) if name.startswith(prefix)]


def overrides(prefix: str, **_: Any) -> list[str]:
    """List the keys of a training run that start with a prefix, each followed by `=`."""
    from mmrl.config.keys import keys_of
    from mmrl.config.schema import Config

    return [f"{key.place}=" for key in keys_of(Config) if key.place.startswith(prefix)]


def kinds(prefix: str, **_: Any) -> list[str]:
    """List the kinds of pieces, such as `reward`, whose names start with a prefix."""
    from mmrl.config.registry import HOMES

    return sorted(kind for kind in HOMES if kind.startswith(prefix))


def names(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """List the pieces whose names start with a prefix, of the kind given earlier on the command line."""
    from mmrl.config.registry import HOMES, pieces

    listed = pieces(parsed_args.kind) if parsed_args.kind in HOMES else []
    return [entry.full_name for entry in listed if entry.full_name.startswith(prefix)]


def keys(prefix: str, **_: Any) -> list[str]:
    """List the keys and sections of a training run that start with a prefix."""
    places = [text.removesuffix("=") for text in overrides(prefix)]
    return sorted({*places, *(place.rpartition(".")[0] for place in places)} - {""})
