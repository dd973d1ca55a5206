"""What is done to modules of any kind: where they come from, precision, transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.runtime.fsdp import is_sharded

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LOW = (torch.bfloat16, torch.float16)


def model_source(name: str) -> str:
    """Give the folder or the hub id of a model; a path to a folder that is missing is an error at once, not
    after a hub was asked."""
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return str(folder)
    home = folder.parent
    begun = home.is_dir() and home != Path()  # "runs/model_final" where there is a folder "runs"
    if begun or folder.is_file() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1:
        inside = sorted(one.name for one in home.iterdir() if one.is_dir())[:5] if begun else []
        raise ValueError(
            f"there is no folder '{name}'"
            + (f"; '{home}' holds the folders {', '.join(inside)}" if inside else "")
            + "; name a folder that holds a model, or a model of the hub as owner/name"
        )
    return name


def keep_training_precision(model: nn.Module) -> None:
    """Hold trained weights in float32: steps of 1e-6 vanish in 16 bits. Frozen weights stay as they were
    loaded."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in LOW:
            parameter.data = parameter.data.float()


def apply_transforms(model: nn.Module, transforms: Sequence[Callable]) -> nn.Module:
    """Send a model through transforms in order."""
    for transform in transforms:
        model = transform(model)
    return model


def twin(model: nn.Module) -> nn.Module:
    """Copy modules, settings and hooks of a model, but not its weights: both hold the same tensors."""
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept)


class Derived:
    """What transforms make of a model, on the model's own weights.

    It is a model of its own, so nothing that is done to it reaches the other. Weights that both hold follow
    by themselves. Where a transform holds numbers in their place (fewer bits, cut matrices), everything is
    made anew once the weights that it read have moved.
    """

    def __init__(self, model: nn.Module, transforms: Sequence[Callable]) -> None:
        self.model, self.transforms = model, transforms
        self.made: nn.Module | None = None
        self._read: list[nn.Parameter] = []  # weights that are somewhere else now
        self._stamp: Any = None

    def __call__(self) -> nn.Module:
        """Give the model as of now."""
        if self.made is None and is_sharded(self.model):
            raise ValueError(
                "an engine's own transforms need whole weights on every process, but these are sharded; give "
                "them to the policy (`policy.transform`), or train without sharding"
            )
        if self.made is None or self._stamp != self._look():
            self.made = apply_transforms(twin(self.model), self.transforms)
            self._read = self._replaced(self.made)
            self._stamp = self._look()
        return self.made

    def _replaced(self, made: nn.Module) -> list[nn.Parameter]:
        """List the weights that are not there any more; all of them where there is something else besides."""
        mine = [*self.model.parameters(), *self.model.buffers()]
        theirs = {id(tensor) for tensor in (*made.parameters(), *made.buffers())}
        gone = [p for p in self.model.parameters() if id(p) not in theirs]
        added = theirs - {id(tensor) for tensor in mine}
        return gone or (list(self.model.parameters()) if added else [])

    def _look(self) -> Any:
        """Read off what changes when weights move: in place, by lending them other memory, or as a whole."""
        held = tuple(id(p) for p in self.model.parameters())
        return held, tuple((p._version, p.data_ptr()) for p in self._read)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch off what behaves otherwise in training, and leave every part as it was."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def dropping(module: nn.Module) -> list[str]:
    """Name the parts that drop something as they stand."""
    return [
        name or type(part).__name__
        for name, part in module.named_modules()
        if part.training and "Dropout" in type(part).__name__ and getattr(part, "p", 0) > 0
    ]
