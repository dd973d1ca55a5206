"""Runs in the workers of vLLM servers, without mmrl: `--worker-extension-cls mmrl_vllm_worker.Reloadable`."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def plain_linear(layer: Any, remove_weight: bool) -> None:
    """Let a layer multiply with its weights as they are."""
    layer.cpu_linear = torch.nn.functional.linear


class Reloadable:
    """Makes a server on a CPU take new weights, where packed copies would keep the old ones in silence.

    A server on a GPU packs nothing.
    """


importlib.import_module("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm = plain_linear
