"""One of two processes that write sharded weights for vLLM.

`python -m tests.support.sharded_serving folder model`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mmrl.runtime.fsdp import unsharded
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.servers import LOCK, locked
from mmrl.vision.serving.weights import WeightsWriter


@torch.no_grad()
def learn(policy: Tokens) -> None:
    """Change what is trained, as an optimizer does: the shards of each process."""
    for weight in policy.module.parameters():
        if weight.requires_grad:
            weight.to_local().add_(0.01)


def written(folder: Path, policy: Tokens) -> None:
    """Write three weights in a row, and compare each with what the policy has at the moment."""
    fully_shard(policy.module, mesh=init_device_mesh("cpu", (2,)))
    writer, versions = WeightsWriter(policy, folder), []
    for _ in range(3):
        learn(policy)
        with unsharded(policy.module):
            with locked(folder / LOCK):
                weights = writer()
            held = {name: value.detach() for name, value in policy.model.named_parameters()}
            assert not any(isinstance(value, DTensor) for value in held.values()), "sharded by writing"
            versions.append(weights.version)
            files = [load_file(path) for path in sorted(weights.folder.glob("*.safetensors"))]
            found = sorted(value.double().sum().item() for file in files for value in file.values())
            trained = {name: value for name, value in held.items() if not weights.adapter or "lora_" in name}
            torch.testing.assert_close(found, sorted(v.double().sum().item() for v in trained.values()))
    assert len({*versions}) == 3 and writer.updates == 2
    told = [None, None]
    torch.distributed.all_gather_object(told, versions)
    assert told[0] == told[1]  # so that one folder is enough


def main() -> None:
    """Write a whole model, and an adapter."""
    folder, model = Path(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group("gloo")
    for name, given in (("whole", {"freeze_vision_tower": False}), ("adapter", {"lora_rank": 4})):
        (folder / name).mkdir(exist_ok=True)
        torch.manual_seed(0)
        written(folder / name, Tokens(model=model, dtype="float32", **given))
    (folder / f"done-{torch.distributed.get_rank()}").touch()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
