"""Refuses launches whose processes would not find each other."""

from __future__ import annotations

import os

import torch

from mmrl.config.schema import ConfigError


def check_joined() -> None:
    """Raise `ConfigError` in one of several processes that a launcher started, and that are not joined."""
    number, words = os.environ.get("WORLD_SIZE", ""), ""
    if number not in ("", "1"):
        words = f"WORLD_SIZE is {number}"
    # What `accelerate launch --cpu` sets for several processes or machines, without joining them.
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
    """Raise `ConfigError` where a launcher would start processes again beside addresses of ended ones.

    Agents of torchrun share one store over all restarts, so a process that is started again may read where an
    ended one listened, and wait for it: half of the restarts on two machines did not come up.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigError(
            "processes that the launcher starts again would find addresses of ended ones in its store, and "
            "hang; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of the launcher on every "
            "machine and give it --rdzv_backend c10d, or leave out --max_restarts"
        )
