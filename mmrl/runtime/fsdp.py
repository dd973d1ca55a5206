"""Functions that gather FSDP2 shards for saving, loading and generation, and reshard loaded states.

For saving, tensors are gathered one at a time into main memory of process 0, so that no device holds more
than its shards and one full tensor. `torch.distributed.checkpoint` cannot be used, because models are saved
by their library's own method. Without sharding all functions do nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mmrl.config.schema import ConfigError


def is_shard(tensor: Tensor | None) -> bool:
    """Whether a tensor is a shard (`DTensor`)."""
    if not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _spread(data: Tensor, like: Tensor) -> Tensor:
    """Shard process 0's full tensor as `like` is sharded; other processes pass any tensor of that shape."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(data.to(like.device), like.device_mesh, like.placements)


def in_shards(module: nn.Module) -> bool:
    """Whether any weight of a model is currently a shard."""
    return any(map(is_shard, module.parameters()))


def full(tensor: Tensor) -> Tensor:
    """Gather the full tensor of a shard on its device; every process must call this for a shard."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def _saves() -> bool:
    """Whether this process receives the full weights for saving (process 0)."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def check_shardable(module: nn.Module) -> None:
    """Raise `ConfigError` for quantised weights, which FSDP2 does not shard."""
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"the weight '{name}' is in few bits ({parameter.dtype}), which FSDP2 cannot shard; launch "
                "with configs/accelerate/ddp.yaml, or take a checkpoint of 16 bits without `bnb_quantize`"
            )


def sharded_parts(module: nn.Module) -> list[Any]:
    """List the FSDP2 modules inside a model, including currently unsharded ones."""
    if not torch.distributed.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def gathered(
    module: nn.Module,
    *,
    changed: bool = False,
    only: Iterable[Tensor] | None = None,
    everywhere: bool = False,
) -> Iterator[bool]:
    """Replace sharded parameters by full tensors in main memory of process 0 inside this context.

    Every process must enter it. Yields whether this process has the full weights (True without sharding).

    Args:
        module: The model.
        changed: On exit, update the shards and buffers of all processes from the values on process 0.
        only: The parameters to gather; None: all.
        everywhere: Gather on every process instead of process 0 only.
    """
    chosen = None if only is None else {id(parameter) for parameter in only}
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if is_shard(parameter) and (chosen is None or id(parameter) in chosen)
    ]
    keeps = not sharded or everywhere or _saves()
    # Disable FSDP2's `load_state_dict` hooks, which expect shards: inside this context tensors are full.
    hooks = [part._load_state_dict_post_hooks for part in module.modules()] if sharded else []
    before = [dict(hook) for hook in hooks]
    wholes: dict[int, nn.Parameter] = {}  # by id, so that a shared parameter stays shared
    for owner, name, parameter in sharded:
        if id(parameter) not in wholes:
            data = parameter.detach().full_tensor()
            data = data.cpu() if keeps else data.new_empty(0)
            wholes[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        if keeps:
            owner._parameters[name] = wholes[id(parameter)]
    for current in hooks:
        current.clear()
    try:
        yield keeps
        if changed and sharded:
            _take_back({id(parameter): parameter for _, _, parameter in sharded}, wholes, module)
    finally:
        for owner, name, parameter in sharded:
            owner._parameters[name] = parameter
        for current, entries in zip(hooks, before, strict=True):
            current.update(entries)


@torch.no_grad()
def _take_back(shards: dict[int, Any], wholes: dict[int, nn.Parameter], module: nn.Module) -> None:
    """Update the parameter shards and the buffers of all processes from the full values of process 0."""
    for key, shard in shards.items():
        # Only the data of process 0 is used; the others pass an empty tensor of the same shape.
        data = wholes[key].data if _saves() else torch.empty(shard.shape, dtype=shard.dtype)
        shard.copy_(_spread(data.to(shard.dtype), shard))
    for buffer in module.buffers():
        torch.distributed.broadcast(buffer, 0)


@contextmanager
def unsharded(module: nn.Module, *, again: bool = True) -> Iterator[None]:
    """Unshard all weights inside this context, so that each process may call submodules independently.

    Every process must enter it. `again`: whether forward passes after this context reshard the weights.
    """
    parts = sharded_parts(module)
    if parts:
        from torch.distributed.fsdp import register_fsdp_forward_method

        # FSDP2's root is the first module called. Generation may call a submodule first: call the model now.
        module.begin = lambda: None
        register_fsdp_forward_method(module, "begin")
        module.begin()
        del module.begin
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)  # keep it unsharded after a forward pass
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(again, recurse=False)
            part.reshard()


def widen(module: nn.Module, names: Collection[str]) -> None:
    """Convert the parameters in `names` of a sharded model to float32 in place, shard by shard."""
    chosen = {id(parameter) for name, parameter in module.named_parameters() if name in names}
    if chosen:
        # `_apply` also recreates the flat buffers from which FSDP2 gathers.
        module._apply(lambda tensor: tensor.float() if id(tensor) in chosen else tensor)


def swap(parameter: Tensor, weight: Tensor) -> Tensor:
    """Set the data of a parameter to another weight, and return the old data.

    Shards are copied in place, because FSDP2 gathers from fixed buffers.
    """
    if not is_shard(parameter):
        old, parameter.data = parameter.data, weight
        return old
    current, other = parameter.to_local().detach(), weight.to_local()
    old = current.clone()
    current.copy_(other)
    other.copy_(old)
    return weight  # now holds the old values


def local_copy(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter's data on the CPU; the copy of a shard stays on the shard's device."""
    parameter = parameter.detach()
    return parameter.clone() if is_shard(parameter) else parameter.cpu().clone()


def reshard(module: nn.Module) -> None:
    """Reshard gathered weights, so that the next forward pass gathers their new values."""
    for part in sharded_parts(module):
        part.reshard()


def whole(tree: Any) -> Any:
    """Gather the shards of a nested state in main memory of process 0; other processes get empty tensors.

    Every process has to call this.
    """

    def gather(shard: Any) -> Tensor:
        data = shard.full_tensor()
        return data.cpu() if _saves() else data.new_empty(0)

    return tree_map_only(is_shard, gather, tree)


def reshard_state(tree: Any, parameters: Sequence[Tensor]) -> Any:
    """Shard the tensors of a nested state like the parameters of the same shape."""
    like = {tuple(parameter.shape): parameter for parameter in parameters if is_shard(parameter)}

    def shard(data: Tensor) -> Tensor:
        shape = tuple(data.shape)
        return _spread(data, like[shape]) if shape in like else data

    return tree_map_only(Tensor, shard, tree) if like else tree
