"""Pipelines whose networks share the times: a network for high noise, and one for low noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.runtime.fsdp import is_shard, sharded_parts


class StagedNetwork(nn.Module):
    """Networks that share the times: each row goes through the network of its time.

    Args:
        networks: By the name of the pipeline's component, from noise to data.
        lowest: Smallest time of each network, the last one 0.
    """

    def __init__(self, networks: Mapping[str, nn.Module], lowest: Mapping[str, float]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(networks)
        self.lowest = [lowest[name] for name in networks]

    def stages(self, sigma: Tensor) -> Tensor:
        """Number the networks of times (B,): 0 for the one nearest to noise."""
        # Pipelines compare timesteps of 1000 times sigma, in float32.
        timestep = 1000 * sigma.float()
        return torch.stack([timestep < 1000 * lowest for lowest in self.lowest]).sum(0)

    def forward(self, run: Callable[[nn.Module, Tensor], Tensor], sigma: Tensor) -> Tensor:
        """Compute results (B, ...) of rows at times (B,).

        `run` takes a network and the indices (R,) of its rows, and returns their results (R, ...). Networks
        without rows add nothing, but take part in the backward pass, and in collectives of shards.
        """
        stages = self.stages(sigma)
        order, results, nothing = [], [], []
        for i, network in enumerate(self.networks.values()):
            rows = (stages == i).nonzero()[:, 0]
            if len(rows):
                order.append(rows)
                results.append(run(network, rows))
            elif meets(network):
                nothing.append(run(network, stages.new_zeros(1)).flatten()[:0].sum())
            elif torch.is_grad_enabled():
                learning = (parameter for parameter in network.parameters() if parameter.requires_grad)
                nothing += [parameter.flatten()[:0].sum() for parameter in learning]
        whole = torch.cat(results)[torch.cat(order).argsort()]
        return whole + sum(nothing) if nothing else whole


def meets(network: nn.Module) -> bool:
    """Whether a forward pass of this network is a collective, in which every process has to take part."""
    if not sharded_parts(network):
        return False
    return torch.is_grad_enabled() or any(map(is_shard, network.parameters()))


def most_calls(calls: int, device: torch.device) -> int:
    """Largest number of network calls of any process; every process must call this function."""
    most = torch.tensor(calls, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def network_of(pipe: Any, stages: Mapping[str, float]) -> nn.Module:
    """Find the network of a pipeline; several, of `PipelineFamily.stages`, are wrapped in one module."""
    networks = {name: getattr(pipe, name) for name in stages}
    return next(iter(networks.values())) if len(networks) == 1 else StagedNetwork(networks, stages)


def chosen_networks(stages: Mapping[str, float], which: str) -> tuple[str, ...]:
    """Name the trained networks: all for `both`, or the one of `high` or `low` noise."""
    names = tuple(stages)
    if which == "both":
        return names
    if len(names) == 1:
        raise ConfigError(
            f"`networks: {which}` chooses between networks for high and for low noise, but this model has "
            "one network for all; leave `networks` out"
        )
    return names[:1] if which == "high" else names[-1:]
