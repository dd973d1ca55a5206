"""Memory estimates of token policies, for generation and for one micro-batch of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mmrl.config.binding import Pieces
from mmrl.config.engine_checks import makes
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
from mmrl.vision.decoding.image_reader import ImageReader
from mmrl.vision.decoding.token_steps import TokenSteps, continued
from mmrl.vision.models.image_writer import IMAGE
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt

COLUMNS = 5  # step table columns: mask, advantage, weight, and the engine's log-probability and entropy
ROWS = 4  # rows of the forward passes that are measured
LENGTHS = (4, 36)  # answer lengths of these passes, in tokens
MIDDLE = 20  # a third length, where memory is quadratic
T = TypeVar("T")


@memory_estimate
def tokens(config: Config, policy: TokenPolicy, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Estimate the bytes for generation, for the step table, and for one micro-batch of training.

    Generation is included if `vision.generate` or `vision.generate_images` samples in this process. An
    unquantised cache is assumed; images add the rows of guidance and the VQ decoder. Activations and logits
    are measured on a few short rows and extrapolated. They grow linearly with the token count, because fused
    attention kernels store no scores; only the mask of packed rows grows quadratically. All answers get the
    maximal length, and all prompts the length of the longest prompt in `prompts`.
    """
    engine, module = config.rollout.engine[0], getattr(policy, "module", None)
    if not prompts or not isinstance(module, step_model.StepModel):  # not a token policy
        return {}
    defaults = {name: p.default for name, p in find("engine", engine.name).options.items()}
    options = defaults | dict(engine.options)
    here = not sampled_elsewhere(config)
    drawn = makes(config.policy, config.rollout.engine) == "images"
    size = _largest_image(policy, options, prompts) if drawn else (0, 0)
    longest, layout = _longest_answer(policy, options, prompts, size)
    if not longest:
        return {}
    encoded = max((policy.prompt_encoder.encode(prompt) for prompt in prompts), key=lambda e: len(e.ids))
    asked, number = _Asked.of(policy, encoded, longest, layout), config.rollout.num_generations
    total = config.rollout.num_prompts * number
    others = 1 + len(config.references)  # log-probability columns: `old`, and one per reference
    sizes = {"step table": 4.0 * total * longest * (COLUMNS + others)}  # 4 bytes: float32
    if here and (drawn or engine.name == "vision.generate"):
        at_once = min(options["batch_size"] or total, total)
        sizes |= _generation(policy, asked, at_once, math.ceil(at_once / number))
    if here and drawn:
        sizes |= {"images": 3.0 * total * math.prod(size), "decoding/images": _decoder_bytes(policy, size)}
    if config.learn.num_iterations:
        sizes |= _learning(config, policy, module, asked)
    return sizes


@dataclass(frozen=True)
class _Asked:
    """Sizes of a worst-case row: the longest prompt combined with the longest answer and largest image."""

    prompt: EncodedPrompt
    longest: int  # number of tokens of the answer
    layout: Tensor  # (L,) tokens of the image, with `IMAGE` for image tokens; empty for a text
    negative: EncodedPrompt | None  # negative prompt; None without guidance

    @staticmethod
    def of(policy: Any, prompt: EncodedPrompt, longest: int, layout: Tensor) -> _Asked:
        guided = len(layout) and policy.guidance_scale != 1
        negative = policy.images.unconditional(policy.negative_prompt) if guided else None
        return _Asked(prompt, longest, layout, negative)

    @property
    def text(self) -> int:
        """Number of tokens of the answer before its image."""
        return self.longest - len(self.layout)

    def begun(self, policy: Any) -> list[EncodedPrompt]:
        """List the inputs before an image: prompt and text, and the negative prompt if there is guidance."""
        begin = torch.tensor([policy.images.begin])
        own = continued(self.prompt, begin.expand(max(1, self.text)))
        return [own, *([continued(self.negative, begin)] if self.negative else [])]


def _largest_image(policy: Any, options: Mapping[str, Any], prompts: Sequence[Prompt]) -> tuple[int, int]:
    """Return height and width of the largest image that the engine generates for the prompts."""
    sizes = (policy.images.size(options["height"], options["width"], prompt) for prompt in prompts)
    return max(sizes, key=math.prod)


