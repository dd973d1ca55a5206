"""Gathers the sharded weights of FSDP2 for saving, loading and generation, and shards states again.

On one process, and where weights are not sharded, everything here is the identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _kind() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


@contextmanager
def gathered(module: nn.Module, world: int, *, changed: bool = False) -> Iterator[None]:
    """Replace sharded parameters by whole ones inside this context. Every process has to enter it.

    With `changed`, the shards are updated from the whole parameters at the end.
    """
    if world == 1:
        yield
        return
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if isinstance(parameter, _kind())
    ]
    # FSDP2 hooks expect shards after a state was loaded; inside this context there are whole tensors.
    hooks = [
        (part._load_state_dict_post_hooks, dict(part._load_state_dict_post_hooks))
        for part in module.modules()
    ]
    fulls: dict[int, nn.Parameter] = {}  # a parameter that two modules share stays shared
    for owner, name, parameter in sharded:
        if id(parameter) not in fulls:
            full = parameter.detach().full_tensor()
            fulls[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
        owner._parameters[name] = fulls[id(parameter)]
    for current, _ in hooks if sharded else ():
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
        for current, before in hooks:
            current.update(before)


@contextmanager
def unsharded(module: nn.Module, *, again: bool = True) -> Iterator[None]:
    """Unshard all weights inside this context, so that processes may call parts of the module freely.

    Every process has to enter it. `again`: whether later forward passes reshard what they gathered.
    """
    parts = _sharded_parts(module)
    if not parts:
        yield
        return
    _name_root(module)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(again, recurse=False)
            part.reshard()


def exchange(parameter: Tensor, weight: Tensor) -> Tensor:
    """Set the data of a parameter to another weight, and return the old data.

    Shards are copied, because FSDP2 gathers from their memory, whatever the parameter points to.
    """
    if not torch.distributed.is_initialized() or not isinstance(parameter, _kind()):
        old, parameter.data = parameter.data, weight
        return old
    current, other = parameter.to_local().detach(), weight.to_local()
    old = current.clone()
    current.copy_(other)
    other.copy_(old)
    return weight


def give_up(module: nn.Module) -> None:
    """Reshard gathered weights, so that the next pass gathers their new values."""
    for part in _sharded_parts(module):
        part.reshard()


def is_sharded(module: nn.Module) -> bool:
    """Return whether weights are sharded, gathered at the moment or not."""
    return bool(_sharded_parts(module))


def _sharded_parts(module: nn.Module) -> list[Any]:
    if not torch.distributed.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _name_root(module: nn.Module) -> None:
    """Make the module the FSDP2 root, which else is the first one to run a forward pass."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    module.begin = lambda: None
    register_fsdp_forward_method(module, "begin")
    module.begin()
    del module.begin


def whole(tree: Any, world: int) -> Any:
    """Gather the sharded tensors of a nested state. Every process has to call this."""
    if world == 1:
        return tree
    match tree:
        case Tensor():
            return tree.full_tensor() if isinstance(tree, _kind()) else tree
        case Mapping():
            return {key: whole(value, world) for key, value in tree.items()}
        case list() | tuple():
            return [whole(value, world) for value in tree]
    return tree


def taken_up(tree: Any, parameters: Sequence[Tensor], world: int) -> Any:
    """Shard the tensors of a nested state like the parameters of equal shape."""
    if world == 1 or not any(isinstance(parameter, _kind()) for parameter in parameters):
        return tree
    by_shape = {tuple(parameter.shape): parameter for parameter in parameters}
    match tree:
        case Tensor():
            like = by_shape.get(tuple(tree.shape))
            return tree if like is None else _spread(tree, like)
        case Mapping():
            return {key: taken_up(value, parameters, world) for key, value in tree.items()}
        case list() | tuple():
            return [taken_up(value, parameters, world) for value in tree]
    return tree


def _spread(full: Tensor, like: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements)
