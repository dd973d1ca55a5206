"""Memory estimates of token policies, for generation and for one micro-batch of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from mmrl.config.binding import Pieces
from mmrl.config.registry import find, memory_estimate
from mmrl.config.schema import Config
from mmrl.core.onednn import packed_bytes
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.diagnostics.memory_estimates import sampled_elsewhere
from mmrl.kv_cache.hf_cache import head_size
from mmrl.kv_cache.tails import room_of
from mmrl.runtime.allocations import Allocations
from mmrl.runtime.modules import LOW, evaluating
from mmrl.runtime.output_head import OutputHead
from mmrl.vision.decoding import step_model
from mmrl.vision.decoding.decoding import CachedReader, draw_tokens
from mmrl.vision.decoding.token_steps import TokenSteps
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt

COLUMNS = 5  # step table columns: mask, advantage, weight, and the engine's log-probability and entropy
ROWS = 4  # rows of the forward passes that are measured
LENGTHS = (4, 20, 36)  # answer lengths of these passes, in tokens
T = TypeVar("T")


@memory_estimate
def tokens(config: Config, policy: TokenPolicy, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Estimate the bytes for generation, for the step table, and for one micro-batch of training.

    Generation (unquantised cache) is included only if `vision.generate` samples in this process. Activations
    and logits are measured on a few short rows and extrapolated. They grow linearly with the token count,
    because fused attention kernels store no scores; only the mask of packed rows grows quadratically. All
    answers get the maximal length, and all prompts the length of the longest prompt in `prompts`.
    """
    engine, module = config.rollout.engine[0], getattr(policy, "module", None)
    if not prompts or not isinstance(module, step_model.StepModel):  # no token model
        return {}
    defaults = {name: p.default for name, p in find("engine", engine.name).options.items()}
    options = defaults | dict(engine.options)
    longest = options.get("max_completion_length") or _longest_recorded(policy, prompts)
    if not longest:
        return {}
    encoded = max((policy.prompt_encoder.encode(prompt) for prompt in prompts), key=lambda e: len(e.ids))
    number = config.rollout.num_generations
    total = config.rollout.num_prompts * number
    others = 1 + len(config.references)  # log-probability columns: `old`, and one per reference
    sizes = {"step table": 4.0 * total * longest * (COLUMNS + others)}  # 4 bytes: float32
    if engine.name == "vision.generate" and not sampled_elsewhere(config):
        at_once = min(options["batch_size"] or total, total)
        sizes |= _generation(policy, encoded, at_once, math.ceil(at_once / number), longest)
    if config.learn.num_iterations:
        sizes |= _learning(config, policy, module, encoded, longest)
    return sizes


def _longest_recorded(policy: TokenPolicy, prompts: Sequence[Prompt]) -> int:
    """Return the tokens of the longest recorded answer with its turns; 0 without any, or with images."""
    if any(answer.image is not None for prompt in prompts for answer in prompt.answers):
        return 0
    answers = [answer for prompt in prompts for answer in prompt.answers]
    texts = [[answer.text or "", *(turn.text for turn in answer.turns)] for answer in answers]
    return max((sum(len(policy.prompt_encoder.answer(text)) for text in each) for each in texts), default=0)


def cache_bytes(policy: TokenPolicy, prompt_tokens: int, answer_tokens: int) -> float:
    """Return the bytes of an unquantised KV cache with this many prompt and answer tokens."""
    text = policy.model.config.get_text_config()
    # `head_dim` may be missing, null or an alias.
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * head_size(text) * policy.compute.itemsize
    return float(token * (prompt_tokens + answer_tokens))


def _generation(
    policy: TokenPolicy, encoded: EncodedPrompt, rows: int, prompts: int, longest: int
) -> dict[str, float]:
    """Estimate the bytes of generation: KV cache, prefill and decoding passes, and copies of weights."""
    length = len(encoded.ids)
    before = (prompts if policy.share_prefix else rows) * length  # prompt tokens in the cache
    with torch.no_grad(), evaluating(policy.model), _autocast(policy):
        prefill, reader = _measured(lambda: CachedReader(policy, [encoded]))
        decode, _ = _measured(lambda: _decoded(CachedReader(policy, [encoded] * ROWS)))
        packed = float(packed_bytes(policy.model))
    prompt_pass = max(0.0, prefill - cache_bytes(policy, length, 0)) * prompts
    # Measure one decoding step with ROWS rows, without prefill and cache, and scale it to `rows`.
    row_pass = max(0.0, decode - prefill - cache_bytes(policy, 0, ROWS * room_of(1))) / ROWS * rows
    del reader
    return {
        "rollouts/cache": cache_bytes(policy, before, rows * room_of(longest)),
        "rollouts/passes": max(prompt_pass, row_pass),
        # Only CPUs pack weights. The (fake) weights have no device yet: assume a GPU if there is one.
        "rollouts/packed weights": 0.0 if torch.cuda.is_available() else packed,
        "rollouts/cast weights": _cast_bytes(policy),
    }


def _decoded(reader: CachedReader) -> object:
    """Decode one token in every row."""
    logits = reader.read(None)
    return draw_tokens(logits, torch.full((len(logits),), 0.5, device=logits.device))


