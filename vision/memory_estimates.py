"""Memory estimates of token policies: generation, and one micro-batch of learning."""

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

COLUMNS = 5  # mask, advantage, weight, and the engine's log-probability and entropy
ROWS = 4  # of the passes that are measured
LENGTHS = (4, 20, 36)  # tokens of their answers
T = TypeVar("T")


@memory_estimate
def tokens(config: Config, policy: TokenPolicy, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Estimate generation with an unquantised cache, the step table, and a micro-batch of learning.

    Generation counts for `vision.generate` in this process alone; servers and workers have memory of their
    own. Activations and logits are measured with a few short rows and extrapolated. They are linear in
    tokens, because fused attention kernels store no scores; only the mask of packed rows is quadratic. All
    answers are assumed to have the maximal length, all prompts the length of the longest of `prompts`.
    """
    engine, module = config.rollout.engine[0], getattr(policy, "module", None)
    if not prompts or not isinstance(module, step_model.StepModel):  # of images, or of no model
        return {}
    defaults = {name: p.default for name, p in find("engine", engine.name).options.items()}
    options = defaults | dict(engine.options)
    longest = options.get("max_completion_length") or _longest_recorded(policy, prompts)
    if not longest:
        return {}
    encoded = max((policy.prompt_encoder.encode(prompt) for prompt in prompts), key=lambda e: len(e.ids))
    number = config.rollout.num_generations
    total = config.rollout.num_prompts * number
    others = 1 + len(config.references)  # log-probabilities of `old` and of each reference
    sizes = {"step table": 4.0 * total * longest * (COLUMNS + others)}  # float32
    if engine.name == "vision.generate" and not sampled_elsewhere(config):
        at_once = min(options["batch_size"] or total, total)
        sizes |= _generation(policy, encoded, at_once, math.ceil(at_once / number), longest)
    if config.learn.num_iterations:
        sizes |= _learning(config, policy, module, encoded, longest)
    return sizes


def _longest_recorded(policy: TokenPolicy, prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest recorded answer; 0 without answers."""
    texts = [answer.text or "" for prompt in prompts for answer in prompt.answers]
    return max((len(policy.prompt_encoder.answer(text)) for text in texts), default=0)


def cache_bytes(policy: TokenPolicy, prompt_tokens: int, answer_tokens: int) -> float:
    """Bytes of unquantised keys and values of some tokens of prompts and answers."""
    text = policy.model.config.get_text_config()
    # Not every config has this; some have it as null or under an alias.
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * head_size(text) * policy.compute.itemsize
    return float(token * (prompt_tokens + answer_tokens))


def _generation(
    policy: TokenPolicy, encoded: EncodedPrompt, rows: int, prompts: int, longest: int
) -> dict[str, float]:
    """Estimate the cache, the prefill and decoding passes, and packed weights."""
    length = len(encoded.ids)
    before = (prompts if policy.share_prefix else rows) * length  # tokens of prompts in the cache
    with torch.no_grad(), evaluating(policy.model), _autocast(policy):
        prefill, reader = _measured(lambda: CachedReader(policy, [encoded]))
        decode, _ = _measured(lambda: _decoded(CachedReader(policy, [encoded] * ROWS)))
        packed = float(packed_bytes(policy.model))
    prompt_pass = max(0.0, prefill - cache_bytes(policy, length, 0)) * prompts
    # The pass of a token of ROWS rows, without the prompt's pass before it.
    row_pass = max(0.0, decode - prefill - cache_bytes(policy, 0, ROWS * room_of(1))) / ROWS * rows
    del reader
    return {
        "rollouts/cache": cache_bytes(policy, before, rows * room_of(longest)),
        "rollouts/passes": max(prompt_pass, row_pass),
        # Weights without numbers are on no device; `room` says which one trains.
        "rollouts/packed weights": 0.0 if torch.cuda.is_available() else packed,
        "rollouts/cast weights": _cast_bytes(policy),
    }


def _decoded(reader: CachedReader) -> object:
    """Decode one token of every row."""
    logits = reader.read(None)
    return draw_tokens(logits, torch.full((len(logits),), 0.5, device=logits.device))


def _learning(
    config: Config, policy: TokenPolicy, module: step_model.StepModel, encoded: EncodedPrompt, longest: int
) -> dict[str, float]:
    """Estimate the activations of a micro-batch for the backward pass, and its logits."""
    learn, rollout = config.learn, config.rollout
    extra: Set[str] = Pieces(Stream(config.seed)).make_field(config, "objective").needs.outputs
    prompts, rows, micros = micro_batch(
        len(encoded.ids), longest, math.ceil(rollout.num_prompts / learn.minibatches),
        rollout.num_generations, learn.micro_batch_steps,
    )  # fmt: skip
    measured = {ROWS * length: _states_bytes(policy, module, encoded, length) for length in LENGTHS}
    # A packed sequence has a mask of all its pairs of tokens.
    kept = prompts * extrapolated(measured, rows * longest // prompts, square=module.checkpointed)
    kept += _cast_bytes(policy)
    logits = _logits_bytes(policy, extra, rows * longest)
    head = policy.model.get_output_embeddings().weight
    logits += head.nbytes if head.requires_grad else 0  # its new gradient, until it is added
    gradients = float(sum(p.nbytes for p in module.parameters() if p.requires_grad))
    if micros == 1:
        # The backward pass allocates gradients while it frees activations: only the larger of both counts.
        kept, logits = max(0.0, kept - gradients), max(0.0, logits - max(0.0, gradients - kept))
    return {"learning/activations": kept, "learning/logits": logits}


def micro_batch(
    before: int, longest: int, prompts: int, answers: int, max_steps: int
) -> tuple[int, int, int]:
    """Prompts and rows of the largest micro-batch, and the number of micro-batches of a mini-batch.

    Args:
        before: Tokens of a prompt.
        longest: Tokens of an answer.
        prompts: Prompts of the mini-batch.
        answers: Answers to a prompt.
        max_steps: The most tokens of a micro-batch, unless it has a single row.
    """
    group = before + answers * longest
    if group <= max_steps:
        whole = min(prompts, max_steps // group)
        return whole, whole * answers, math.ceil(prompts / whole)
    rows = max(1, min(answers, (max_steps - before) // longest))
    return 1, rows, prompts * math.ceil(answers / rows)


def extrapolated(measured: Mapping[int, float], count: int, *, square: bool) -> float:
    """Extrapolate a line, or a parabola if `square`, through measured values to a count.

    `measured` maps three counts to values, in rising order; a line goes through the first and the last.
    """
    (x, f), (y, g), (z, h) = measured.items()
    bend = ((h - g) / (z - y) - (g - f) / (y - x)) / (z - x) if square else 0.0  # divided differences
    slope = (g - f) / (y - x) if square else (h - f) / (z - x)
    return max(0.0, f + slope * (count - x) + bend * (count - x) * (count - y))


def _states_bytes(
    policy: TokenPolicy, module: step_model.StepModel, encoded: EncodedPrompt, length: int
) -> int:
    """Activation memory kept for backward by `ROWS` answers of equal length to one prompt."""
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
    """Memory of logits and their gradients, for the tokens of one chunk of `chunked_logp`."""
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
    """Autocast to the precision of a policy, with weights cast before, so that passes do not count it."""
    kind = policy.core.get_input_embeddings().weight.device.type
    with torch.autocast(kind, policy.compute, enabled=policy.compute in LOW):
        for layer in _cast_layers(policy):
            nn.functional.linear(layer.weight.new_zeros(1, layer.in_features), layer.weight, layer.bias)
        yield


def _cast_layers(policy: TokenPolicy) -> list[nn.Linear]:
    """Linear layers with trained float32 weights that compute in 16 bits."""
    layers = (m for m in policy.model.modules() if isinstance(m, nn.Linear)) if policy.compute in LOW else ()
    return [m for m in layers if m.weight.requires_grad and m.weight.dtype == torch.float32]


def _cast_bytes(policy: TokenPolicy) -> float:
    """Bytes of the 16-bit copies of float32 weights."""
    return float(sum(layer.weight.numel() * policy.compute.itemsize for layer in _cast_layers(policy)))


def _measured(call: Callable[[], T]) -> tuple[float, T]:
    """Peak memory of a call in bytes, and its result."""
    with Allocations() as counted:
        result = call()
    return float(counted.peak), result
