"""Command `mmrl keys`: lists the keys of configuration files."""

from __future__ import annotations

import argparse

from mmrl.cli import completion
from mmrl.cli.command import argument, command, print_table
from mmrl.config.loading import ConfigError, nearest
from mmrl.config.schema import BuildConfig, Config, EvaluateConfig

FILES = {"a training run": Config, "an evaluation": EvaluateConfig, "something to build": BuildConfig}


@command(
    argument(
        "prefix",
        nargs="?",
        default="",
        help="a key, or the section that keys begin with: rollout",
        completer=completion.keys,
    ),
    examples=("mmrl keys", "mmrl keys rollout", "mmrl keys learn.learning_rate"),
)
def keys(given: argparse.Namespace) -> None:
    """List the keys of configuration files with their types, defaults and meanings."""
    from mmrl.cli.describe import describe_default, describe_type
    from mmrl.config.keys import keys_of

    every = {title: list(keys_of(kind)) for title, kind in FILES.items()}
    prefix, matched = given.prefix, False
    shown: set[tuple[str, str]] = set()  # (key, default) pairs that were listed for an earlier file kind
    for title, listed in every.items():
        rows = []
        for key in listed:
            default = describe_default(key.default)
            wanted = not prefix or key.place == prefix or key.place.startswith(f"{prefix}.")
            if wanted and (key.place, default) not in shown:
                shown.add((key.place, default))
                more = f"`mmrl list {key.kind.name}`" if key.kind and prefix else ""
                comment = "; ".join(filter(None, (key.comment, more)))
                rows.append([key.place, describe_type(key.wanted), default, comment])
        if rows:
            matched = True
            print_table(["key", "type", "default", "what it is"], *rows, title=f"of {title}")
            print()
    if not matched:
        places = [key.place for listed in every.values() for key in listed]
        names = {place.rpartition(".")[2]: place for place in reversed(places)}
        near = names.get(prefix.rpartition(".")[2])
        hint = f"did you mean '{near}'?" if near else nearest(prefix, places)
        raise ConfigError(f"no key is or begins with '{prefix}'; {hint or '`mmrl keys` lists all'}")
