"""One of two processes that hold a part of the weights each: `python -m tests.support.sharded_worker
folder`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mmrl.runtime.fsdp import gathered, taken_up, whole


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def learn(module: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    module(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    rank, mesh = torch.distributed.get_rank(), init_device_mesh("cpu", (2,))
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    plain, sharded = model(), model()
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, sharded)]
    learn(plain, optimizers[0], rows)
    learn(sharded, optimizers[1], rows[4 * rank : 4 * rank + 4])
    with gathered(sharded):
        held = {name: value.detach().clone() for name, value in sharded.state_dict().items()}
        assert not any(isinstance(value, DTensor) for value in held.values())
        if rank == 0:
            save_file(held, folder / "sharded.safetensors")
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(held[name], value)
    state = whole(optimizers[1].state_dict())
    expected = optimizers[0].state_dict()
    torch.testing.assert_close(state["state"][0]["exp_avg"], expected["state"][0]["exp_avg"])
    torch.distributed.barrier()
    # A fresh model takes it all up, and goes on like the first.
    fresh = model()
    fully_shard(fresh, mesh=mesh)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    with gathered(fresh, changed=True):
        fresh.load_state_dict(load_file(folder / "sharded.safetensors"))
    optimizer.load_state_dict(taken_up(state, list(fresh.parameters())))
    learn(plain, optimizers[0], rows)
    learn(fresh, optimizer, rows[4 * rank : 4 * rank + 4])
    with gathered(fresh):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(fresh.state_dict()[name].detach(), value)
    (folder / f"done-{rank}").touch()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