def _longest_answer(
    policy: Any, options: Mapping[str, Any], prompts: Sequence[Prompt], size: tuple[int, int]
) -> tuple[int, Tensor]:
    """Return the number of tokens of the longest answer (0: no answers), and the layout (L,) of its image.

    All turns of a recorded answer count. `size` is the height and width of a generated image, or (0, 0).
    """
    nothing, encoder = torch.zeros(0, dtype=torch.int64), policy.prompt_encoder
    if math.prod(size):
        layout = policy.images.layout_of(*size)
        return options["max_text_length"] + len(layout), layout
    if longest := options.get("max_completion_length"):
        return longest, nothing
    found = [(0, nothing)]
    for answer in (answer for prompt in prompts for answer in prompt.answers):
        if answer.image is None:
            texts = [answer.text or "", *(turn.text for turn in answer.turns)]
            found.append((sum(len(encoder.answer(text)) for text in texts), nothing))
        else:
            layout = policy.images.layout_of(*answer.image.shape[1:])
            found.append((len(encoder.plain.ids(answer.text or "")) + len(layout), layout))
    return max(found, key=lambda each: each[0])


def _decoder_bytes(policy: Any, size: tuple[int, int]) -> float:
    """Measure the bytes that the VQ decoder takes for one image; images are decoded one after another."""
    writer = policy.images
    layout = writer.layout_of(*size)
    ids = torch.where(layout == IMAGE, writer.ids[0], layout)
    return _measured(lambda: writer.decode(ids, *size))[0]


def cache_bytes(policy: TokenPolicy, prompt_tokens: int, answer_tokens: int) -> float:
    """Return the bytes of an unquantised KV cache with this many prompt and answer tokens."""
    text = policy.model.config.get_text_config()
    # `head_dim` may be missing, null or an alias.
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * head_size(text) * policy.compute.itemsize
    return float(token * (prompt_tokens + answer_tokens))


def _generation(policy: Any, asked: _Asked, rows: int, prompts: int) -> dict[str, float]:
    """Estimate the bytes of generation: KV cache, prefill and decoding passes, and copies of weights."""
    drawn = len(asked.layout)
    inputs = asked.begun(policy) if drawn else [asked.prompt]
    if drawn and asked.text:
        prompts = rows  # every image has its own text in its input
    first, *second = (len(encoded.ids) for encoded in inputs)
    # Tokens in the cache: `before` of the inputs, and `after` for the generated tokens.
    before = (prompts if policy.share_prefix else rows) * first
    before += (1 if policy.share_prefix else rows) * sum(second)
    after = len(inputs) * rows * room_of(drawn - 1 if drawn else asked.longest)

    def begin(number: int) -> Any:
        own, *others = (CachedReader(policy, [encoded] * number) for encoded in inputs)
        if not drawn:
            return own
        layouts = [asked.layout[1:]] * number
        return ImageReader(own, *(others or [None]), policy.guidance_scale, policy.images.ids, layouts)

    with torch.no_grad(), evaluating(policy.model), _autocast(policy):
        prefill, _ = _measured(lambda: begin(1))
        reader = begin(ROWS)
        decode, _ = _measured(lambda: _decoded(reader))
        packed = float(packed_bytes(policy.model))
    prompt_pass = max(0.0, prefill - cache_bytes(policy, first + sum(second), 0)) * prompts
    # Memory of decoding one token, without the cache that it allocates, measured with ROWS rows and scaled.
    row_pass = max(0.0, decode - cache_bytes(policy, 0, len(inputs) * ROWS * room_of(1))) / ROWS * rows
    return {
        "rollouts/cache": cache_bytes(policy, before, after),
        # During the prefill, the cache of the answers is not allocated yet, so subtract its bytes.
        "rollouts/passes": max(prompt_pass - cache_bytes(policy, 0, after), row_pass),
        # Only CPUs pack weights. These weights are on no device yet: assume a GPU if the machine has a GPU.
        "rollouts/packed weights": 0.0 if torch.cuda.is_available() else packed,
        "rollouts/cast weights": _cast_bytes(policy),
    }


