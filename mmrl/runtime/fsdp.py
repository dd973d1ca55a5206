"""Gathers the sharded weights of FSDP2 for saving, loading and generation, and shards states again.

On one process, and where weights are not sharded, everything here is the identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def _is_shard(tensor: Tensor | None) -> bool:
    if not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _spread(full: Tensor, like: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements)


def sharded_parts(module: nn.Module) -> list[Any]:
    """List the parts of a model whose weights FSDP2 shards, gathered at the moment or not."""
    if not torch.distributed.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def gathered(module: nn.Module, *, changed: bool = False) -> Iterator[None]:
    """Replace sharded parameters by whole ones inside this context. Every process has to enter it.

    With `changed`, the shards are updated from the whole parameters at the end.
    """
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if _is_shard(parameter)
    ]
    # FSDP2 hooks expect shards after a state was loaded; inside this context there are whole tensors.
    hooks = [part._load_state_dict_post_hooks for part in module.modules()] if sharded else []
    before = [dict(hook) for hook in hooks]
    fulls: dict[int, nn.Parameter] = {}  # a parameter that two modules share stays shared
    for owner, name, parameter in sharded:
        if id(parameter) not in fulls:
            full = parameter.detach().full_tensor()
            fulls[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
        owner._parameters[name] = fulls[id(parameter)]
    for current in hooks:
        current.clear()
    try:
        yield
        if changed:
            for owner, name, parameter in sharded:
                with torch.no_grad():
                    parameter.copy_(_spread(owner._parameters[name].detach(), parameter))
    finally:
        for owner, name, parameter in sharded:
            owner._parameters[name] = parameter
        for current, entries in zip(hooks, before, strict=True):
            current.update(entries)


@contextmanager
def unsharded(module: nn.Module, *, again: bool = True) -> Iterator[None]:
    """Unshard all weights inside this context, so that processes may call parts of the module freely.

    Every process has to enter it. `again`: whether later forward passes reshard what they gathered.
    """
    parts = sharded_parts(module)
    if parts:
        from torch.distributed.fsdp import register_fsdp_forward_method

        # The FSDP2 root is the module that is first called; generation may call a part before the whole.
        module.begin = lambda: None
        register_fsdp_forward_method(module, "begin")
        module.begin()
        del module.begin
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)  # else its first forward pass reshards it
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(again, recurse=False)
            part.reshard()


def widen(module: nn.Module, names: Collection[str]) -> None:
    """Convert named parameters of a sharded model to float32, shard by shard; the Parameters stay."""
    chosen = {id(parameter) for name, parameter in module.named_parameters() if name in names}
    if chosen:
        # `_apply` also renews the flat memory of shards, from which FSDP2 gathers.
        module._apply(lambda tensor: tensor.float() if id(tensor) in chosen else tensor)


def exchange(parameter: Tensor, weight: Tensor) -> Tensor:
    """Set the data of a parameter to another weight, and return the old data.

    Shards are copied, because FSDP2 gathers from their memory, whatever the parameter points to.
    """
    if not _is_shard(parameter):
        old, parameter.data = parameter.data, weight
        return old
    current, other = parameter.to_local().detach(), weight.to_local()
    old = current.clone()
    current.copy_(other)
    other.copy_(old)
    return weight  # with the old values


def kept(parameter: Tensor) -> Tensor:
    """Copy the data of a parameter: to the CPU, or of a shard this process's part of it, where it is."""
    parameter = parameter.detach()
    return parameter.clone() if _is_shard(parameter) else parameter.cpu().clone()


def give_up(module: nn.Module) -> None:
    """Reshard gathered weights, so that the next pass gathers their new values."""
    for part in sharded_parts(module):
        part.reshard()


def whole(tree: Any) -> Any:
    """Gather the sharded tensors of a nested state. Every process has to call this."""
    return tree_map_only(_is_shard, lambda shard: shard.full_tensor(), tree)


def taken_up(tree: Any, parameters: Sequence[Tensor]) -> Any:
    """Shard the tensors of a nested state like the parameters of equal shape."""
    like = {tuple(parameter.shape): parameter for parameter in parameters if _is_shard(parameter)}

    def shard(full: Tensor) -> Tensor:
        shape = tuple(full.shape)
        return _spread(full, like[shape]) if shape in like else full

    return tree_map_only(Tensor, shard, tree) if like else tree
