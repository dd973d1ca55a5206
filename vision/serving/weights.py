"""Writing the weights of a policy as folders that vLLM reads, named by what they hold."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmrl.config.loading import ConfigError
from mmrl.runtime.content_hash import of_tensors
from mmrl.runtime.files import remove
from mmrl.vision.serving.servers import Weights

DIGITS = 16  # of a version


class WeightsWriter:
    """Writes the trained weights of a policy whenever they changed: an adapter, or else the whole model.

    A folder is named by a hash of its weights, so that learners with the same weights share it, and a server
    that was started again cannot be taken for one that has them. The latest two stay, until the program ends.
    """

    def __init__(self, policy: Any, folder: Path) -> None:
        if policy.roles or policy.steering is not None:
            what = "adapters of several roles" if policy.roles else "a steering vector"
            raise ConfigError(f"`vision.vllm` cannot bring {what} to a server; use `vision.generate`")
        self.policy, self.folder = policy, folder
        self.seen: tuple = ()
        self.latest: Weights | None = None
        self.written: list[Path] = []
        weakref.finalize(self, _remove_all, self.written)

    def __call__(self) -> Weights:
        """Write the weights of this moment, if no one has."""
        tensors = self._tensors()
        seen = tuple((name, id(weight), weight._version) for name, weight in tensors.items())
        if self.latest is None or seen != self.seen:
            # With the settings of an adapter: its scale is none of its tensors.
            settings = self.policy.adapter.peft_config if self.policy.adapter else self.policy.model.config
            content = f"{of_tensors(tensors.values())} {settings}"
            self.latest = self._written(hashlib.sha256(content.encode()).hexdigest()[:DIGITS])
            self.seen = seen
        return self.latest

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        parameters = dict(self.policy.model.named_parameters())
        if self.policy.adapter is None:
            return parameters
        return {name: weight for name, weight in parameters.items() if ".lora_" in name}

    def _written(self, version: str) -> Weights:
        path = self.folder / version
        if not path.is_dir():
            part = self.folder / f"{version}.{os.getpid()}.part"
            (self.policy.adapter or self.policy.model).save_pretrained(str(part))
            part.rename(path)  # a folder that is there is whole
        if path in self.written:
            self.written.remove(path)
        self.written.append(path)
        while len(self.written) > 2:
            remove(self.written.pop(0))
        return Weights(path, version, self.policy.adapter is not None)


def _remove_all(folders: list[Path]) -> None:
    for folder in folders:
        remove(folder)
