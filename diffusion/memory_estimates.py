"""Memory estimates of flow policies: encoders, autoencoder, denoising paths and network passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mmrl.config.binding import Pieces
from mmrl.config.registry import find, memory_estimate
from mmrl.config.schema import Config
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Unit
from mmrl.diffusion.model_family import Request, sizes_of
from mmrl.diffusion.sizes import check_engine_size, result_size
from mmrl.diffusion.steps import Conditioning, FlowPolicy, FlowRow
from mmrl.runtime.allocations import Allocations
from mmrl.runtime.modules import with_values

ENGINE = "diffusion.denoise"
Measure = Callable[[FlowPolicy, Conditioning, tuple[int, ...], int], int]


@memory_estimate
def paths(config: Config, policy: FlowPolicy, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Estimate bytes by phase: encoders, autoencoder, latents of a step's rollouts, network passes.

    All rows are assumed to have the largest size of `prompts`. An offloaded component counts only in the
    phase that uses it, `encoding` or `decoding`. Text encoders do not count if the disk cache has all
    `prompts`.
    """
    if not hasattr(policy, "pipe"):  # not a pipeline, but a model that writes image tokens
        return {}
    engine = config.rollout.engine[0]  # the innermost engine
    if engine.name == ENGINE:
        defaults = {name: p.default for name, p in find("engine", ENGINE).options.items()}
        options = defaults | dict(engine.options)
        usual = options["num_frames"], options["height"], options["width"]
        check_engine_size(policy.family, policy.pipe, usual, ENGINE)
        wanted = [result_size(policy.family, policy.pipe, prompt, usual) for prompt in prompts] or [usual]
    else:
        options = dict[str, Any]()
        wanted = [size for prompt in prompts for size in sizes_of(prompt.answers)]
    if not wanted:
        return parts(policy, [])
    frames, height, width = max(wanted, key=math.prod)
    requests = [Request.of(prompt, (frames, height, width)) for prompt in prompts]
    sizes = parts(policy, requests)
    shape = policy.family.latent_shape(policy.pipe, height, width, frames)
    rows = config.rollout.num_prompts * config.rollout.num_generations
    guidance = options.get("guidance_scale", policy.family.unguided)
    if engine.name == ENGINE:
        # A path stores the start and the result of every step; without a solver, only the end.
        states = 1 + (options["num_inference_steps"] if options["solver"] else 0)
        sizes["paths"] = rows * states * math.prod(shape) * policy.precision.itemsize
    if not requests:
        return sizes
    conditioning = conditioning_of(policy, max(requests, key=lambda request: len(request.text)), guidance)
    measure = partial(extrapolated, policy, conditioning, shape)
    if engine.name == ENGINE:
        at_once = min(options["batch_size"] or rows, rows)
        sizes["rollouts/passes"] = measure(sampling_bytes, at_once)
        sizes["decoding/pixels"] = measure(decoding_bytes, at_once)
    if config.learn.num_iterations:
        whole, at_once = micro_batch(config, policy, options, rows, conditioning.passes)
        activations = measure(learning_bytes, at_once)
        # One backward pass allocates gradients while it frees activations: count only the larger amount.
        gradients = sum(p.nbytes for p in policy.module.parameters() if p.requires_grad)
        sizes["learning/activations"] = max(0.0, activations - gradients * (whole == at_once))
    return sizes


def parts(policy: FlowPolicy, requests: Sequence[Request]) -> dict[str, float]:
    """Return the bytes of the frozen components, keyed by the phase in which they are on the device."""
    frozen, stay = policy.frozen, "encoders and decoder"
    sizes = {stay: 0.0}
    text, vae = (float(frozen.nbytes(group)) for group in ("text_encoders", "vae"))
    if "text_encoders" not in frozen.offload:
        sizes[stay] += text
    elif not policy.stored(requests):
        sizes["encoding/text encoders"] = text
    if "vae" not in frozen.offload:
        sizes[stay] += vae
    else:
        sizes["decoding/autoencoder"] = vae
        sizes["encoding/autoencoder"] = vae * bool(policy.family.images[1])  # encodes source images
    return sizes