def _decoded(reader: Any) -> object:
    """Sample the first token of every row."""
    logits = reader.read(None)
    return draw_tokens(logits, torch.full((len(logits),), 0.5, device=logits.device))


def _learning(
    config: Config, policy: TokenPolicy, module: step_model.StepModel, asked: _Asked
) -> dict[str, float]:
    """Estimate the bytes of one micro-batch in training: activations kept for backward, and logits."""
    learn, rollout, longest = config.learn, config.rollout, asked.longest
    # With guidance, a micro-batch reads every image again, after one negative prompt.
    second, negative = (len(asked.layout), len(asked.negative.ids)) if asked.negative else (0, 0)
    extra: Set[str] = Pieces(Stream(config.seed)).make_field(config, "objective").needs.outputs
    prompts, rows, micros = micro_batch(
        len(asked.prompt.ids), longest + second, math.ceil(rollout.num_prompts / learn.minibatches),
        rollout.num_generations, max(1, learn.micro_batch_steps - negative),
    )  # fmt: skip

    # A packed sequence has a mask over all pairs of its tokens, so its memory is quadratic.
    lengths = (*LENGTHS, MIDDLE) if module.checkpointed else LENGTHS

    def states(encoded: EncodedPrompt, count: int) -> float:
        drawn = len(asked.layout) > 0
        sizes = {ROWS * n: _states_bytes(policy, module, encoded, n, drawn=drawn) for n in lengths}
        return extrapolated(sizes, count)

    activations = prompts * states(asked.prompt, rows * longest // prompts) + _cast_bytes(policy)
    activations += states(asked.negative, rows * second) if asked.negative else 0.0
    logits = _logits_bytes(policy, module, extra, rows * longest, guided=second > 0)
    head = policy.model.get_output_embeddings().parameters()  # Janus has two heads
    logits += sum(p.nbytes for p in head if p.requires_grad)  # new gradients, before they are accumulated
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


def extrapolated(measured: Mapping[int, float], count: int) -> float:
    """Extrapolate values of two counts to the given count with a line, values of three with a parabola."""
    (x, f), (y, g), *third = measured.items()
    slope = (g - f) / (y - x)
    bend = sum(((h - g) / (z - y) - slope) / (z - x) for z, h in third)  # divided differences
    return max(0.0, f + slope * (count - x) + bend * (count - x) * (count - y))


def _states_bytes(
    policy: Any, module: step_model.StepModel, encoded: EncodedPrompt, length: int, *, drawn: bool = False
) -> int:
    """Measure the activation bytes kept for backward by `ROWS` answers of equal length to one prompt."""
    end = int(policy.images.ids[0]) if drawn else policy.prompt_encoder.end[0]
    steps = TokenSteps(
        (encoded,), torch.zeros(ROWS, dtype=torch.int64), torch.full((ROWS, length), end),
        torch.full((ROWS,), length), torch.ones(ROWS),
    )  # fmt: skip
    with _autocast(policy), Allocations() as counted:
        hidden = module.states(steps)
        live = counted.live
        del hidden
    return live


def _logits_bytes(
    policy: TokenPolicy, module: step_model.StepModel, extra: Set[str], count: int, *, guided: bool = False
) -> float:
    """Measure the bytes of logits and their gradients for one chunk of tokens in `chunked_logp`."""
    head = OutputHead(policy.model)
    weight = head.weight
    most = min(count, max(1, step_model.LOGIT_BYTES // (4 * weight.shape[0] * (1 + guided))))
    sample = min(most, 16)
    states = [
        torch.zeros(sample, weight.shape[1], dtype=policy.compute, device=weight.device, requires_grad=True)
        for _ in range(1 + guided)
    ]
    ids = torch.zeros(sample, dtype=torch.int64, device=weight.device)
    with _autocast(policy), Allocations() as counted:
        values = step_model.chunked_logp(
            states[0], head, ids, torch.ones(sample, device=weight.device),
            policy.prompt_encoder.placeholders, extra & {"entropy"}, images=module.images,
            second=states[1] if guided else None,
        )  # fmt: skip
        torch.autograd.grad(sum(value.sum() for value in values.values()), states)
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
