"""Pipelines with several networks, each for a range of times, such as high noise and low noise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.runtime.fsdp import is_shard, sharded_parts


class StagedNetwork(nn.Module):
    """Networks for different ranges of times; each row runs through the network for its time.

    Args:
        networks: Maps component names of the pipeline to networks, in order from noise to data.
        lowest: Maps these names to the smallest time of each network; the last is 0.
    """

    def __init__(self, networks: Mapping[str, nn.Module], lowest: Mapping[str, float]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(networks)
        self.lowest = [lowest[name] for name in networks]

    def stages(self, sigma: Tensor) -> Tensor:
        """Return the index of the network for each time (B,); 0 is the network for the highest noise."""
        return stage_numbers(self.lowest, sigma)

    def forward(self, run: Callable[[nn.Module, Tensor], Tensor], sigma: Tensor) -> Tensor:
        """Run each row through the network for its time `sigma` (B,); returns the results (B, ...).

        `run` takes a network and the indices (R,) of its rows, and returns their results (R, ...). Networks
        without rows add 0, so that they join the backward pass and the collectives of sharded networks.
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


def stage_numbers(lowest: Sequence[float], sigma: Tensor) -> Tensor:
    """Return the stage index of each time (B,); `lowest` holds the smallest time of each stage."""
    # As in the pipelines, compare timesteps (1000 times sigma) in float32.
    timestep = 1000 * sigma.float()
    return torch.stack([timestep < 1000 * low for low in lowest]).sum(0)


def check_trained(stages: Mapping[str, float], trained: Collection[str], times: Tensor) -> None:
    """Raise `ConfigError` unless at least one recorded time is in the range of a trained network."""
    met = {list(stages)[i] for i in stage_numbers(list(stages.values()), times).tolist()}
    if not met & set(trained):
        raise ConfigError(
            f"no step in `stochastic` of `diffusion.denoise` is one of the trained network "
            f"'{' or '.join(trained)}': they run from time {times.max():.3f} to {times.min():.3f}, and "
            f"the networks end at {', '.join(f'{low:g}' for low in stages.values())}; move `stochastic`, "
            "or set `policy.networks: both`"
        )


def meets(network: nn.Module) -> bool:
    """Return whether a forward pass of this network is a collective call that all processes must join."""
    if not sharded_parts(network):
        return False
    return torch.is_grad_enabled() or any(map(is_shard, network.parameters()))


def most_calls(calls: int, device: torch.device) -> int:
    """Return the largest number of network calls over all processes; every process must call this."""
    most = torch.tensor(calls, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def network_of(pipe: Any, stages: Mapping[str, float]) -> nn.Module:
    """Return the network of a pipeline as one module; several networks are put into a `StagedNetwork`."""
    networks = {name: getattr(pipe, name) for name in stages}
    return next(iter(networks.values())) if len(networks) == 1 else StagedNetwork(networks, stages)


def chosen_networks(stages: Mapping[str, float], which: str) -> tuple[str, ...]:
    """Return the names of the networks to train: all for `both`, or the one for `high` or `low` noise."""
    names = tuple(stages)
    if which == "both":
        return names
    if len(names) == 1:
        raise ConfigError(
            f"`networks: {which}` chooses between networks for high and for low noise, but this model has "
            "one network for all; leave `networks` out"
        )
    return names[:1] if which == "high" else names[-1:]
