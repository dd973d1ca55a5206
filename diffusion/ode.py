"""Following the flow to its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmrl.diffusion.flow_math import euler_step, heun_step
from mmrl.diffusion.steps import Asked, Painter

Move = Callable[..., Tensor]


def euler(latents: Tensor, velocity: Tensor, time: Tensor, following: Tensor, flow: Callable) -> Tensor:
    """Step straight on; `flow` is not asked."""
    return euler_step(latents, velocity, time, following)


MOVES: dict[str, Move] = {"euler": euler, "heun": heun_step}


def advance(
    policy: Painter, asked: Asked, latents: Tensor, time: Tensor, following: Tensor, move: Move
) -> Tensor:
    """Take one deterministic step with (B, *L) latents, from a time to the next (both scalars)."""
    rows = len(latents)
    flow = lambda here, at: policy.velocity(here, at, asked)
    here, there = (at.to(latents).expand(rows) for at in (time, following))
    return move(latents, flow(latents, here), here, there, flow)


@torch.no_grad()
def decode_all(policy: Painter, latents: Tensor, batch_size: int) -> list[Tensor]:
    """Decode (B, *L) latents in batches: a list of uint8 pictures or videos on the CPU."""
    size = batch_size or len(latents)
    return [picture for part in latents.split(size) for picture in policy.decode(part)]


def check_finite(latents: Tensor, names: list[str], step: int) -> None:
    """Refuse latents that stopped being numbers."""
    broken = (~latents.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist()
    if broken:
        raise FloatingPointError(
            f"latents of prompt '{names[broken[0]]}' ({len(broken)} of {len(names)} rows) are NaN or "
            f"infinite after denoising step {step}; the network diverged or its precision overflows: look at "
            "the last updates (learning rate, gradient norm), or set `policy.dtype` to bfloat16 or float32"
        )
