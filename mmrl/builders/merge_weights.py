"""Builder that averages the weights of several models of one architecture."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.registry import builder
from mmrl.runtime.checkpoint import publish
from mmrl.runtime.files import remove

ADAPTERS = ("adapter_config.json", "pytorch_lora_weights.safetensors")  # files of peft and diffusers
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5"}  # weight formats that are not read


@builder
@dataclass(kw_only=True)
class MergeWeights:
    """Average the weights of several models of one architecture into a new one.

    With equal weights this is a model soup (arXiv 2203.05482). AdaR1 (arXiv 2504.21659) merges a model of
    long reasoning and a model of short answers with the weights 0.8 and 0.2. Tensors are averaged one by one
    in float32 and written in the precision of the first model, which also provides all other files. Models
    are folders of transformers or diffusers in safetensors; convert an adapter with `mmrl export` first.

    Args:
        models: Two or more model folders.
        weights: One number per model. The numbers add up to 1, and may be negative. Empty: all equal.
    """

    models: tuple[str, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.models) < 2:
            raise ConfigError(f"`models` must name two or more folders, not {list(self.models)}")
        given = self.weights or (1 / len(self.models),) * len(self.models)
        if len(given) != len(self.models) or abs(sum(given) - 1) > 1e-6:
            raise ConfigError(
                f"`weights` must be {len(self.models)} numbers that add up to 1, one for each of `models`, "
                f"not {list(given)}"
            )

    def build(self, output: Path) -> dict[str, Any]:
        """Write the merged model; return the number of its tensors."""
        folders = [_folder(name) for name in self.models]
        if output.exists() and (output.is_file() or any(output.iterdir())):
            raise ConfigError(f"'{output}' exists and is not empty; name another folder as `output`")
        places = [_tensors_of(folder) for folder in folders]
        for folder, files in zip(folders[1:], places[1:], strict=True):
            if odd := sorted(files.keys() ^ places[0].keys()):
                lacking = folder if odd[0] in places[0] else folders[0]
                raise ValueError(
                    f"'{lacking}' has no tensor '{odd[0]}', which another of the models has; only models of "
                    "one architecture can be merged"
                )
        unfinished = output.with_name(f"{output.name}.tmp")
        remove(unfinished)
        _copy_others(folders[0], unfinished)
        for file in dict.fromkeys(places[0].values()):
            self._merge_file(file, folders, places, unfinished / file.relative_to(folders[0]))
        publish(unfinished, output)
        return {"models": len(folders), "tensors": len(places[0])}

    def combine(self, name: str, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Compute the weighted average of one named tensor, given the tensor of every model."""
        return _average(name, tensors, weights)

    def _merge_file(
        self, file: Path, folders: Sequence[Path], places: Sequence[Mapping[str, Path]], output: Path
    ) -> None:
        """Write one file of the first model with merged tensors; memory holds one file at a time."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        def read(file: Path, name: str) -> Tensor:
            with safe_open(file, "pt") as opened:
                return opened.get_tensor(name)

        inside = file.relative_to(folders[0]).parent
        weights = self.weights or (1 / len(folders),) * len(folders)
        merged: dict[str, Tensor] = {}
        with safe_open(file, "pt") as first:
            metadata = first.metadata()
            for name in first.keys():  # noqa: SIM118  it is no mapping
                own = first.get_tensor(name)
                others = [read(files[str(inside / name)], name) for files in places[1:]]
                for folder, other in zip(folders[1:], others, strict=True):
                    if other.shape != own.shape:
                        raise ValueError(
                            f"'{name}' has the shape {tuple(own.shape)} in '{folders[0]}' and "
                            f"{tuple(other.shape)} in '{folder}'; only models of one architecture can be "
                            "merged"
                        )
                merged[name] = self.combine(name, [own, *others], weights)
        output.parent.mkdir(parents=True, exist_ok=True)
        save_file(merged, output, metadata or {"format": "pt"})


def _folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"there is no model folder '{name}'")
    # Search subfolders, too, which hold adapters of several roles or networks.
    found = (path for file in ADAPTERS for inside in ("", "*/") for path in folder.glob(inside + file))
    if adapter := next(found, None):
        raise ConfigError(
            f"'{name}' holds an adapter ({adapter.relative_to(folder)}), whose weights do not average; write "
            "it as a whole model with `mmrl export` first"
        )
    return folder


def _tensors_of(folder: Path) -> dict[str, Path]:
    """Map every tensor name, with the subfolder (pipeline component) as prefix, to the tensor's file."""
    from safetensors import safe_open

    files: dict[str, Path] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                key = str(file.relative_to(folder).parent / name)
                if key in files:
                    raise ValueError(f"'{folder}' has '{key}' twice: in {files[key].name} and {file.name}")
                files[key] = file
    if not files:
        raise ConfigError(f"'{folder}' has no weights in safetensors")
    return files


def _average(name: str, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Average floating-point tensors in float32 or better; raise if integer tensors differ."""
    first = tensors[0]
    if not first.is_floating_point():
        if not all(torch.equal(first, other) for other in tensors[1:]):
            raise ValueError(
                f"'{name}' holds whole numbers that differ, as quantised weights do; they do not average"
            )
        return first
    wide = torch.promote_types(first.dtype, torch.float32)
    total = sum(weight * tensor.to(wide) for weight, tensor in zip(weights, tensors, strict=True))
    return torch.as_tensor(total).to(first.dtype).contiguous()


def _copy_others(folder: Path, output: Path) -> None:
    """Copy the files without weights (configuration, tokenizer, processor), except hidden files."""
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        weights = file.suffix in (".safetensors", *PICKLES)
        if file.is_file() and not weights and not any(part.startswith(".") for part in inside.parts):
            (output / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, output / inside)
