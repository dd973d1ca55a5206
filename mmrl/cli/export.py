"""Commands `mmrl export` (writes a model as a folder) and `mmrl push` (uploads a model folder)."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.command import argument, command
from mmrl.config.loading import ConfigError


@command(
    argument("source", help="the folder of a run or of a checkpoint, a YAML file, or a model"),
    argument("output", type=Path, help="the folder to write"),
    argument("overrides", nargs="*", metavar="key=value", help="changes, dotted: policy.dtype=float32"),
    argument("--setting", default="", help="name of one of the `settings` of an evaluation"),
    argument("--overwrite", action="store_true", help="replace what another export left there"),
    examples=(
        "mmrl export runs/my_run my_model",
        "mmrl export runs/my_run/checkpoint-100 my_model policy.dtype=float32",
        "mmrl export evaluate/pareto.yaml my_small_model --setting '1 bit'",
    ),
)
def export(given: argparse.Namespace) -> None:
    """Export a model to one folder: merged adapter, transforms, cache and model card.

    Without transforms, the result is an ordinary folder of transformers or diffusers. `from_pretrained`
    cannot load a model with pruning transforms; use `mmrl.load_engine` or `mmrl.load_pruned`.
    """
    from mmrl.build import check_source, open_source
    from mmrl.inference.saving import export as write
    from mmrl.inference.sources import resolve
    from mmrl.runtime.folders import check_replaceable

    check_replaceable(given.output, "export", overwrite=given.overwrite)
    source = resolve(given.source, given.overrides, setting=given.setting)
    check_source(source)
    for path in (source.run, source.weights, source.config.policy.options.get("model")):
        if path and given.output.resolve() in (Path(path).resolve(), *Path(path).resolve().parents):
            raise ConfigError(f"'{given.output}' holds the model that is exported; name another folder")
    written = write(open_source(source), source, given.output, overwrite=given.overwrite)
    print(f"{given.output}: {', '.join(written) or 'weights as they are'}")


@command(
    argument("folder", type=Path, help="the folder of a model"),
    argument("repo", help="owner/name on the hub, made if it is not there"),
    argument("--public", action="store_true", help="make the new repository public (default: private)"),
    argument("--message", default="Upload model", help="of the commit"),
    examples=("mmrl push my_model me/my-model",),
)
def push(given: argparse.Namespace) -> None:
    """Upload a model folder to the Hugging Face hub, with the credentials of `hf auth login`."""
    from mmrl.runtime.files import upload

    if not given.folder.is_dir() or not any(given.folder.iterdir()):
        raise ConfigError(f"there is no folder '{given.folder}' with a model in it")
    if given.repo.count("/") != 1:
        raise ConfigError(f"wanted owner/name, not '{given.repo}'")
    print(f"uploaded: {upload(given.folder, given.repo, given.message, private=not given.public)}")
