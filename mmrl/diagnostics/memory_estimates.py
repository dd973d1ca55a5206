"""Estimates of the memory of a training run, before it starts."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mmrl.config.binding import Pieces
from mmrl.config.consistency import OWN_WEIGHTS
from mmrl.config.registry import Entry, find, memory_estimate, pieces
from mmrl.config.schema import Config, Piece, as_piece
from mmrl.core.protocols import Policy
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.runtime.low_bit import scales_of
from mmrl.runtime.modules import loading_onto

PROMPTS = 8  # number of prompts whose lengths are measured
SIDE = 64  # side of the test matrix for the size of optimizer states
# GPUs by memory in GiB, and the fraction of memory that CUDA and fragmentation leave usable.
CARDS = {
    8: "RTX 4060", 12: "RTX 3060", 16: "RTX 4080", 24: "RTX 4090", 40: "A100 40 GB", 48: "L40S",
    80: "H100", 141: "H200",
}  # fmt: skip
USABLE = 0.9


@memory_estimate
def training(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Estimate the memory of weights, gradients, optimizer state, references, and other models.

    An additional trained model or a teacher is assumed to be as large as the policy.
    """
    module = policy.module
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers(), *scales_of(module))}
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in learning)
    sizes = sum(parameter.nbytes for parameter in learning)
    weights = sum(tensor.nbytes for tensor in tensors.values())

    def state(optimizer: Piece) -> float:
        return numbers * optimizer_bytes(find("optimizer", optimizer.name).target)

    references = others = 0.0
    for name, piece in config.references.items():
        # `holds` says what a reference stores; `frozen` and `ema` store a copy of the trained weights.
        holds = getattr(find("reference", piece.name).target, "holds", OWN_WEIGHTS)
        if holds == OWN_WEIGHTS:
            references += sizes
        elif holds == "a model that learns":
            mover = as_piece(piece.options.get("optimizer", "adamw"), f"references.{name}.optimizer")
            references += weights + sizes + state(mover)
        elif holds:
            others += weights
    return {
        "weights": weights,
        "learning/gradients": sizes,
        "optimizer": state(config.learn.optimizer),
        "references": references,
    } | ({"models that do not learn": others} if others else {})


@memory_estimate
def reward_models(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Estimate the memory of reward models in this process, from the rewards' function `model_bytes`.

    `model_bytes` gets all options of the reward, including defaults, and the configuration of the run.
    """
    total = 0.0
    for piece in config.rewards:
        entry = find("reward", piece.name)
        if "workers" not in piece.options and (count := getattr(entry.target, "model_bytes", None)):
            defaults = {name: option.default for name, option in entry.options.items()}
            total += count({**defaults, **piece.options}, config)
    return {"reward models": total}


SHARDED = ("weights", "learning/gradients", "optimizer", "references")  # components that FSDP2 shards


def sharded(config: Config, module: nn.Module, memory: Mapping[str, float], world: int) -> dict[str, float]:
    """Estimate the memory of one FSDP2 process: shards, one gathered layer, and all weights if it samples."""
    shares = {name: size / world if name in SHARDED else size for name, size in memory.items()}
    blocks = [block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part]
    layers = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    shares["learning/a layer"] = max([*layers, *(p.nbytes for p in module.parameters())])
    if not sampled_elsewhere(config):
        shares["rollouts/whole weights"] = memory["weights"] * (1 - 1 / world)  # all but its own shard
    return shares


def sampled_elsewhere(config: Config) -> bool:
    """Whether other processes sample the rollouts, so that this process needs no memory for them."""
    engines = [find("engine", piece.name).target for piece in config.rollout.engine]
    return any(getattr(engine, "answers_elsewhere", False) for engine in engines)


def optimizer_bytes(make: Callable[..., torch.optim.Optimizer]) -> float:
    """Measure the bytes of optimizer state per weight for an optimizer with default options."""
    weight = nn.Parameter(torch.zeros(SIDE, SIDE))
    weight.grad = torch.ones_like(weight)
    optimizer = make([("weight", weight)])
    optimizer.step()
    leaves = tree_leaves(optimizer.state_dict())
    # Ignore step counters, which are scalars: one per parameter, not per weight.
    return sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor) and t.ndim) / weight.numel()


# ---- all estimates of a run


def in_use(kind: str, config: Config, on: str = "") -> list[Entry]:
    """List the pieces of a kind from mmrl itself and from the packages, such as vision, that a run uses."""
    named = [config.policy, config.data, *config.rollout.engine, *config.rewards]
    scopes = {"", *(piece.name.rpartition(".")[0] for piece in named if ":" not in piece.name)}
    return [entry for entry in pieces(kind, on) if entry.scope in scopes]


def estimate_memory(config: Config, world: int = 1, shards: bool = False) -> Mapping[str, float]:
    """Estimate a run's memory, as bytes by component, from some prompts and a policy of fake tensors.

    Args:
        config: The run.
        world: Number of processes; the estimate is for one of them.
        shards: Whether FSDP2 shards the weights.
    """
    builder = Pieces(Stream(config.seed))
    data = builder.make_field(config, "data")
    with loading_onto(None, empty=True):
        policy = builder.make_field(config, "policy")
    rollout = replace(config.rollout, num_prompts=math.ceil(config.rollout.num_prompts / world))
    prompts = [*data[:PROMPTS], *largest_size(data)]
    memory = estimate_with(replace(config, rollout=rollout), policy, prompts)
    return sharded(config, policy.module, memory, world) if shards else memory


def largest_size(data: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompt that requests the largest image or video, as a list; empty without sizes."""
    sized = (prompt for prompt in data if prompt.size)
    area = lambda prompt: max(1, prompt.size.num_frames) * prompt.size.height * prompt.size.width
    return [prompt for prompt in [max(sized, key=area, default=None)] if prompt]


def estimate_with(config: Config, policy: Policy, prompts: list[Prompt]) -> Mapping[str, float]:
    """Sum all memory estimates that apply to a run; return the bytes by component."""
    total: dict[str, float] = defaultdict(float)
    for entry in in_use("memory_estimate", config):
        for name, size in entry.target(config, policy, prompts).items():
            total[name] += size
    return {name: size for name, size in total.items() if size}


def peak(memory: Mapping[str, float]) -> float:
    """Return the peak memory in bytes.

    A component `phase/name`, such as "rollouts/cache", exists in one phase of a step; others always exist.
    """
    phases: dict[str, float] = defaultdict(float)
    for name, size in memory.items():
        phase, slash, _ = name.rpartition("/")
        phases[phase if slash else ""] += size
    always = phases.pop("", 0.0)
    return always + max(phases.values(), default=0.0)


def smallest_card(needed: float) -> int:
    """Return the memory in GiB of the smallest GPU in `CARDS` with `needed` usable bytes; 0 if none."""
    return min((size for size in CARDS if needed <= USABLE * size * 2**30), default=0)


def room() -> tuple[float, str]:
    """Return the memory of the training device in bytes (0: unknown), and its name."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[1]), torch.cuda.get_device_name()
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), "main memory"
    except (AttributeError, ValueError, OSError):  # not available on every system
        return 0.0, "memory of unknown size"
