"""Transfer of tensors from a learner to the workers of a vLLM server over gloo; used by both.

Names, dtypes and shapes travel ahead as JSON, tensors as bytes. Nothing is pickled.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    + (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine's network interface that reaches a host."""
    with socket.create_connection((host, port), timeout=30) as connection:
        return connection.getsockname()[0]


def listen(address: str, timeout: float) -> Any:
    """Open the TCP store, on a free port, through which learner and workers form their process group."""
    wait = timedelta(seconds=timeout)
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=wait)


def join(store: Any, address: str, rank: int, size: int, timeout: float) -> Any:
    """Form the process group; the learner has rank 0. Waits until all processes have joined."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def header(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """List the name, dtype and shape of every tensor."""
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]


def send(group: Any, tensors: Iterable[Tensor]) -> None:
    """Send tensors from rank 0, in the order of the header."""
    for tensor in tensors:
        if tensor.numel():
            _broadcast(group, tensor.detach().contiguous().reshape(-1).view(torch.uint8))


def receive(meeting: Mapping[str, Any], rank: int) -> Iterator[tuple[str, Tensor]]:
    """Join the learner's process group, and yield its tensors one after another.

    Raises ValueError for a header with a repeated name, an unknown dtype or an impossible shape.

    Args:
        meeting: `host` and `port` of the learner, the `size` of the group, the `timeout` in seconds, and the
            header, `tensors`.
        rank: Rank of this process; 0 is the learner.
    """
    checked, names = [], set()
    for name, kind, shape in meeting["tensors"]:
        sound = isinstance(name, str) and name not in names and kind in DTYPES
        if not sound or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"the learner announces a tensor {name!r} of {kind!r} {shape!r}")
        names.add(name)
        checked.append((name, DTYPES[kind], shape))
    host, port, size, timeout = (meeting[key] for key in ("host", "port", "size", "timeout"))
    address = address_towards(host, port)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    group = join(store, address, rank, size, timeout)
    for name, dtype, shape in checked:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            _broadcast(group, tensor.view(-1).view(torch.uint8))
        yield name, tensor


def _broadcast(group: Any, data: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([data], options).wait()