def micro_batch(
    config: Config, policy: FlowPolicy, options: Mapping[str, Any], rows: int, passes: int
) -> tuple[int, int]:
    """Count the velocity predictions in a mini-batch and in its largest micro-batch (`passes` calls each)."""
    likelihood = policy.likelihood
    low, high = options.get("stochastic") or (0, options.get("num_inference_steps", 2) - 1)
    stochastic = round((options.get("share") or 1.0) * (options.get("window_size") or high - low))
    row = FlowRow({}, torch.zeros(0), torch.zeros(max(1, stochastic)), torch.zeros(0))
    num_steps = likelihood.length(row)
    unit = Pieces(Stream(config.seed)).make_field(config, "objective").needs.unit
    least = {Unit.STEP: 1, Unit.ROW: num_steps}.get(unit, num_steps * config.rollout.num_generations)
    whole = math.ceil(rows / config.learn.minibatches) * num_steps
    return whole, min(whole, max(least, config.learn.micro_batch_steps // passes))


# ---- measured passes


def extrapolated(
    policy: FlowPolicy, conditioning: Conditioning, shape: tuple[int, ...], measure: Measure, count: int
) -> float:
    """Extrapolate bytes to `count` rows, linearly from measurements with one and two rows."""
    one = measure(policy, conditioning, shape, 1)
    return one + (count - 1) * (measure(policy, conditioning, shape, 2) - one) if count > 1 else one


@contextmanager
def real_outputs(policy: FlowPolicy) -> Iterator[None]:
    """Make text encoders with fake weights return real zeros, because pipelines read their output values."""
    with ExitStack() as stack:
        for part in policy.frozen.parts("text_encoders"):
            hook = part.register_forward_hook(lambda module, inputs, output: tree_map(with_values, output))
            stack.callback(hook.remove)
        yield


@torch.no_grad()
def conditioning_of(policy: FlowPolicy, request: Request, guidance: float) -> Conditioning:
    """Encode a request and its negative prompt; works with real or fake weights."""
    family, pipe, passes = policy.family, policy.pipe, policy.passes(guidance)
    policy.frozen.on(policy.device, "text_encoders", "vae")
    with real_outputs(policy):
        (condition,) = family.encode(pipe, [request], policy.max_sequence_length)
        if passes == 1:
            return Conditioning.of([condition], guidance, passes)
        without = Request(policy.negative_prompt, request.images, request.size)
        negative = family.encode_negative(pipe, without, policy.max_sequence_length)
    return Conditioning.of([condition], guidance, passes, [negative])


def _velocity(policy: FlowPolicy, conditioning: Conditioning, shape: tuple[int, ...], rows: int) -> Tensor:
    """Compute velocities of `rows` zero latents, at a denoising time in the range of a trained network."""
    latents = torch.zeros(rows, *shape, dtype=policy.precision)
    time = 1.0 if next(iter(policy.stages)) in policy.trained else 0.0
    sigma = torch.full((rows,), time, dtype=policy.precision)
    return policy.velocity(latents, sigma, conditioning[torch.zeros(rows, dtype=torch.int64)])


@torch.no_grad()
def sampling_bytes(policy: FlowPolicy, conditioning: Conditioning, shape: tuple[int, ...], rows: int) -> int:
    """Measure the peak memory of one velocity prediction without gradients, as in sampling."""
    with Allocations() as counted:
        _velocity(policy, conditioning, shape, rows)
    return counted.peak


@torch.no_grad()
def decoding_bytes(policy: FlowPolicy, conditioning: Conditioning, shape: tuple[int, ...], rows: int) -> int:
    """Measure the peak memory of decoding `rows` latents."""
    policy.frozen.on(policy.device, "vae")
    latents = torch.zeros(rows, *shape, dtype=policy.precision, device=policy.device)
    with Allocations() as counted:
        policy.family.decode(policy.pipe, latents)
    return counted.peak


def learning_bytes(policy: FlowPolicy, conditioning: Conditioning, shape: tuple[int, ...], rows: int) -> int:
    """Measure the peak memory of a forward and backward pass, without the gradients of the weights."""
    learning = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in learning]
    drop = lambda parameter: setattr(parameter, "grad", None)
    hooks = [parameter.register_post_accumulate_grad_hook(drop) for parameter in learning]
    with Allocations() as counted:
        _velocity(policy, conditioning, shape, rows).sum().backward()
    for parameter, hook, grad in zip(learning, hooks, before, strict=True):
        hook.remove()
        parameter.grad = grad
    return counted.peak
