"""Folders with the weights of a policy, named by a hash, for vLLM servers to load."""

from __future__ import annotations

import fcntl
import hashlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from mmrl.config.loading import ConfigError
from mmrl.runtime.content_hash import of_tensors
from mmrl.runtime.files import flock, remove
from mmrl.runtime.fsdp import is_shard
from mmrl.vision.serving.server import Weights
from mmrl.vision.serving.servers import LOCK, locked

DIGITS = 16  # hexadecimal digits of a version


class WeightsWriter:
    """Writes the trained weights of a policy after every change: the adapter, or else the whole model.

    A folder is named by its version, a hash of the weights. So learners with equal weights share a folder,
    and a server that was restarted is recognised by its version. The latest two folders stay until the
    program ends, and more if `keep` is larger. A folder that another learner uses is not removed.
    """

    keep = 2  # number of folders to keep

    def __init__(self, policy: Any, folder: Path) -> None:
        if policy.part is not None:
            raise ConfigError(
                f"`vision.vllm` cannot bring {policy.part.name} to a server; use `vision.generate`"
            )
        self.policy, self.folder = policy, folder
        self.latest: Weights | None = None
        self.updates = -1  # number of weight changes after the first write
        # Maps a folder to its lock file, which is locked while the folder is in use.
        self.written: OrderedDict[Path, TextIO] = OrderedDict()
        weakref.finalize(self, _let_go_of_all, self.written)

    def __call__(self) -> Weights:
        """Write the current weights if they changed; if sharded, return the latest written weights."""
        version = self.version()
        if self.latest is None or self.latest.version != version:
            self.updates += 1
            self.latest = self._written(version)
        return self.latest

    def version(self) -> str:
        """Hash the current weights.

        `id()` and `_version` of tensors would be cheaper but miss changes: FSDP2 gathers into the same
        tensors, ZeRO-1 writes to a flat copy, and a sampling reference model assigns its weights to `.data`.
        """
        if self.latest and any(map(is_shard, self.tensors().values())):
            return self.latest.version
        # Hash an adapter's settings, too, because its scale is not a tensor.
        config = self.policy.model.config.to_json_string(use_diff=False)  # finding the differences is slow
        settings = self.policy.adapter.peft_config if self.policy.adapter else config
        content = f"{of_tensors(self.tensors().values())} {settings}"
        return hashlib.sha256(content.encode()).hexdigest()[:DIGITS]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters that are written, by name: of the adapter, or of the whole model."""
        parameters = dict(self.policy.model.named_parameters())
        if self.policy.adapter is None:
            return parameters
        return {name: weight for name, weight in parameters.items() if ".lora_" in name}

    def _written(self, version: str) -> Weights:
        path = self.folder / version
        if not path.is_dir():
            part = self.folder / f"{version}.{os.getpid()}.part"
            save(self.policy.adapter or self.policy.model, part)
            part.rename(path)  # atomic, so that no folder is incomplete
        used = self.written.pop(path, None) or path.with_suffix(".used").open("a")
        flock(used, fcntl.LOCK_SH)
        self.written[path] = used
        while len(self.written) > self.keep:
            _let_go(*self.written.popitem(last=False))
        return Weights(path, version, self.policy.adapter is not None)


def save(model: Any, folder: Path) -> None:
    """Write a model with unsharded weights, from any process."""
    # Any process may save, but by default transformers saves only in the process with rank 0.
    model.should_save_on_this_rank = lambda is_main_process: True
    try:
        model.save_pretrained(str(folder), state_dict=state_of(model))
    finally:
        del model.should_save_on_this_rank


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights and persistent buffers of a model; `state_dict` would make FSDP2 shard them."""
    state: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                state[f"{prefix}.{name}".removeprefix(".")] = buffer
    return state


def _let_go(folder: Path, used: TextIO) -> None:
    """Remove a folder, unless another learner uses it."""
    with used:
        try:
            flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        remove(folder)
        remove(Path(used.name))


def _let_go_of_all(written: Mapping[Path, TextIO], how: int = fcntl.LOCK_NB) -> None:
    """Remove the folders that no other learner uses; with LOCK_NB, locked folders wait for the program's end.

    The garbage collector may call this function in a thread that holds the lock, so it must not wait for it.
    """
    for folder, used in written.items():
        if not folder.exists():  # a user removed it before the process ended
            used.close()
            continue
        try:
            with locked(folder.parent / LOCK, how):
                _let_go(folder, used)
        except BlockingIOError:
            weakref.finalize(WeightsWriter, _let_go_of_all, {folder: used}, how=0)  # at the program's end
