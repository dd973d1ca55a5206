"""Worker extension of vLLM servers: `--worker-extension-cls mmrl_vllm_worker.Reloadable`.

It runs in the environment of vLLM, without mmrl.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def plain_linear(layer: Any, remove_weight: bool) -> None:
    """Make a layer compute with its weights directly, without a packed copy."""
    layer.cpu_linear = torch.nn.functional.linear


class Reloadable:
    """Worker extension without methods; importing it switches off the packing of weights on CPUs.

    Otherwise a CPU server would still use packed copies of old weights. GPU servers do not pack weights.
    """


importlib.import_module("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm = plain_linear
