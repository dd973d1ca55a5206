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
from torch.utils._pytree import tree_leaves

from mmrl.runtime.checkpoint import read_state, write_state
from mmrl.runtime.fsdp import gathered, reshard_state, whole, widen


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


class Adapted(nn.Linear):
    """A frozen 16-bit layer with a trained 32-bit adapter."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.bfloat16)
        self.requires_grad_(False)
        self.low, self.high = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float() + self.high(self.low(x))


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), Adapted())


def through_file(state, folder: Path):
    """Gather a state, write it on process 0, and read it on all."""
    held = whole(state)
    if torch.distributed.get_rank() == 0:
        write_state(folder, held)
    else:  # the others let go of every tensor that they helped to gather
        assert {value.numel() for value in tensors_of(held) if value.ndim} == {0}
    torch.distributed.barrier()
    return read_state(folder)


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def sharded_adapter(mesh, rows: torch.Tensor, rank: int, folder: Path) -> None:
    """Train 32-bit adapters of a sharded 16-bit model, go on from what was gathered, and compare."""
    plain, sharded, fresh = adapted(), adapted(), adapted()
    optimizers = []
    for one in (plain, sharded, fresh):
        for part in (*one, one) if one is not plain else ():
            fully_shard(part, mesh=mesh)
        optimizers.append(torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.1))
    part = rows[4 * rank : 4 * rank + 4]
    learn(plain, optimizers[0], rows)
    learn(sharded, optimizers[1], part)
    local = [p.to_local() for p in sharded.parameters() if isinstance(p, DTensor)]
    assert sum(p.numel() for p in local) == sum(p.numel() for p in plain.parameters()) / 2
    assert {p.dtype for p in local} == {torch.bfloat16, torch.float32}
    with gathered(sharded):
        state = {name: value.detach().clone() for name, value in sharded.state_dict().items()}
    with gathered(fresh, changed=True) as loads:
        assert loads == (rank == 0)
        if loads:
            fresh.load_state_dict(state)
    moments = through_file(optimizers[1].state_dict(), folder / "adapter")
    optimizers[2].load_state_dict(reshard_state(moments, [p for p in fresh.parameters() if p.requires_grad]))
    learn(plain, optimizers[0], rows)
    for one, optimizer in ((sharded, optimizers[1]), (fresh, optimizers[2])):
        learn(one, optimizer, part)
    with gathered(sharded, everywhere=True), gathered(fresh, everywhere=True):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(sharded.state_dict()[name].detach(), value, rtol=1e-4, atol=1e-5)
            assert torch.equal(sharded.state_dict()[name], fresh.state_dict()[name]), name


def widened(mesh, rows: torch.Tensor, rank: int) -> None:
    """Shard 16-bit weights, convert some of them to float32, and train them like whole ones."""
    plain, sharded = model().bfloat16(), model().bfloat16()
    sharded[0].requires_grad_(False)
    plain[0].requires_grad_(False)
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded[1].parameters(), lr=0.1)
    widen(sharded, {"1.weight", "1.bias"})
    assert [p.dtype for p in sharded.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    plain[1].float()
    for one in (plain, sharded):
        one[0].register_forward_hook(lambda module, given, output: output.float())
    whole_optimizer = torch.optim.AdamW(plain[1].parameters(), lr=0.1)
    for _ in range(2):
        learn(plain, whole_optimizer, rows.bfloat16())
        learn(sharded, optimizer, rows.bfloat16()[4 * rank : 4 * rank + 4])
    with gathered(sharded, everywhere=True):
        for name, value in plain.state_dict().items():
            found = sharded.state_dict()[name].detach()
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=name)


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
    with gathered(sharded) as saves:
        assert saves == (rank == 0)
        kinds = {isinstance(value, DTensor) for value in sharded.state_dict().values()}
        assert kinds == {not saves}  # only process 0 has whole weights
        if saves:
            held = {name: value.detach().clone() for name, value in sharded.state_dict().items()}
            save_file(held, folder / "sharded.safetensors")
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(held[name], value)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    some = [sharded[1].weight]
    with gathered(sharded, only=some, everywhere=True) as everywhere:
        assert everywhere and [isinstance(p, DTensor) for p in sharded.parameters()] == [
            True,
            True,
            False,
            True,
        ]
        torch.testing.assert_close(sharded[1].weight.detach(), plain[1].weight.detach())
    state = through_file(optimizers[1].state_dict(), folder / "whole")
    expected = optimizers[0].state_dict()
    torch.testing.assert_close(state["state"][0]["exp_avg"], expected["state"][0]["exp_avg"])
    # A fresh model takes it all up, and goes on like the first.
    fresh = model()
    fresh.register_buffer("moved", torch.zeros(2))
    fully_shard(fresh, mesh=mesh)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    with gathered(fresh, changed=True) as loads:
        if loads:
            fresh.load_state_dict(load_file(folder / "sharded.safetensors"), strict=False)
            fresh.moved.fill_(3.0)
    assert fresh.moved.tolist() == [3.0, 3.0]  # buffers of process 0 go to all
    del fresh.moved
    optimizer.load_state_dict(reshard_state(state, list(fresh.parameters())))
    learn(plain, optimizers[0], rows)
    learn(fresh, optimizer, rows[4 * rank : 4 * rank + 4])
    with gathered(fresh, everywhere=True):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(fresh.state_dict()[name].detach(), value)
    sharded_adapter(mesh, rows, rank, folder)
    widened(mesh, rows, rank)
    (folder / f"done-{rank}").touch()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
