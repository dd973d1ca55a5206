"""Weights of which every process holds a part (FSDP2), as whole tensors for the moment of saving and loading.

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
    """Put whole parameters in the place of sharded ones; with `changed` the shards take up what was done to
    them. Every process has to come here."""
    if world == 1:
        yield
        return
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if isinstance(parameter, _kind())
    ]
    # FSDP2 expects shards back whenever a state is loaded; here whole tensors stand in their place.
    hooks = [
        (part._load_state_dict_post_hooks, dict(part._load_state_dict_post_hooks))
        for part in module.modules()
    ]
    fulls: dict[int, nn.Parameter] = {}  # a parameter that two modules share stays one
    for owner, name, parameter in sharded:
        if id(parameter) not in fulls:
            full = parameter.detach().full_tensor()
            fulls[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
        owner._parameters[name] = fulls[id(parameter)]
    for held, _ in hooks if sharded else ():
        held.clear()
    try:
        yield
        if changed:
            for owner, name, parameter in sharded:
                with torch.no_grad():
                    parameter.copy_(_spread(owner._parameters[name].detach(), parameter))
    finally:
        for owner, name, parameter in sharded:
            owner._parameters[name] = parameter
        for held, before in hooks:
            held.update(before)


@contextmanager
def unsharded(module: nn.Module, *, again: bool = True) -> Iterator[None]:
    """Hold every weight whole for a while, so that parts of the module can be called by themselves and as
    often as a process likes. Every process has to come here; `again`: whether forward passes afterwards give
    up what they gathered."""
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
    """Put a weight in the place of a parameter's, and give what was there. Shards are copied: FSDP2 gathers
    from their memory, whatever the parameter points to."""
    if not torch.distributed.is_initialized() or not isinstance(parameter, _kind()):
        held, parameter.data = parameter.data, weight
        return held
    here, there = parameter.to_local().detach(), weight.to_local()
    held = here.clone()
    here.copy_(there)
    there.copy_(held)
    return weight


def give_up(module: nn.Module) -> None:
    """Let go of what was gathered of sharded weights, so that the next pass sees what became of them."""
    for part in _sharded_parts(module):
        part.reshard()


def is_sharded(module: nn.Module) -> bool:
    """Tell whether every process holds a part of the weights, be they gathered for the moment or not."""
    return bool(_sharded_parts(module))


def _sharded_parts(module: nn.Module) -> list[Any]:
    if not torch.distributed.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _name_root(module: nn.Module) -> None:
    """Make the module the root, which FSDP2 takes the first one to be that runs a forward pass."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    module.begin = lambda: None
    register_fsdp_forward_method(module, "begin")
    module.begin()
    del module.begin


def whole(tree: Any, world: int) -> Any:
    """Gather the sharded tensors of a nested state. Every process has to come here."""
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
    """Shard the tensors of a nested state as the parameters of their shape are."""
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
