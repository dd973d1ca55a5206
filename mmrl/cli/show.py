"""Commands that show what there is: pieces with their options, and versions."""

from __future__ import annotations

import argparse
import inspect
from importlib import metadata

from mmrl.cli.command import argument, command, print_table
from mmrl.config.loading import ConfigError

PACKAGES = (
    "mmrl", "torch", "torchvision", "transformers", "accelerate", "peft", "datasets", "av", "diffusers",
    "open_clip_torch", "timm", "bitsandbytes", "tensorboard",
)  # fmt: skip


@command(
    argument("kind", nargs="?", help="advantage, surrogate, reward, ...; all kinds if left out"),
    name="list",
    examples=("mmrl list reward",),
)
def show(given: argparse.Namespace) -> None:
    """List pieces with their options and defaults."""
    from mmrl.config.registry import HOMES, pieces

    if given.kind is not None and given.kind not in HOMES:
        raise ConfigError(f"there is no kind '{given.kind}'; there are {', '.join(sorted(HOMES))}")
    for kind in [given.kind] if given.kind else sorted(HOMES):
        rows = []
        for entry in pieces(kind):
            options = []
            for name, default in ((name, p.default) for name, p in entry.options.items() if name != "stream"):
                # A default that is a piece is shown by its name.
                shown = f"={getattr(default, 'name', default)}"
                options.append(name if default is inspect.Parameter.empty else name + shown)
            rows.append([entry.full_name, entry.on, ", ".join(options), entry.summary])
        table = [["name", "runs on", "options", "what it does"], *rows]
        if not any(row[1] for row in rows):  # a kind without stages
            table = [[name, *rest] for name, _, *rest in table]
        if rows:
            print_table(*table, title=kind)
            print()


@command()
def env(given: argparse.Namespace) -> None:
    """Print versions for a bug report."""
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
