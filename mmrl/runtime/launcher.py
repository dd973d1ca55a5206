"""Checks of the launcher's environment variables: processes that would not join, unsafe restarts."""

from __future__ import annotations

import os

import torch

from mmrl.config.schema import ConfigError


def check_joined() -> None:
    """Raise `ConfigError` if a launcher started several processes that do not join one group."""
    number, words = os.environ.get("WORLD_SIZE", ""), ""
    if number not in ("", "1"):
        words = f"WORLD_SIZE is {number}"
    # `accelerate launch --cpu` sets these variables for several processes, without joining them.
    if not number and os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_ADDR" in os.environ:
        number, words = "N", "MASTER_ADDR is set as for several processes"
    if words:
        command = (
            f"accelerate launch --config_file configs/accelerate/ddp.yaml --num_processes {number}"
            if torch.accelerator.is_available()
            else f"ACCELERATE_USE_CPU=true torchrun --nproc_per_node {number}"
        )
        raise ConfigError(
            f"{words}, but accelerate sees one process, so several runs would write into one folder; start "
            f"with `{command} -m mmrl ...`; unset {words.split()[0]} to start one process"
        )


def check_restarts() -> None:
    """Raise `ConfigError` if torchrun would restart processes with a store of stale addresses.

    torchrun's agents share one store across restarts, so a restarted process may wait for the address of a
    process that has ended. Half of the restarts on two machines hung.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigError(
            "processes that the launcher starts again would find addresses of ended ones in its store, and "
            "hang; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of the launcher on every "
            "machine and give it --rdzv_backend c10d, or leave out --max_restarts"
        )