def _learning(
    config: Config, policy: TokenPolicy, module: step_model.StepModel, encoded: EncodedPrompt, longest: int
) -> dict[str, float]:
    """Estimate the bytes of one micro-batch in training: activations kept for backward, and logits."""
    learn, rollout = config.learn, config.rollout
    extra: Set[str] = Pieces(Stream(config.seed)).make_field(config, "objective").needs.outputs
    prompts, rows, micros = micro_batch(
        len(encoded.ids), longest, math.ceil(rollout.num_prompts / learn.minibatches),
        rollout.num_generations, learn.micro_batch_steps,
    )  # fmt: skip
    measured = {ROWS * length: _states_bytes(policy, module, encoded, length) for length in LENGTHS}
    # Quadratic with packing: the mask of a packed sequence covers all pairs of its tokens.
    activations = prompts * extrapolated(measured, rows * longest // prompts, square=module.checkpointed)
    activations += _cast_bytes(policy)
    logits = _logits_bytes(policy, extra, rows * longest)
    head = policy.model.get_output_embeddings().weight
    logits += head.nbytes if head.requires_grad else 0  # the head's new gradient, before accumulation
    gradients = float(sum(p.nbytes for p in module.parameters() if p.requires_grad))
    if micros == 1:
        # The backward pass allocates gradients while it frees activations: count only the larger amount.
        logits = max(0.0, logits - max(0.0, gradients - activations))
        activations = max(0.0, activations - gradients)
    return {"learning/activations": activations, "learning/logits": logits}


def micro_batch(
    before: int, longest: int, prompts: int, answers: int, max_steps: int
) -> tuple[int, int, int]:
    """Return (prompts, rows) of the largest micro-batch, and the number of micro-batches per minibatch.

    Args:
        before: Tokens of a prompt.
        longest: Tokens of an answer.
        prompts: Number of prompts in the mini-batch.
        answers: Number of answers to each prompt.
        max_steps: Largest number of tokens in a micro-batch; a single row may have more.
    """
    group = before + answers * longest
    if group <= max_steps:
        whole = min(prompts, max_steps // group)
        return whole, whole * answers, math.ceil(prompts / whole)
    rows = max(1, min(answers, (max_steps - before) // longest))
    return 1, rows, prompts * math.ceil(answers / rows)


def extrapolated(measured: Mapping[int, float], count: int, *, square: bool) -> float:
    """Extrapolate measured values to the given count, with a parabola if `square`, else with a line.

    `measured` maps three counts, in rising order, to values. The line goes through the first and the last.
    """
    (x, f), (y, g), (z, h) = measured.items()
    bend = ((h - g) / (z - y) - (g - f) / (y - x)) / (z - x) if square else 0.0  # divided differences
    slope = (g - f) / (y - x) if square else (h - f) / (z - x)
    return max(0.0, f + slope * (count - x) + bend * (count - x) * (count - y))


def _states_bytes(
    policy: TokenPolicy, module: step_model.StepModel, encoded: EncodedPrompt, length: int
) -> int:
    """Measure the activation bytes kept for backward by `ROWS` answers of equal length to one prompt."""
    end = policy.prompt_encoder.end[0]
    steps = TokenSteps(
        (encoded,), torch.zeros(ROWS, dtype=torch.int64), torch.full((ROWS, length), end),
        torch.full((ROWS,), length), torch.ones(ROWS),
    )  # fmt: skip
    with _autocast(policy), Allocations() as counted:
        hidden = module.states(steps)
        live = counted.live
        del hidden
    return live


def _logits_bytes(policy: TokenPolicy, extra: Set[str], count: int) -> float:
    """Measure the bytes of logits and their gradients for one chunk of tokens in `chunked_logp`."""
    head = OutputHead(policy.model)
    weight = head.weight
    most = min(count, max(1, step_model.LOGIT_BYTES // (4 * weight.shape[0])))
    sample = min(most, 16)
    hidden = torch.zeros(sample, weight.shape[1], dtype=policy.compute, device=weight.device)
    hidden.requires_grad_()
    ids = torch.zeros(sample, dtype=torch.int64, device=weight.device)
    with _autocast(policy), Allocations() as counted:
        values = step_model.chunked_logp(
            hidden, head, ids, torch.ones(sample, device=weight.device), policy.prompt_encoder.placeholders,
            extra & {"entropy"},
        )  # fmt: skip
        torch.autograd.grad(sum(value.sum() for value in values.values()), hidden)
    return counted.peak / sample * most


@contextmanager
def _autocast(policy: TokenPolicy) -> Iterator[None]:
    """Autocast in the policy's precision, with weights already cast, to exclude casts from measurements."""
    kind = policy.core.get_input_embeddings().weight.device.type
    with torch.autocast(kind, policy.compute, enabled=policy.compute in LOW):
        for layer in _cast_layers(policy):
            nn.functional.linear(layer.weight.new_zeros(1, layer.in_features), layer.weight, layer.bias)
        yield


def _cast_layers(policy: TokenPolicy) -> list[nn.Linear]:
    """List the linear layers whose trained float32 weights autocast converts to 16 bits."""
    layers = (m for m in policy.model.modules() if isinstance(m, nn.Linear)) if policy.compute in LOW else ()
    return [m for m in layers if m.weight.requires_grad and m.weight.dtype == torch.float32]


def _cast_bytes(policy: TokenPolicy) -> float:
    """Return the bytes of the 16-bit copies that autocast makes of float32 weights."""
    return float(sum(layer.weight.numel() * policy.compute.itemsize for layer in _cast_layers(policy)))


def _measured(call: Callable[[], T]) -> tuple[float, T]:
    """Call a function; return its peak memory in bytes and its result."""
    with Allocations() as counted:
        result = call()
    return float(counted.peak), result
