"""Worker extension of vLLM servers: `--worker-extension-cls mmrl_vllm_worker.Reloadable`.

It runs in the environment of vLLM, without mmrl.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

mmrl_group: Any = importlib.import_module("mmrl_group")  # beside this file, in the PYTHONPATH of servers
base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
KEPT: list[tempfile.TemporaryDirectory[str]] = []  # folder of the latest adapter


def plain_linear(layer: Any, remove_weight: bool) -> None:
    """Replace a linear layer's forward by one that uses its weights directly, without a packed copy."""
    layer.cpu_linear = torch.nn.functional.linear


def rank_of(parallel: Any) -> int:
    """Return the rank of this worker in the group, in which the learner has rank 0."""
    return 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank


class Reloadable:
    """Worker extension that receives adapters; importing it also disables the packing of weights on CPUs.

    With packing, a CPU server would still use packed copies of old weights. GPU servers do not pack weights.
    """

    parallel_config: Any  # attribute of vLLM's worker
    device: Any

    def receive_adapter(self, meeting: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
        """Receive an adapter, and return the folder of this server in which it was saved."""
        from safetensors.torch import save_file

        tensors = dict(mmrl_group.receive(meeting, rank_of(self.parallel_config)))
        KEPT[:] = [tempfile.TemporaryDirectory(prefix="mmrl-adapter-")]  # removes the previous folder
        folder = Path(KEPT[0].name)
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return [str(folder)]

    def device_type(self) -> list[str]:
        """Name the kind of device of this worker, such as "cpu" or "cuda"."""
        return [self.device.type]


@dataclass
class Nothing:
    """Empty initialisation data, because the learner sends all data with each update."""


@dataclass
class Meeting:
    """Address of the learner, and the tensors that a worker receives: see `mmrl_group.receive`."""

    host: str
    port: int
    size: int
    timeout: float
    tensors: list[list[Any]]


class Broadcast(base.WeightTransferEngine):
    """Weight transfer over gloo, `--weight-transfer-config '{"backend": "mmrl"}'`."""

    init_info_cls, update_info_cls = Nothing, Meeting
    wanted: set[str]  # names of all weights

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing: every update forms a new process group."""

    def start_weight_update(self) -> None:
        """Prepare the layers for weights with the names and shapes of a checkpoint."""
        self.wanted = {name for name, _ in self.model.named_parameters()}  # lists tied weights once
        reload.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Convert the loaded weights of all layers to vLLM's internal layout."""
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights; the base class would wait for an accelerator, which a CPU server lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Meeting) -> None:
        """Receive and load all weights; raises RuntimeError if the learner sends only a part of the model."""
        loaded = self.model.load_weights(mmrl_group.receive(vars(update_info), rank_of(self.parallel_config)))
        if loaded is not None and (missing := self.wanted - loaded):
            raise RuntimeError(f"{len(missing)} weights were not sent, the first is '{min(missing)}'")

    def shutdown(self) -> None:
        """Do nothing: the group of an update ends with the update."""


def sets_pruning(load: Any) -> Any:
    """Make the model runner of a CPU server apply `--video-pruning-rate`, as the GPU runner does.

    The runners of vLLM 0.32 and 0.33 do not, so the first image or video would crash the server.
    """

    def load_model(runner: Any, *args: Any, **options: Any) -> None:
        load(runner, *args, **options)
        config = runner.model_config.multimodal_config
        runner.is_multimodal_pruning_enabled = bool(config and config.is_multimodal_pruning_enabled())

    return load_model


if importlib.import_module("vllm.platforms").current_platform.is_cpu():
    runner: Any = importlib.import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner
    runner.load_model = sets_pruning(runner.load_model)
importlib.import_module("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm = plain_linear
factory.WeightTransferEngineFactory.register_engine("mmrl", Broadcast)
