"""Optimizer state of DeepSpeed ZeRO-1, where every process has a part of it for a flat copy of the weights.

It is saved whole, by parameter, so that any number of processes can load it. Written for DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # a flat copy has no rows and columns


def check(stage: int, optimizer: torch.optim.Optimizer) -> None:
    """Raise for a ZeRO stage or optimizer that would train wrongly or wait for ever."""
    if stage > 1:
        raise ValueError(
            f"of DeepSpeed's stages, ZeRO-{stage} exchanges gradients (3: weights) in the order in which "
            "they come, which differs between processes where one has images and another has none, or "
            "answers are of different lengths; take configs/accelerate/deepspeed_zero1.yaml, or shard with "
            "configs/accelerate/fsdp2.yaml"
        )
    if not isinstance(optimizer, ELEMENTWISE):
        raise ValueError(
            f"DeepSpeed cuts weights out of one flat tensor, and the optimizer {type(optimizer).__name__} "
            "needs their shapes; set learn.optimizer=adamw, or launch with configs/accelerate/ddp.yaml"
        )


def state_of(zero: Any) -> dict[str, Any]:
    """Gather the optimizer's state by parameter. Every process has to call this."""
    from deepspeed.utils import safe_get_full_optimizer_state  # pyright: ignore[reportMissingImports]

    groups = {}
    for number, (flat, state, weights) in enumerate(_groups(zero)):
        # Moments have the shape of the weights; what else there is, such as the step, is one per group.
        cut = [key for key, x in state.items() if isinstance(x, Tensor) and x.shape == flat.shape]
        groups[str(number)] = {
            "shared": {key: value for key, value in state.items() if key not in cut},
            "weights": {
                key: [safe_get_full_optimizer_state(weight, key).cpu() for weight in weights] for key in cut
            },
        }
    return {"zero": groups}


@torch.no_grad()
def take_up(zero: Any, state: Mapping[str, Any]) -> None:
    """Load what `state_of` returned, and the weights that the model has by now."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_set_full_optimizer_state  # pyright: ignore[reportMissingImports]

    for number, (flat, live, weights) in enumerate(_groups(zero)):
        saved = state["zero"][str(number)]
        live |= {**saved["shared"], **{key: torch.zeros_like(flat) for key in saved["weights"]}}
        # DeepSpeed links each weight to its part of the flat state, by itself only at the first step.
        lazy_init_hp_params_optimizer_state(weights, flat, {flat: live})
        for key, values in saved["weights"].items():
            for weight, value in zip(weights, values, strict=True):
                safe_set_full_optimizer_state(weight, value.to(flat.device), key)
    zero.refresh_fp32_params()  # its flat float32 copy still has the weights from before loading


def _groups(zero: Any) -> list[tuple[Tensor, dict[str, Any], list[Tensor]]]:
    """List (this process's part of the flat weights, its state, the weights) of every parameter group."""
    groups = zip(zero.optimizer.param_groups, zero.bit16_groups, strict=True)
    flats = [(group["params"][0], list(weights)) for group, weights in groups]
    return [(flat, zero.optimizer.state[flat], weights) for flat, weights in flats]
